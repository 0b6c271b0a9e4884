"""Giving tickets back: each is over exactly once, a silent node gets it again, and nothing is kept for ever."""

from __future__ import annotations

import pytest

from connector.messages import Question, Verdict
from connector.pending_reads import ASK_EVERY, MOST_RETURNS, ReturnOutcome, TicketReturn, TicketReturns
from connector.verifier import ReadVerdict

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
