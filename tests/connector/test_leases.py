"""Leases: the verdict on a read, and how each lease ended."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.leases import LeaseEnd, LeaseTable
from connector.messages import Verdict
from tests.connector.tickets import EXAMPLES


def table(ranks: int = 1, memory: float = 60.0, capacity: int = 100) -> LeaseTable:
    return LeaseTable(ranks=ranks, memory=memory, capacity=capacity)


def test_a_stranger_is_unknown() -> None:
    assert table().verify("r", "n") is Verdict.UNKNOWN


def test_what_is_held_is_good_for_every_reader() -> None:
    leases = table()
    leases.open("r", readers=1, now=0.0)
    assert leases.verify("r", "a") is leases.verify("r", "b") is Verdict.HELD
    assert Verdict.HELD.good


def test_a_read_that_ends_the_lease_is_good_for_its_own_nonce_only() -> None:
    leases = table()
    leases.open("r", readers=1, now=0.0)
    leases.record_reads("r", {"a": 1})
    ended = leases.end("r", now=2.5)
    assert ended is not None
    assert (ended.ending, ended.held_for) == (LeaseEnd.READ, 2.5)
    assert leases.verify("r", "a") is Verdict.RELEASED_BY_YOU
    assert leases.verify("r", "b") is Verdict.RELEASED_BY_ANOTHER
    assert not leases.verify("r", "b").good


def test_an_expired_lease_is_bad() -> None:
    leases = table()
    leases.open("r", readers=1, now=0.0)
    ended = leases.end("r", now=30.0)
    assert ended is not None
    assert ended.ending is LeaseEnd.EXPIRED
    assert leases.verify("r", "a") is Verdict.EXPIRED
    assert not Verdict.EXPIRED.good


def test_a_read_that_only_some_ranks_saw_is_not_complete() -> None:
    leases = table(ranks=2)
    leases.open("r", readers=1, now=0.0)
    leases.record_reads("r", {"a": 1})
    leases.end("r", now=30.0)
    assert leases.verify("r", "a") is Verdict.EXPIRED


def test_ranks_may_report_in_different_steps() -> None:
    leases = table(ranks=2)
    leases.open("r", readers=1, now=0.0)
    leases.record_reads("r", {"a": 1})
    leases.record_reads("r", {"a": 1})
    leases.end("r", now=1.0)
    assert leases.verify("r", "a") is Verdict.RELEASED_BY_YOU


def test_a_lease_for_three_readers_is_good_for_each_of_them() -> None:
    leases = table()
    leases.open("r", readers=3, now=0.0)
    leases.record_reads("r", {"a": 1, "b": 1})
    leases.record_reads("r", {"c": 1})
    ended = leases.end("r", now=1.0)
    assert ended is not None
    assert ended.ending is LeaseEnd.READ
    assert all(leases.verify("r", nonce) is Verdict.RELEASED_BY_YOU for nonce in "abc")


def test_a_complete_read_stays_good_when_the_lease_runs_out_for_the_others() -> None:
    leases = table()
    leases.open("r", readers=2, now=0.0)
    leases.record_reads("r", {"a": 1})
    leases.end("r", now=30.0)
    assert leases.verify("r", "a") is Verdict.RELEASED_BY_YOU
    assert leases.verify("r", "b") is Verdict.EXPIRED


def test_a_release_on_demand_is_counted_apart() -> None:
    leases = table()
    leases.open("r", readers=1, now=0.0)
    assert leases.request_release("r")
    assert not leases.request_release("r")
    assert leases.verify("r", "a") is Verdict.HELD
    ended = leases.end("r", now=0.5)
    assert ended is not None
    assert ended.ending is LeaseEnd.RELEASED
    assert leases.verify("r", "a") is Verdict.RELEASED_BY_ANOTHER


def test_nothing_can_be_done_to_a_lease_that_is_not_held() -> None:
    leases = table()
    leases.record_reads("r", {"a": 1})
    assert leases.end("r", now=0.0) is None
    assert not leases.request_release("r")
    assert not leases.holds("r")


def test_ended_leases_are_forgotten_by_age() -> None:
    leases = table(memory=60.0)
    leases.open("old", readers=1, now=0.0)
    leases.end("old", now=1.0)
    leases.open("new", readers=1, now=100.0)
    leases.end("new", now=100.0)
    assert leases.verify("old", "a") is Verdict.UNKNOWN
    assert leases.verify("new", "a") is Verdict.EXPIRED


def test_ended_leases_are_bounded_in_number() -> None:
    leases = table(capacity=10)
    for index in range(50):
        leases.open(f"r{index}", readers=1, now=0.0)
        leases.end(f"r{index}", now=0.0)
    assert leases.remembered == 10
    assert leases.verify("r49", "a") is Verdict.EXPIRED
    assert leases.verify("r39", "a") is Verdict.UNKNOWN


@pytest.mark.parametrize("ranks", [1, 2])
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    events=st.lists(
        st.tuples(st.sampled_from(["open", "read", "end", "ask"]), st.sampled_from("xy"), st.sampled_from("abc"))
    )
)
def test_good_means_held_or_completed_by_that_nonce(ranks: int, events: list[tuple[str, str, str]]) -> None:
    """Against a plain model: after any history a verdict is good only if it must be."""
    leases = table(ranks=ranks)
    held: set[str] = set()
    seen: dict[tuple[str, str], int] = {}
    for now, (event, name, nonce) in enumerate(events):
        if event == "open":
            leases.open(name, readers=1, now=now)
            held.add(name)
            seen = {key: count for key, count in seen.items() if key[0] != name}
        elif event == "read":
            leases.record_reads(name, {nonce: 1})
            seen[name, nonce] = seen.get((name, nonce), 0) + (name in held)
        elif event == "end":
            leases.end(name, now=now)
            held.discard(name)
        else:
            leases.request_release(name)
        for each in "xy":
            for other in "abc":
                good = each in held or seen.get((each, other), 0) >= ranks
                assert leases.verify(each, other).good == good
    assert len(leases) == len(held)
