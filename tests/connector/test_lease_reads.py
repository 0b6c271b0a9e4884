"""A lease ends for a rank when enough reads are complete: not before, not by forgery, and told once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from connector.leases import MOST_NONCES, LeaseEnd, LeaseReads, LeaseTable
from connector.messages import NO_NONCE, ReadDone, Verdict
from connector.transfer_params import MOST_READERS


def test_one_read_ends_the_lease_and_is_told_once() -> None:
    seen = LeaseReads()
    seen.lease("r", 1)
    assert seen.take_done() == set()
    seen.notice("r", ReadDone("alias", "n1", 1))
    assert seen.take_done() == {"r"}
    assert seen.take_report() == {"r": {"n1": 1}}
    assert seen.take_report() == {}
    seen.forget("r")
    assert (seen.take_done(), len(seen)) == (set(), 0)


def test_every_decode_rank_of_a_read_must_have_told() -> None:
    seen = LeaseReads()
    seen.lease("r", 1)
    seen.notice("r", ReadDone("alias", "n1", 2))
    assert seen.take_done() == set()
    seen.notice("r", ReadDone("alias", "n1", 2))
    assert seen.take_done() == {"r"}


def test_two_readers_need_two_nonces_however_often_one_of_them_tells() -> None:
    seen = LeaseReads()
    seen.lease("r", 2)
    for _ in range(5):
        seen.notice("r", ReadDone("alias", "n1", 1))
    assert seen.take_done() == set()
    seen.notice("r", ReadDone("alias", "n2", 1))
    assert seen.take_done() == {"r"}


def test_a_notice_before_the_lease_waits_for_it() -> None:
    seen = LeaseReads()
    seen.notice("r", ReadDone("alias", NO_NONCE, 1))
    assert seen.take_done() == set()
    assert seen.take_report() == {}
    seen.lease("r", 1)
    assert seen.take_done() == {"r"}
    assert seen.take_report() == {"r": {NO_NONCE: 1}}


def test_as_many_readers_as_may_be_declared_end_a_lease_also_after_failed_tries() -> None:
    seen, leases = LeaseReads(), LeaseTable(ranks=1, memory=60.0, capacity=10)
    seen.lease("r", MOST_READERS)
    leases.open("alias", readers=MOST_READERS, now=0.0)
    for reader in range(MOST_READERS):
        seen.notice("r", ReadDone("alias", f"first-try-of-{reader}", 2))
    for reader in range(MOST_READERS):
        assert seen.take_done() == set()
        seen.notice("r", ReadDone("alias", f"nonce-of-{reader}", 1))
        leases.note_reads("alias", seen.take_report()["r"])
    assert seen.take_done() == {"r"}
    ended = leases.end("alias", now=1.0)
    assert ended is not None
    assert ended.ending is LeaseEnd.READ
    assert leases.judge("alias", "nonce-of-0") is Verdict.RELEASED_BY_YOU


def test_forged_nonces_cost_bounded_memory_and_end_nothing_more() -> None:
    seen = LeaseReads()
    seen.lease("r", MOST_NONCES + 1)
    for number in range(2 * MOST_NONCES):
        seen.notice("r", ReadDone("alias", f"n{number}", 1))
    assert seen.take_done() == set()
    assert len(seen.take_report()["r"]) == MOST_NONCES


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["x", "y", "z"])), max_size=40), st.integers(1, 3))
def test_done_means_exactly_enough_distinct_nonces(notices: list[tuple[str, str]], wanted: int) -> None:
    seen = LeaseReads()
    for request_id in "ab":
        seen.lease(request_id, wanted)
    for request_id, nonce in notices:
        seen.notice(request_id, ReadDone("alias", nonce, 1))
    expected = {r for r in "ab" if len({nonce for request_id, nonce in notices if request_id == r}) >= wanted}
    assert seen.take_done() == expected
