"""Two ranks on each node: each reads its part and asks for its verdict, and one bad verdict is enough."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deploy.local.model.quiz import quiz
from deploy.local.node import Node, NodeSpec, Role, on_free_ports
from deploy.local.stack import logs_of, start_nodes
from deploy.local.supervise import Supervisor
from tests.e2e.legs import complete, prefill, release
from tests.e2e.metrics_reader import watch

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines]

RANKS = 2


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Node, Node]]:
    """A prefill and a decode node of two ranks each."""
    specs = [
        NodeSpec("prefill", Role.PREFILL, 0, 0, tensor_parallel_size=RANKS),
        NodeSpec("decode", Role.DECODE, 0, 0, tensor_parallel_size=RANKS),
    ]
    with Supervisor(logs_of("tensor_parallel")) as supervisor:
        give, take = start_nodes(supervisor, on_free_ports(*specs), print)
        yield give, take


def test_every_rank_verifies_its_part(nodes: tuple[Node, Node]) -> None:
    give, take = nodes
    verified = watch(take.url, "reads", outcome="verified")
    ended = watch(give.url, "leases_ended", how="read")
    for seed in (301, 302):
        question = quiz(seed, 800)
        assert (
            complete(take.url, question.prompt(), params=prefill(give.url, question.prompt())).text == question.answer
        )
    verified.reaches(2 * RANKS)
    ended.reaches(2)
    assert verified.grown() == 2 * RANKS


def test_a_ticket_that_was_let_go_is_read_no_more_and_the_answer_is_right(nodes: tuple[Node, Node]) -> None:
    give, take = nodes
    question, hand_over_id = quiz(303, 800), "hand-over-of-these-ranks"
    ticket = prefill(give.url, question.prompt(), pdproxy_hand_over=hand_over_id)
    ended = watch(give.url, "leases_ended", how="released")
    release(give.url, hand_over_id)
    ended.reaches(1)
    refused = watch(take.url, "reads", outcome="not_held")
    other = question.ask(1)
    assert complete(take.url, question.prompt(), params=ticket).text == question.answer
    refused.reaches(RANKS)
    assert complete(take.url, other.prompt(), params=prefill(give.url, other.prompt())).text == other.answer
