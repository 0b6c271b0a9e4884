"""Giving tickets back: each is over exactly once, a silent node gets it again, and nothing is kept for ever.

The rules by themselves, then on a rank with a real side channel.
"""

from __future__ import annotations

import time

import pytest

pytest.importorskip("vllm")

from connector import pending_reads
from connector.messages import Question, Verdict
from connector.metadata import ConnectorMetadata, WorkerReport
from connector.pending_reads import ASK_EVERY, MOST_RETURNS, ReturnOutcome, TicketReturn, TicketReturns
from connector.verifier import ReadVerdict
from connector.worker import ConnectorWorker
from deploy.local.ports import free_ports
from tests.connector.rank import PEER, read_step
from tests.connector.worker import (
    NONCE,
    PATIENCE,
    MakeRank,
    Prefill,
    agent,
    counts,
    report,
    step,
    until,
)

HERE = ("10.0.0.1", 5600)
QUESTION = Question("P", "alias", "nonce-1")


def begun(within: float = 30) -> TicketReturns:
    returns = TicketReturns(within)
    returns.add(TicketReturn(QUESTION, HERE), now=0)
    return returns


def test_it_is_due_at_once_and_not_while_its_answer_is_awaited() -> None:
    returns = begun()
    assert returns.due(0) == {HERE: [QUESTION]}
    assert returns.due(10 * ASK_EVERY) == {}


@pytest.mark.parametrize(
    ("verdict", "outcome"),
    [
        (Verdict.HELD, ReturnOutcome.SENT),
        (Verdict.RELEASED_BY_YOU, ReturnOutcome.SENT),
        (Verdict.RELEASED_BY_ANOTHER, ReturnOutcome.NOT_HELD),
        (Verdict.EXPIRED, ReturnOutcome.NOT_HELD),
        (Verdict.UNKNOWN, ReturnOutcome.NOT_HELD),
    ],
)
def test_its_answer_ends_it_once(verdict: Verdict, outcome: ReturnOutcome) -> None:
    """Another rank may have given it back first."""
    returns = begun()
    returns.due(0)
    assert returns.on_verdict(ReadVerdict("nonce-1", verdict), now=1) is outcome
    assert returns.on_verdict(ReadVerdict("nonce-1", verdict), now=1) is None
    assert len(returns) == 0


def test_a_silent_node_gets_it_again() -> None:
    returns = begun()
    returns.due(0)
    assert returns.on_verdict(ReadVerdict("nonce-1", None), now=5) is None
    assert returns.due(5 + 0.9 * ASK_EVERY) == {}
    assert returns.due(5 + ASK_EVERY) == {HERE: [QUESTION]}


def test_an_answer_to_another_question_or_to_none_is_ignored() -> None:
    returns = begun()
    assert returns.on_verdict(ReadVerdict("nonce-1", Verdict.HELD), now=1) is None, "it was not given back yet"
    returns.due(1)
    assert returns.on_verdict(ReadVerdict("nonce-2", Verdict.HELD), now=1) is None
    assert len(returns) == 1


def test_a_node_that_stays_silent_is_given_up() -> None:
    returns = begun(within=30)
    assert returns.overdue(29.9) == []
    assert returns.overdue(30) == [TicketReturn(QUESTION, HERE)]
    assert len(returns) == 0


def test_of_too_many_the_oldest_are_given_up() -> None:
    returns = TicketReturns(30)
    for number in range(MOST_RETURNS + 2):
        returns.add(TicketReturn(Question("P", "alias", str(number)), HERE), now=0)
    assert [one.nonce for one in returns.overdue(0)] == ["0", "1"]


def test_without_blocks_to_read_the_ticket_only_goes_back(make: MakeRank, prefill: Prefill) -> None:
    worker = make()
    assert not step(worker, read_step("r", NONCE, prefill.port, local=[], remote=[7])).finished_recving
    until(lambda: prefill.returned, bool)
    assert prefill.returned == [(PEER, "remote-r", NONCE)]
    assert not step(worker).finished_recving
    assert prefill.asked == []


def until_returned(worker: ConnectorWorker, metadata: ConnectorMetadata | None = None) -> WorkerReport:
    """The first report of a ticket that was given back, or given up."""
    deadline = time.monotonic() + PATIENCE
    while True:
        step(worker, metadata)
        reported = report(worker)
        if reported.returned:
            return reported
        metadata = None
        assert time.monotonic() < deadline, "no ticket was given back"
        time.sleep(0.005)


@pytest.mark.parametrize("engine", [PEER, "new"])
def test_a_ticket_goes_back_whether_its_node_is_known_or_not(make: MakeRank, prefill: Prefill, engine: str) -> None:
    worker = make()
    reported = until_returned(worker, read_step("r", NONCE, prefill.port, local=[], remote=[7], engine=engine))
    assert reported.returned == {NONCE: 1}
    assert prefill.returned == [(engine, "remote-r", NONCE)]
    assert (agent(worker).sent, worker._handshake_futures) == ([], {})
    assert counts(worker) == {("tickets_returned", "sent"): 1}


def test_a_ticket_whose_lease_is_not_held_is_not_given_back(make: MakeRank, prefill: Prefill) -> None:
    worker = make()
    prefill.verdict = Verdict.UNKNOWN
    until_returned(worker, read_step("r", NONCE, prefill.port, local=[], remote=[7], engine="new"))
    assert worker._handshake_futures == {}
    assert agent(worker).sent == []
    assert counts(worker) == {("tickets_returned", "not_held"): 1}


def test_a_ticket_is_given_back_until_its_node_wakes(
    make: MakeRank, new_node: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_reads, "ASK_EVERY", 0.02)
    worker = make()
    new_node.listener.stop()
    step(worker, read_step("r", NONCE, new_node.port, local=[], remote=[7], engine="new"))
    for _ in range(20):
        step(worker)
        time.sleep(0.01)
    assert report(worker).returned == {}
    new_node.restart()
    assert until_returned(worker).returned == {NONCE: 1}
    assert new_node.returned == [("new", "remote-r", NONCE)]


def test_a_node_that_stays_silent_is_given_up_by_the_time_its_lease_is_over(make: MakeRank) -> None:
    worker = make(lease_duration=0.2)
    reported = until_returned(worker, read_step("r", NONCE, free_ports(1)[0], local=[], remote=[7], engine="gone"))
    assert reported.returned == {NONCE: 1}
    assert agent(worker).sent == []
    assert counts(worker) == {("tickets_returned", "unreachable"): 1}
