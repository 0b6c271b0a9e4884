"""A ticket older than its lease, whose blocks hold other prompts by now: the prompt is computed, not read wrongly.

Stock vLLM 0.32 answers such a ticket with HTTP 200 and another request's text.
"""

from collections.abc import Iterator

import pytest

from deploy.local.model.quiz import Quiz, quiz
from deploy.local.node import NodeSpec, Role, on_free_ports
from deploy.local.stack import logs_of, start_nodes
from deploy.local.supervise import Supervisor
from tests.e2e.conftest import Pair
from tests.e2e.legs import Params, complete, hand_over, prefill
from tests.e2e.metrics_reader import watch

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines]

FEW_BLOCKS = 64
LEASE_S = 6
CROWD = range(12)


@pytest.fixture(scope="module")
def short_leased() -> Iterator[Pair]:
    """A prefill node with few blocks and short leases, and a decode node. Logs: `.run/e2e-stale`."""
    specs = on_free_ports(
        NodeSpec("prefill", Role.PREFILL, 0, 0, gpu_blocks=FEW_BLOCKS, connector_config={"kv_lease_duration": LEASE_S}),
        NodeSpec("decode", Role.DECODE, 0, 0),
    )
    with Supervisor(logs_of("e2e-stale")) as supervisor:
        yield Pair(*start_nodes(supervisor, specs, print))


def stale(pair: Pair, questions: list[Quiz]) -> list[Params]:
    """Tickets whose leases have expired, and whose blocks hold other prompts by now."""
    ended = watch(pair.prefill.url, "leases_ended", how="expired")
    tickets = [prefill(pair.prefill.url, question.prompt()) for question in questions]
    ended.reaches(len(tickets))
    for seed in CROWD:
        complete(pair.prefill.url, quiz(1000 + seed, 1500).prompt(), 1)
    return tickets


def test_stale_tickets_are_computed_and_the_next_ones_read(short_leased: Pair) -> None:
    give, take = short_leased.prefill.url, short_leased.decode.url
    hand_over(give, take, quiz(1080, 300))
    questions = [quiz(1100, 300), quiz(1101, 800), quiz(1102, 1500)]
    tickets = stale(short_leased, questions)
    ended, verified = watch(take, "reads"), watch(take, "reads", outcome="verified")
    for question, ticket in zip(questions, tickets, strict=True):
        assert complete(take, question.prompt(), params=ticket).text == question.answer
    ended.reaches(len(questions))
    assert not verified.grown()
    for number, question in enumerate(questions):
        for again in (question, question.ask(1)):
            assert complete(take, again.prompt(), params=prefill(give, again.prompt())).text == again.answer
        hand_over(give, take, quiz(1110 + number, 800))
