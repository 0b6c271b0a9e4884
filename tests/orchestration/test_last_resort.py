"""`policy.on_no_decode: prefill`: without a decode node a prefill node serves whole requests, and continues streams."""

from typing import Any

import pytest

from pdproxy.observe.labels import Move
from pdproxy.orchestration.context import OrchestrationConfig
from pdproxy.request import Endpoint
from pdproxy.settings.types import OnNoDecode
from tests.fakes.faults import FaultKind, InjectedFault
from tests.fakes.node import FakeNode
from tests.orchestration.answers import read_answer
from tests.orchestration.cluster import FakeCluster, Got
from tests.orchestration.prompts import body_for, right

CHAT = Endpoint.CHAT
LAST_RESORT = OrchestrationConfig(on_no_decode=OnNoDecode.PREFILL, ticket_life=0.0)
BODIES = [pytest.param(body_for(CHAT, stream=stream), id="stream" if stream else "whole") for stream in (True, False)]


def cluster_of(*, decodes: int = 1, resume: bool = False) -> FakeCluster:
    cluster = FakeCluster(prefills=2, decodes=decodes, config=LAST_RESORT, journaling=decodes if resume else 0)
    if resume:
        for node in cluster.prefills:
            node.can_resume = True
            cluster.amend(node.name, can_resume=True)
    return cluster


def served_whole(node: FakeNode) -> list[dict[str, Any]]:
    """The legs that were no prefills."""
    return [dict(leg.body) for leg in node.legs() if "kv_transfer_params" not in leg.body]


def text_of(got: Got) -> str:
    if got.body.startswith(b"data:"):
        return read_answer(CHAT, got.body).texts[0]
    text: str = got.json()["choices"][0]["message"]["content"]
    return text


@pytest.mark.parametrize("body", BODIES)
async def test_a_prefill_node_serves_the_whole_request(body: dict[str, Any]) -> None:
    cluster = cluster_of()
    cluster.pool.remove("d0")
    got = await cluster.ask(CHAT, body)
    assert (got.status, got.route) == (200, "local")
    assert text_of(got) == right(CHAT)
    assert cluster.count("pdproxy_local_total", reason="no_decode") == 1
    assert sum(len(served_whole(node)) for node in cluster.prefills) == 1
    await cluster.settle()


@pytest.mark.parametrize("body", BODIES)
async def test_it_takes_over_where_the_only_decode_node_fails(body: dict[str, Any]) -> None:
    cluster = cluster_of()
    cluster.decodes[0].fault = InjectedFault(FaultKind.RESET)
    got = await cluster.ask(CHAT, body)
    assert text_of(got) == right(CHAT)
    assert sum(len(served_whole(node)) for node in cluster.prefills) == 1
    await cluster.settle()


async def test_a_stream_goes_on_there() -> None:
    cluster = cluster_of(resume=True)
    cluster.decodes[0].fault = InjectedFault(FaultKind.RESET, at=4)
    got = await cluster.ask(CHAT, body_for(CHAT, stream=True))
    answer = read_answer(CHAT, got.body)
    assert (answer.texts[0], answer.error, answer.ended) == (right(CHAT), None, True)
    assert cluster.count("pdproxy_stream_stall_seconds_count", move=Move.RESUMED) == 1
    await cluster.settle()


async def test_its_caches_are_seen_to_fill() -> None:
    cluster = cluster_of(decodes=0)
    reply = await cluster.orchestrator.answer(cluster.request(CHAT, body_for(CHAT, stream=True)))
    assert sum(view.footprint.sequences for view in cluster.pool.state().nodes) == 1
    assert not isinstance(reply.body, bytes)
    await reply.body.aclose()
    await cluster.settle()


async def test_otherwise_the_client_is_told() -> None:
    cluster = FakeCluster(prefills=1, decodes=0)
    assert (await cluster.ask(CHAT, body_for(CHAT, stream=False))).status == 503
