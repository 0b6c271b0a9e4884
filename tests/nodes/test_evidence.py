"""Conclusions from the results of known-answer tests, and which node is wrong."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.nodes.evidence import Evidence


@pytest.fixture
def evidence() -> Evidence:
    return Evidence()


def test_a_pair_that_failed_is_barred_until_it_passes(evidence: Evidence) -> None:
    evidence.record_failed(("p1", "d1"), "far apart", 0)
    assert not evidence.bars().allow("p1", "d1")
    assert evidence.bars().pairs["p1", "d1"] == "far apart"
    evidence.record_passed(("p1", "d1"))
    assert not evidence.bars()


def test_of_two_nodes_alone_it_is_not_known_which_one_is_wrong(evidence: Evidence) -> None:
    evidence.record_failed(("p1", "d1"), "far apart", 0)
    assert dict(evidence.bars().nodes) == {}
    assert evidence.bars().allow("p1", "d2")


def test_a_node_that_fails_with_a_proved_one_is_the_wrong_one(evidence: Evidence) -> None:
    evidence.record_passed(("p1", "d1"))
    evidence.record_failed(("p1", "d2"), "far apart", 0)
    bars = evidence.bars()
    assert dict(bars.nodes) == {"d2": "far apart"}
    assert not bars.allow("p2", "d2"), "barred from those that it was never tried with"
    assert bars.allow("p1", "d1")


def test_one_that_passes_with_another_is_barred_from_the_one_alone(evidence: Evidence) -> None:
    evidence.record_passed(("p1", "d1"))
    evidence.record_failed(("p1", "d2"), "far apart", 0)
    evidence.record_passed(("p2", "d2"))
    bars = evidence.bars()
    assert dict(bars.nodes) == {}
    assert not bars.allow("p1", "d2")
    assert bars.allow("p2", "d2")


def test_which_node_is_wrong_shows_when_a_third_one_comes(evidence: Evidence) -> None:
    evidence.record_failed(("p1", "d1"), "far apart", 0)
    evidence.record_passed(("p1", "d2"))
    assert set(evidence.bars().nodes) == {"d1"}


def test_waits_double_up_to_a_limit(evidence: Evidence) -> None:
    now, waits = 0, list[int]()
    for _ in range(7):
        evidence.record_failed(("p1", "d1"), "", now)
        due = next(second for second in itertools.count(int(now)) if evidence.due(second))
        assert evidence.due(due) == [("p1", "d1")]
        waits.append(due - now)
        now = due
    assert waits == [30, 60, 120, 240, 480, 600, 600]


def test_a_test_that_could_not_be_made_bars_no_pair_and_ends_no_bar(evidence: Evidence) -> None:
    evidence.record_unanswered(("p1", "d1"), "no ticket", 0)
    assert not evidence.bars()
    assert not evidence.unproved_due("d1", 29)
    assert evidence.unproved_due("d1", 30)
    evidence.record_failed(("p1", "d1"), "far apart", 30)
    evidence.record_unanswered(("p1", "d1"), "no ticket", 60)
    assert evidence.bars().pairs["p1", "d1"] == "far apart"
    assert evidence.due(119) == []
    assert evidence.due(120) == [("p1", "d1")]


def test_a_proved_node_need_not_be_tried(evidence: Evidence) -> None:
    assert evidence.unproved_due("d1", 0)
    evidence.record_passed(("p1", "d1"))
    evidence.record_unanswered(("p2", "d1"), "no ticket", 0)
    assert not evidence.unproved_due("d1", 1000)
    assert not evidence.unproved_due("p2", 0)


def test_a_node_that_came_back_must_be_proved_and_its_bars_last_until_then(evidence: Evidence) -> None:
    evidence.record_passed(("p1", "d1"))
    evidence.record_failed(("p2", "d1"), "far apart", 0)
    evidence.node_joins("d1", 5, {"p1", "p2"})
    assert not evidence.proved("d1")
    assert evidence.proved("p1")
    assert not evidence.bars().allow("p2", "d1")
    assert evidence.due(5) == [("p2", "d1")]


def test_a_node_that_came_back_with_other_partners_has_no_bars_with_the_old_ones(evidence: Evidence) -> None:
    evidence.record_passed(("p1", "d2"))
    evidence.record_failed(("p1", "d1"), "far apart", 0)
    evidence.node_joins("d1", 5, {"p2"})
    assert not evidence.bars()
    assert evidence.unproved_due("d1", 5)


def test_a_node_that_left_is_forgotten(evidence: Evidence) -> None:
    evidence.record_passed(("p1", "d1"))
    evidence.record_failed(("p1", "d2"), "far apart", 0)
    evidence.keep_only(frozenset({"p1", "d1"}))
    assert not evidence.bars()
    evidence.keep_only(frozenset({"p1"}))
    assert not evidence.proved("d1")


_PAIRS = st.tuples(st.sampled_from(["p1", "p2", "p3"]), st.sampled_from(["d1", "d2", "d3"]))


@given(st.lists(st.tuples(_PAIRS, st.sampled_from(["passed", "failed", "unanswered", "restart"]))))
def test_whatever_happens_the_last_result_of_a_pair_counts(events: list[tuple[tuple[str, str], str]]) -> None:
    evidence, last = Evidence(), dict[tuple[str, str], str]()
    for now, (pair, event) in enumerate(events):
        match event:
            case "passed":
                evidence.record_passed(pair)
            case "failed":
                evidence.record_failed(pair, "far apart", now)
            case "unanswered":
                evidence.record_unanswered(pair, "no ticket", now)
            case _:
                evidence.node_joins(pair[0], now, {"d1", "d2", "d3"})
        if event in ("passed", "failed"):
            last[pair] = event
    bars = evidence.bars()
    for pair, event in last.items():
        assert event == "passed" or not bars.allow(*pair)
        assert pair not in bars.pairs or event == "failed"
    assert not any(evidence.proved(name) for name in bars.nodes)
