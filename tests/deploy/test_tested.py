"""The tables of what was run: made of tests that exist, of the versions that nodes take, and of nothing that failed."""

from __future__ import annotations

from typing import Any

import pytest

from connector.vllm_version import TESTED
from deploy.local.paths import ROOT
from deploy.tested import (
    ASPECTS,
    FAMILY_TESTS,
    FEATURES,
    KINDS,
    asked_for,
    families_table,
    feature_files,
    features_table,
    missing,
    of_kind,
    read,
    spliced,
)
from tests.recorded import Recorder, with_run

FIRST = of_kind(KINDS[0], ASPECTS[0]) + "]"


def test_every_test_of_the_results_exists() -> None:
    assert list(missing(read())) == []
    gone = "tests/e2e/test_families.py::test_that_was_renamed"
    assert list(missing({"0.32.0": [gone]})) == [gone]


def test_results_are_of_versions_that_nodes_take() -> None:
    assert set(read()) == set(TESTED)


def test_every_kind_and_feature_names_tests_that_exist() -> None:
    named = {f"tests/e2e/{test}" for each in FEATURES for test in (*each.ours, *each.stock_tests)}
    named |= {of_kind(kind, aspect) for kind in KINDS for aspect in ASPECTS}
    assert list(missing({"any": [name for name in named if "::" in name]})) == []
    assert [file for file in feature_files() if not (ROOT / file).is_file()] == []
    families = (ROOT / "tests/e2e/families.py").read_text(encoding="utf-8")
    assert [kind.name for kind in KINDS if f'Family("{kind.name}"' not in families] == []


def test_what_passes_is_noted_and_what_fails_struck_out() -> None:
    other = f"{FAMILY_TESTS}::another[x]"
    before = {"1": {FIRST, other}, "2": {FIRST}}
    after = with_run(before, "1", {FIRST: False, "tests/e2e/test_idle_rest.py::test_of_no_table": True})
    assert after == {"1": {other}, "2": {FIRST}}
    assert with_run(after, "1", {FIRST: True})["1"] == {FIRST, other}


@pytest.mark.parametrize(
    ("phases", "passed"),
    [
        (["setup+", "call+", "teardown+"], {"x": True}),
        (["setup+", "call-", "teardown+"], {"x": False}),
        (["setup+", "call+", "teardown-"], {"x": False}),
        (["setup-"], {"x": False}),
        (["setup+"], {}),
    ],
    ids=str,
)
def test_a_test_has_passed_when_its_call_has_and_nothing_of_it_failed(
    phases: list[str], passed: dict[str, bool]
) -> None:
    """One that was interrupted, or skipped, has done neither."""
    recorder = Recorder()
    for phase in phases:
        recorder.pytest_runtest_logreport(report(phase[:-1], "passed" if phase.endswith("+") else "failed"))
    assert recorder.passed == passed


def report(when: Any, outcome: Any) -> pytest.TestReport:
    return pytest.TestReport("x", ("x.py", 0, "x"), {}, outcome, None, when)


def test_a_cell_names_the_versions_on_which_it_passed() -> None:
    ours = {f"tests/e2e/{test}" for each in FEATURES for test in each.ours}
    [first, second, *_] = list(features_table({"1": ours, "2": set()}))[2:]
    assert first.startswith(f"| {FEATURES[0].title} | run | read |")
    assert second.startswith(f"| {FEATURES[1].title} | run | read |")
    [row, *others] = list(families_table({"1": {of_kind(KINDS[0], each) + "]" for each in ASPECTS}}))[2:]
    assert "| run on 1 | right: run on 1 |" in row
    assert all("| no |" in other for other in others)


def test_no_kind_s_name_is_the_beginning_of_another_s() -> None:
    """Its tests would stand for the other, and its command run both."""
    names = [kind.name for kind in KINDS]
    assert [one for one in names for other in names if one != other and one in other] == []


def test_a_page_without_a_place_for_a_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="not found"):
        spliced("text\n", "kinds", [])


def test_families_tests_are_asked_for() -> None:
    assert asked_for(FIRST)
    assert not asked_for("tests/e2e/test_idle_rest.py::test_any")
