"""The tests of vLLM's own that fail here, each for a reason, and what a run says against that list. Pure.

Both runs have such a list: that with our classes (`ledger.toml`), and that through the proxy (`entrypoints.toml`).
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ledger:
    """`differences`: test → why it fails here. `left_out`: test → what it wants that is not there.

    `page`: the sentences for users, for the page "What differs from vLLM".
    """

    differences: Mapping[str, str]
    left_out: Mapping[str, str]
    page: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a run. `new`: failures without a reason. `mended`: with one, and passed. `gone`: not there."""

    passed: int
    skipped: int
    expected: int
    new: tuple[str, ...]
    mended: tuple[str, ...]
    gone: tuple[str, ...]

    @property
    def good(self) -> bool:
        """Whether nothing happened that has no reason."""
        return not self.new

    @property
    def exact(self) -> bool:
        """Whether, besides, each reason is still one."""
        return not (self.new or self.mended or self.gone)


def read(text: str) -> Ledger:
    """Out of TOML: `[[differences]]` and `[[left_out]]`, each with a `reason` and its `tests`, some with a `page`.

    Raises ValueError for a test that stands there twice, or without a reason.
    """
    raw = tomllib.loads(text)
    differences = raw.get("differences", [])
    page = tuple(" ".join(part["page"].split()) for part in differences if "page" in part)
    return Ledger(_reasons(differences), _reasons(raw.get("left_out", [])), page)


def _reasons(parts: list[dict[str, object]]) -> dict[str, str]:
    reasons: dict[str, str] = {}
    for part in parts:
        reason, tests = part.get("reason"), part.get("tests")
        if not isinstance(reason, str) or not reason.strip() or not isinstance(tests, list):
            raise ValueError(f"an entry wants a reason and its tests: {part}")
        for test in tests:
            if test in reasons:
                raise ValueError(f"{test} stands there twice")
            reasons[test] = " ".join(reason.split())
    return reasons


def judge(outcomes: Mapping[str, str], known: Mapping[str, str]) -> Verdict:
    """`outcomes`: test → passed, failed or skipped. `known`: the failures that have a reason."""
    failed = {test for test, outcome in outcomes.items() if outcome == "failed"}
    passed = {test for test, outcome in outcomes.items() if outcome == "passed"}
    return Verdict(
        passed=len(passed),
        skipped=len(outcomes) - len(passed) - len(failed),
        expected=len(failed & known.keys()),
        new=tuple(sorted(failed - known.keys())),
        mended=tuple(sorted(passed & known.keys())),
        gone=tuple(sorted(known.keys() - outcomes.keys())),
    )
