"""Two data-parallel ranks behind one prefill node: each has its own side channel, leases and releases."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from deploy.local.model.exam import exam
from deploy.local.node import SERVED_NAME, Node, NodeSpec, Role, on_free_ports
from deploy.local.ports import PortTakenError, free_ports, require_free
from deploy.local.stack import logs_of, start_nodes
from deploy.local.supervise import Supervisor
from tests.e2e.legs import TO_HAND_OVER, Params, complete
from tests.e2e.meters import PATIENCE_S, watch

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines, pytest.mark.long]

RANKS = 2


def consecutive_ports(count: int) -> int:
    """The first of so many free ports in a row. Raises AssertionError."""
    for _ in range(50):
        (first,) = free_ports(1)
        try:
            for port in range(first, first + count):
                require_free(port, "a rank's side channel", "another row is tried")
        except (PortTakenError, OverflowError):
            continue
        return first
    raise AssertionError("no free ports in a row")


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Node, Node]]:
    """A prefill node of two data-parallel ranks and a plain decode node."""
    ranks = ("--data-parallel-size", str(RANKS))
    specs = [
        NodeSpec("prefill", Role.PREFILL, 0, consecutive_ports(RANKS), more_arguments=ranks),
        NodeSpec("decode", Role.DECODE, 0, 0),
    ]
    with Supervisor(logs_of("data_parallel")) as supervisor:
        give, take = start_nodes(supervisor, on_free_ports(*specs), print)
        yield give, take


def sent_to(node: Node, rank: int, prompt: str, params: Params) -> Any:
    """What this rank of a node answers with."""
    body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": 1, "temperature": 0, "kv_transfer_params": params}
    headers = {"X-data-parallel-rank": str(rank)}
    url = f"{node.url}/v1/completions"
    got = httpx.post(url, json=body, headers=headers, timeout=PATIENCE_S, trust_env=False)
    return got.raise_for_status().json()["kv_transfer_params"]


def test_each_rank_answers_for_its_own_blocks(nodes: tuple[Node, Node]) -> None:
    give, take = nodes
    for rank in range(RANKS):
        question = exam(320 + rank, 800)
        verified = watch(take.url, "reads", outcome="verified")
        ended = watch(give.url, "leases_ended", how="read")
        ticket = sent_to(give, rank, question.prompt(), TO_HAND_OVER)
        assert ticket["remote_port"] == give.spec.side_channel_port + rank
        assert complete(take.url, question.prompt(), params=ticket).text == question.answer
        verified.reaches(1)
        ended.reaches(1)


def test_a_release_is_for_the_rank_that_it_is_sent_to(nodes: tuple[Node, Node]) -> None:
    give, take = nodes
    question, name = exam(330, 800), secrets.token_hex(16)
    ticket = sent_to(give, 1, question.prompt(), {**TO_HAND_OVER, "pdproxy_hand_over": name})
    released = watch(give.url, "leases_ended", how="released")
    sent_to(give, 1, "?", {"pdproxy_release": name})
    released.reaches(1)
    not_held = watch(take.url, "reads", outcome="not_held")
    assert complete(take.url, question.prompt(), params=ticket).text == question.answer
    not_held.reaches(1)
