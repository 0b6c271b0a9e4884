"""A read ends exactly once, with the right outcome, and its request never runs before the verdict."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from connector.counters import ReadOutcome
from connector.kv_groups import ReadSize
from connector.messages import Question, Verdict
from connector.metadata import ReadEnd
from connector.pending_reads import LATE_FAILURE, OverdueRead, PendingReads
from connector.verifier import ReadVerdict

HERE = ("10.0.0.1", 5600)
ASKED = Question("P", "remote", "nonce-1")
SIZE = ReadSize(attention=300, state=40, spared=100)


def begun(deadline: float = 10) -> PendingReads:
    reads = PendingReads(deadline)
    reads.on_ordered("r", ASKED, HERE, SIZE, now=0)
    return reads


@pytest.mark.parametrize("verdict", list(Verdict))
def test_a_completed_read_is_good_only_with_a_good_verdict(verdict: Verdict) -> None:
    reads = begun()
    reads.on_posted("r", now=0)
    assert reads.on_completed(["r"], now=2) == {HERE: [ASKED]}
    result = reads.on_verdict(ReadVerdict("nonce-1", verdict), now=2.5)
    assert result is not None
    assert (result.request_id, result.verify_seconds) == ("r", 0.5)
    if verdict in (Verdict.HELD, Verdict.RELEASED_BY_YOU):
        assert result.end == ReadEnd("nonce-1", ReadOutcome.VERIFIED, 300, 40)
        assert result.spared == 100
    else:
        assert result.end == ReadEnd("nonce-1", ReadOutcome.NOT_HELD, 0, 0)
        assert result.spared == 0
    assert len(reads) == 0


def test_no_verdict_in_time_is_asked_for_once_more_and_then_counts_as_no_good_one() -> None:
    reads = begun()
    reads.on_completed(["r"], now=1)
    assert reads.on_verdict(ReadVerdict("nonce-1", None), now=6) is None
    assert reads.awaits_verdict()
    assert reads.repeat_questions() == {HERE: [ASKED]}
    assert reads.repeat_questions() == {}
    result = reads.on_verdict(ReadVerdict("nonce-1", None), now=11)
    assert result is not None
    assert result.end.outcome is ReadOutcome.UNVERIFIED
    assert reads.repeat_questions() == {}


@pytest.mark.parametrize("verdict", list(Verdict))
def test_a_late_verdict_is_as_good_as_one_in_time(verdict: Verdict) -> None:
    reads = begun()
    reads.on_completed(["r"], now=1)
    reads.on_verdict(ReadVerdict("nonce-1", None), now=6)
    result = reads.on_verdict(ReadVerdict("nonce-1", verdict), now=7)
    assert result is not None
    assert (result.end.outcome is ReadOutcome.VERIFIED) == verdict.good
    assert result.verify_seconds == 6


def test_a_verdict_settles_nothing_before_the_last_byte_and_nothing_twice() -> None:
    reads = begun()
    assert reads.on_verdict(ReadVerdict("nonce-1", Verdict.HELD), now=1) is None
    assert reads.on_verdict(ReadVerdict("another", Verdict.HELD), now=1) is None
    reads.on_completed(["r"], now=1)
    assert reads.on_verdict(ReadVerdict("nonce-1", Verdict.HELD), now=1) is not None
    assert reads.on_verdict(ReadVerdict("nonce-1", Verdict.HELD), now=1) is None


def test_why_a_read_failed() -> None:
    assert begun().on_failed("r", 0).outcome is ReadOutcome.PEER_UNREACHABLE
    posted = begun()
    posted.on_posted("r", now=0)
    assert posted.on_failed("r", 2.9).outcome is ReadOutcome.TRANSFER_FAILED


def test_a_transfer_that_fails_late_has_made_no_progress() -> None:
    reads = begun()
    reads.on_posted("r", now=5)
    assert reads.on_failed("r", 5 + LATE_FAILURE).outcome is ReadOutcome.NO_PROGRESS


def test_a_read_is_given_up_once_at_its_deadline() -> None:
    reads = begun(deadline=10)
    reads.on_posted("r", now=0)
    assert reads.overdue(9.9) == []
    assert reads.overdue(10) == [OverdueRead("r", "P", "nonce-1")]
    assert reads.overdue(20) == []
    assert reads.on_failed("r", 0).outcome is ReadOutcome.NO_PROGRESS


def test_a_long_read_goes_on_while_its_peer_answers_whatever_the_verdict() -> None:
    reads = begun(deadline=100)
    reads.on_posted("r", now=0)
    assert reads.probes(0.9) == {}
    for now, verdict in ((1.0, Verdict.HELD), (2.5, Verdict.EXPIRED), (4.0, Verdict.RELEASED_BY_ANOTHER)):
        ((asked,),) = reads.probes(now).values()
        assert asked.nonce != ASKED.nonce
        assert reads.probes(now + 1) == {}, "one at a time"
        assert reads.on_verdict(ReadVerdict(asked.nonce, verdict), now) is None
        assert reads.overdue(now) == []
    reads.on_completed(["r"], now=5)
    assert reads.on_verdict(ReadVerdict("nonce-1", Verdict.HELD), now=5) is not None


def test_a_read_is_given_up_when_its_peer_is_silent() -> None:
    reads = begun(deadline=100)
    reads.on_posted("r", now=0)
    ((asked,),) = reads.probes(1).values()
    reads.on_verdict(ReadVerdict(asked.nonce, None), now=6)
    assert reads.overdue(6) == [OverdueRead("r", "P", "nonce-1")]
    assert reads.on_failed("r", 0).outcome is ReadOutcome.NO_PROGRESS


def test_the_answer_to_a_probe_is_no_verdict_on_a_read() -> None:
    """It was given before the last byte came."""
    reads = begun()
    reads.on_posted("r", now=0)
    ((asked,),) = reads.probes(1).values()
    reads.on_completed(["r"], now=1.5)
    assert reads.on_verdict(ReadVerdict(asked.nonce, Verdict.HELD), now=2) is None
    assert len(reads) == 1
    assert reads.probes(10) == {}


def test_the_answer_to_an_earlier_reads_probe_does_not_count_for_the_next() -> None:
    reads = begun()
    reads.on_posted("r", now=0)
    ((asked,),) = reads.probes(1).values()
    reads.on_failed("r", 0)
    reads.on_ordered("r", Question("P", "remote", "nonce-2"), HERE, SIZE, now=2)
    reads.on_posted("r", now=2)
    reads.on_verdict(ReadVerdict(asked.nonce, None), now=3)
    assert reads.overdue(3) == []


def test_a_read_that_never_reached_its_peer_is_not_live_when_given_up() -> None:
    reads = begun(deadline=10)
    assert reads.overdue(10) == [OverdueRead("r", "P", "nonce-1")]
    assert reads.on_failed("r", 0).outcome is ReadOutcome.PEER_UNREACHABLE


def test_waiting_for_the_verdict_is_not_the_reads_fault() -> None:
    reads = begun(deadline=10)
    reads.on_completed(["r"], now=9)
    assert reads.overdue(100) == []


def test_the_second_read_is_not_settled_by_the_first_ones_verdict() -> None:
    reads = begun()
    reads.on_failed("r", 0)
    reads.on_ordered("r", Question("P", "remote", "nonce-2"), HERE, SIZE, now=1)
    reads.on_completed(["r"], now=2)
    assert reads.on_verdict(ReadVerdict("nonce-1", Verdict.HELD), now=3) is None
    assert reads.on_verdict(ReadVerdict("nonce-2", Verdict.HELD), now=3) is not None


def test_questions_of_one_peer_go_together() -> None:
    reads = PendingReads(10)
    for name, address in (("a", HERE), ("b", HERE), ("c", ("10.0.0.2", 5600))):
        reads.on_ordered(name, Question("P", name, "n-" + name), address, SIZE, now=0)
    asked = reads.on_completed(["a", "b", "c"], now=1)
    assert {address: [one.nonce for one in questions] for address, questions in asked.items()} == {
        HERE: ["n-a", "n-b"],
        ("10.0.0.2", 5600): ["n-c"],
    }
