"""The ledger that a run of vLLM's tests is held against."""

from pathlib import Path

import pytest

from tests.upstream.ledger import judge, read

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ["ledger.toml", "entrypoints.toml"])
def test_every_difference_has_a_reason(name: str) -> None:
    ledger = read((HERE / name).read_text(encoding="utf-8"))
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
    assert (verdict.new, verdict.good, verdict.exact) == (("c",), False, False)
    assert (verdict.passed, verdict.expected, verdict.skipped) == (1, 1, 1)


def test_what_is_mended_or_gone_is_told() -> None:
    verdict = judge({"a": "passed"}, {"a": "why", "b": "why"})
    assert (verdict.mended, verdict.gone, verdict.good) == (("a",), ("b",), True)


@pytest.mark.parametrize(("outcomes", "exact"), [({"a": "failed"}, True), ({"a": "passed"}, False), ({}, False)])
def test_a_ledger_is_exact_while_each_of_its_tests_fails(outcomes: dict[str, str], exact: bool) -> None:
    assert judge(outcomes, {"a": "why"}).exact is exact


def test_sentences_for_users_are_of_the_differences_that_have_one() -> None:
    rows = '[[differences]]\nreason = "why"\npage = """Users\n  see."""\ntests = ["a"]\n'
    assert read(rows + '[[differences]]\nreason = "why"\ntests = ["b"]\n').page == ("Users see.",)
