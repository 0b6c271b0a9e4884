"""What a run of vLLM's tests is held against."""

from pathlib import Path

import pytest

from tests.upstream.ledger import judge, read

LEDGER = Path(__file__).with_name("ledger.toml")


def test_every_difference_has_a_reason() -> None:
    ledger = read(LEDGER.read_text(encoding="utf-8"))
    assert ledger.differences
    assert not ledger.differences.keys() & ledger.left_out.keys()
    assert all(len(reason) > 30 for reason in (*ledger.differences.values(), *ledger.left_out.values()))


@pytest.mark.parametrize(
    "text",
    [
        '[[differences]]\ntests = ["a"]\n',
        '[[differences]]\nreason = " "\ntests = ["a"]\n',
        '[[differences]]\nreason = "why"\n',
        '[[differences]]\nreason = "why"\ntests = ["a", "a"]\n',
    ],
)
def test_an_entry_without_a_reason_or_twice_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"reason|twice"):
        read(text)


def test_a_failure_without_a_reason_is_new_and_fails_the_run() -> None:
    verdict = judge({"a": "failed", "b": "passed", "c": "failed", "d": "skipped"}, {"a": "why"})
    assert (verdict.new, verdict.good) == (("c",), False)
    assert (verdict.passed, verdict.expected, verdict.skipped) == (1, 1, 1)


def test_what_is_mended_or_gone_is_told_and_fails_nothing() -> None:
    verdict = judge({"a": "passed"}, {"a": "why", "b": "why"})
    assert (verdict.mended, verdict.gone, verdict.good) == (("a",), ("b",), True)
