"""A read ends exactly once, with the outcome that its way deserves, and never runs before its verdict."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from connector.kv_groups import ReadSize
from connector.messages import Question, Verdict
from connector.metadata import ReadEnd, ReadOutcome
from connector.pending_reads import OverdueRead, PendingReads
from connector.verifier import ReadVerdict

HERE = ("10.0.0.1", 5600)
ASKED = Question("P", "remote", "nonce-1")
SIZE = ReadSize(attention=300, state=40, spared=100)


def flying(deadline: float = 10) -> PendingReads:
    flights = PendingReads(deadline)
    flights.begin("r", ASKED, HERE, SIZE, now=0)
    return flights


@pytest.mark.parametrize("verdict", list(Verdict))
def test_a_landed_read_is_good_only_with_a_good_verdict(verdict: Verdict) -> None:
    flights = flying()
    flights.posted("r", now=0)
    assert flights.landed(["r"], now=2) == {HERE: [ASKED]}
    landing = flights.judged(ReadVerdict("nonce-1", verdict), now=2.5)
    assert landing is not None
    assert (landing.request_id, landing.verify_seconds) == ("r", 0.5)
    if verdict in (Verdict.HELD, Verdict.RELEASED_BY_YOU):
        assert landing.end == ReadEnd("nonce-1", ReadOutcome.VERIFIED, 300, 40)
        assert landing.spared == 100
    else:
        assert landing.end == ReadEnd("nonce-1", ReadOutcome.NOT_HELD, 0, 0)
        assert landing.spared == 0
    assert len(flights) == 0


def test_no_verdict_in_time_is_asked_for_once_more_and_then_counts_as_no_good_one() -> None:
    flights = flying()
    flights.landed(["r"], now=1)
    assert flights.judged(ReadVerdict("nonce-1", None), now=6) is None
    assert flights.awaits_verdict()
    assert flights.unanswered() == {HERE: [ASKED]}
    assert flights.unanswered() == {}
    landing = flights.judged(ReadVerdict("nonce-1", None), now=11)
    assert landing is not None
    assert landing.end.outcome is ReadOutcome.UNVERIFIED
    assert flights.unanswered() == {}


@pytest.mark.parametrize("verdict", list(Verdict))
def test_a_late_verdict_is_as_good_as_one_in_time(verdict: Verdict) -> None:
    flights = flying()
    flights.landed(["r"], now=1)
    flights.judged(ReadVerdict("nonce-1", None), now=6)
    landing = flights.judged(ReadVerdict("nonce-1", verdict), now=7)
    assert landing is not None
    assert (landing.end.outcome is ReadOutcome.VERIFIED) == verdict.good
    assert landing.verify_seconds == 6


def test_a_verdict_settles_nothing_before_the_last_byte_and_nothing_twice() -> None:
    flights = flying()
    assert flights.judged(ReadVerdict("nonce-1", Verdict.HELD), now=1) is None
    assert flights.judged(ReadVerdict("another", Verdict.HELD), now=1) is None
    flights.landed(["r"], now=1)
    assert flights.judged(ReadVerdict("nonce-1", Verdict.HELD), now=1) is not None
    assert flights.judged(ReadVerdict("nonce-1", Verdict.HELD), now=1) is None


def test_why_a_read_failed() -> None:
    assert flying().failed("r").outcome is ReadOutcome.PEER_UNREACHABLE
    posted = flying()
    posted.posted("r", now=0)
    assert posted.failed("r").outcome is ReadOutcome.TRANSFER_FAILED


def test_a_read_is_given_up_once_at_its_deadline() -> None:
    flights = flying(deadline=10)
    flights.posted("r", now=0)
    assert flights.overdue(9.9) == []
    assert flights.overdue(10) == [OverdueRead("r", "P", "nonce-1", live=True)]
    assert flights.overdue(20) == []
    assert flights.failed("r").outcome is ReadOutcome.NO_PROGRESS


def test_a_long_read_goes_on_while_its_peer_answers_whatever_it_says() -> None:
    flights = flying(deadline=100)
    flights.posted("r", now=0)
    assert flights.probes(0.9) == {}
    for now, verdict in ((1.0, Verdict.HELD), (2.5, Verdict.EXPIRED), (4.0, Verdict.RELEASED_BY_ANOTHER)):
        ((asked,),) = flights.probes(now).values()
        assert asked.nonce != ASKED.nonce
        assert flights.probes(now + 1) == {}, "one at a time"
        assert flights.judged(ReadVerdict(asked.nonce, verdict), now) is None
        assert flights.overdue(now) == []
    flights.landed(["r"], now=5)
    assert flights.judged(ReadVerdict("nonce-1", Verdict.HELD), now=5) is not None


def test_a_read_is_given_up_when_its_peer_is_silent() -> None:
    flights = flying(deadline=100)
    flights.posted("r", now=0)
    ((asked,),) = flights.probes(1).values()
    flights.judged(ReadVerdict(asked.nonce, None), now=6)
    assert flights.overdue(6) == [OverdueRead("r", "P", "nonce-1", live=True)]
    assert flights.failed("r").outcome is ReadOutcome.NO_PROGRESS


def test_the_answer_to_a_probe_never_judges_a_read() -> None:
    """It was given before the last byte came."""
    flights = flying()
    flights.posted("r", now=0)
    ((asked,),) = flights.probes(1).values()
    flights.landed(["r"], now=1.5)
    assert flights.judged(ReadVerdict(asked.nonce, Verdict.HELD), now=2) is None
    assert len(flights) == 1
    assert flights.probes(10) == {}


def test_the_answer_to_an_earlier_reads_probe_says_nothing_of_the_next() -> None:
    flights = flying()
    flights.posted("r", now=0)
    ((asked,),) = flights.probes(1).values()
    flights.failed("r")
    flights.begin("r", Question("P", "remote", "nonce-2"), HERE, SIZE, now=2)
    flights.posted("r", now=2)
    flights.judged(ReadVerdict(asked.nonce, None), now=3)
    assert flights.overdue(3) == []


def test_a_read_that_never_reached_its_peer_is_not_live_when_given_up() -> None:
    flights = flying(deadline=10)
    assert flights.overdue(10) == [OverdueRead("r", "P", "nonce-1", live=False)]
    assert flights.failed("r").outcome is ReadOutcome.PEER_UNREACHABLE


def test_waiting_for_the_verdict_is_not_the_reads_fault() -> None:
    flights = flying(deadline=10)
    flights.landed(["r"], now=9)
    assert flights.overdue(100) == []


def test_the_second_attempt_is_not_settled_by_the_first_ones_verdict() -> None:
    flights = flying()
    flights.failed("r")
    flights.begin("r", Question("P", "remote", "nonce-2"), HERE, SIZE, now=1)
    flights.landed(["r"], now=2)
    assert flights.judged(ReadVerdict("nonce-1", Verdict.HELD), now=3) is None
    assert flights.judged(ReadVerdict("nonce-2", Verdict.HELD), now=3) is not None


def test_questions_of_one_peer_go_together() -> None:
    flights = PendingReads(10)
    for name, address in (("a", HERE), ("b", HERE), ("c", ("10.0.0.2", 5600))):
        flights.begin(name, Question("P", name, "n-" + name), address, SIZE, now=0)
    asked = flights.landed(["a", "b", "c"], now=1)
    assert {address: [one.nonce for one in questions] for address, questions in asked.items()} == {
        HERE: ["n-a", "n-b"],
        ("10.0.0.2", 5600): ["n-c"],
    }
