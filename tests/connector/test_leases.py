"""Leases: the verdict on a read, how each lease ended, and when its reads are complete on a rank."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.leases import MOST_NONCES, LeaseEnd, LeaseReads, LeaseTable
from connector.messages import Verdict
from connector.notifs import NO_NONCE, ReadDone
from connector.transfer_params import MOST_READERS
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


def test_one_read_ends_the_lease_and_is_reported_once() -> None:
    seen = LeaseReads()
    seen.hold("r", 1)
    assert seen.done() == set()
    seen.record("r", ReadDone("alias", "n1", 1))
    assert seen.done() == {"r"}
    assert seen.pop_report() == {"r": {"n1": 1}}
    assert seen.pop_report() == {}
    seen.forget("r")
    assert (seen.done(), len(seen)) == (set(), 0)


def test_every_decode_rank_of_a_read_must_have_given_notice() -> None:
    seen = LeaseReads()
    seen.hold("r", 1)
    seen.record("r", ReadDone("alias", "n1", 2))
    assert seen.done() == set()
    seen.record("r", ReadDone("alias", "n1", 2))
    assert seen.done() == {"r"}


def test_two_readers_need_two_nonces_however_often_one_of_them_tells() -> None:
    seen = LeaseReads()
    seen.hold("r", 2)
    for _ in range(5):
        seen.record("r", ReadDone("alias", "n1", 1))
    assert seen.done() == set()
    seen.record("r", ReadDone("alias", "n2", 1))
    assert seen.done() == {"r"}


def test_a_notice_before_the_lease_waits_for_it() -> None:
    seen = LeaseReads()
    seen.record("r", ReadDone("alias", NO_NONCE, 1))
    assert seen.done() == set()
    assert seen.pop_report() == {}
    seen.hold("r", 1)
    assert seen.done() == {"r"}
    assert seen.pop_report() == {"r": {NO_NONCE: 1}}


def test_as_many_readers_as_may_be_declared_end_a_lease_also_after_failed_tries() -> None:
    seen, leases = LeaseReads(), LeaseTable(ranks=1, memory=60.0, capacity=10)
    seen.hold("r", MOST_READERS)
    leases.open("alias", readers=MOST_READERS, now=0.0)
    for reader in range(MOST_READERS):
        seen.record("r", ReadDone("alias", f"first-try-of-{reader}", 2))
    for reader in range(MOST_READERS):
        assert seen.done() == set()
        seen.record("r", ReadDone("alias", f"nonce-of-{reader}", 1))
        leases.record_reads("alias", seen.pop_report()["r"])
    assert seen.done() == {"r"}
    ended = leases.end("alias", now=1.0)
    assert ended is not None
    assert ended.ending is LeaseEnd.READ
    assert leases.verify("alias", "nonce-of-0") is Verdict.RELEASED_BY_YOU


def test_forged_nonces_cost_bounded_memory_and_end_nothing_more() -> None:
    seen = LeaseReads()
    seen.hold("r", MOST_NONCES + 1)
    for number in range(2 * MOST_NONCES):
        seen.record("r", ReadDone("alias", f"n{number}", 1))
    assert seen.done() == set()
    assert len(seen.pop_report()["r"]) == MOST_NONCES


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["x", "y", "z"])), max_size=40), st.integers(1, 3))
def test_done_means_exactly_enough_distinct_nonces(notices: list[tuple[str, str]], wanted: int) -> None:
    seen = LeaseReads()
    for request_id in "ab":
        seen.hold(request_id, wanted)
    for request_id, nonce in notices:
        seen.record(request_id, ReadDone("alias", nonce, 1))
    expected = {r for r in "ab" if len({nonce for request_id, nonce in notices if request_id == r}) >= wanted}
    assert seen.done() == expected
