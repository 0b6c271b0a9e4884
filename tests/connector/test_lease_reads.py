"""A lease ends for a rank when enough reads are complete: not before, not by forgery, and reported once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from connector.leases import MOST_NONCES, LeaseEnd, LeaseReads, LeaseTable
from connector.messages import Verdict
from connector.notifs import NO_NONCE, ReadDone
from connector.transfer_params import MOST_READERS


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
