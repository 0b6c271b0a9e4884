"""Giving tickets back: each is over exactly once, a silent node is asked now and then, and nothing is kept for ever."""

from __future__ import annotations

import pytest

from connector.messages import Question, Verdict
from connector.pending_reads import ASK_EVERY, MOST_RETURNS, TicketReturn, TicketReturns
from connector.verifier import ReadVerdict

HERE = ("10.0.0.1", 5600)


def ticket_return(nonce: str = "nonce-1") -> TicketReturn:
    return TicketReturn("r", Question("P", "alias", nonce), HERE, object())


def begun(within: float = 30) -> tuple[TicketReturns, TicketReturn]:
    returns, one = TicketReturns(within), ticket_return()
    returns.begin(one, now=0)
    return returns, one


def ask(returns: TicketReturns, one: TicketReturn) -> str:
    ((question,),) = returns.ask(one).values()
    assert (question.engine_id, question.request_id) == ("P", "alias")
    return question.nonce


def test_it_is_due_at_once_and_again_until_it_is_over() -> None:
    returns, one = begun()
    assert returns.get("nonce-1") == one
    assert returns.due(0) == [one]
    assert returns.due(0.9 * ASK_EVERY) == []
    assert returns.due(ASK_EVERY) == [one]
    returns.end("nonce-1")
    assert returns.due(2 * ASK_EVERY) == []
    assert len(returns) == 0


def test_a_node_is_asked_one_question_at_a_time_under_a_nonce_of_its_own() -> None:
    returns, one = begun()
    returns.due(0)
    first = ask(returns, one)
    assert first != "nonce-1"
    assert returns.due(5) == [], "the question is open"
    assert returns.on_verdict(ReadVerdict(first, None), now=5) == one
    assert returns.on_verdict(ReadVerdict(first, None), now=5) is None
    assert returns.due(5 + ASK_EVERY) == [one]
    assert ask(returns, one) != first


@pytest.mark.parametrize("verdict", list(Verdict))
def test_only_a_node_that_holds_the_lease_is_sent_a_notif(verdict: Verdict) -> None:
    returns, one = begun()
    assert returns.held() == []
    assert returns.on_verdict(ReadVerdict(ask(returns, one), verdict), now=1) == one
    assert returns.held() == ([one] if verdict is Verdict.HELD else [])


def test_a_held_one_may_be_sent_until_it_is_postponed_and_asked_for_anew() -> None:
    returns, one = begun()
    returns.due(0)
    returns.on_verdict(ReadVerdict(ask(returns, one), Verdict.HELD), now=1)
    assert returns.held() == returns.held() == [one]
    returns.postpone("nonce-1")
    assert returns.held() == []
    assert returns.due(1 + ASK_EVERY) == [one]
    returns.on_verdict(ReadVerdict(ask(returns, one), Verdict.HELD), now=3)
    assert returns.held() == [one]
    returns.end("nonce-1")
    assert returns.held() == []
    assert returns.get("nonce-1") is None


def test_an_answer_for_a_return_that_is_over_or_for_a_read_is_ignored() -> None:
    returns, one = begun()
    asked = ask(returns, one)
    returns.end("nonce-1")
    assert returns.on_verdict(ReadVerdict(asked, Verdict.HELD), now=1) is None
    assert returns.on_verdict(ReadVerdict("nonce-1", Verdict.HELD), now=1) is None


def test_a_node_that_stays_silent_is_given_up() -> None:
    returns, one = begun(within=30)
    assert returns.overdue(29.9) == []
    assert returns.overdue(30) == [one]


def test_of_too_many_the_oldest_are_given_up() -> None:
    returns = TicketReturns(30)
    for number in range(MOST_RETURNS + 2):
        returns.begin(ticket_return(str(number)), now=0)
    assert [one.nonce for one in returns.overdue(0)] == ["0", "1"]
