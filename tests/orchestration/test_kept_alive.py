"""Nodes that close idle connections: no request is lost, whichever leg it is on. Nobody may retry here."""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable

import pytest

from pdproxy.legs.calls import prefill, release
from pdproxy.legs.rewrite import prefill_body
from pdproxy.observe.labels import Proof
from pdproxy.orchestration.context import OrchestrationConfig
from pdproxy.orchestration.forward import ForwardRequest
from pdproxy.orchestration.known_answer import KnownAnswer
from pdproxy.planning.plan import LEAST_LOADED
from pdproxy.random_ids import random_ids
from pdproxy.request import ClientRequest, Endpoint, HeldBody
from pdproxy.transport.port import HttpRequest, Timeouts, read_to_end
from tests.fakes.faults import FaultKind, InjectedFault
from tests.fakes.loopback import LoopbackNode
from tests.fakes.node import FakeNode
from tests.orchestration.answers import read_answer
from tests.orchestration.cluster import MODEL, read
from tests.orchestration.loopback_cluster import PATIENT, LoopbackCluster, loopback_cluster, until
from tests.orchestration.prompts import body_for, right

EARLY = 0.005
"""Seconds after an answer within which these nodes close the connection."""
TOGETHER = 8
Ask = Callable[[LoopbackCluster], Awaitable[None]]
ONCE = OrchestrationConfig(retries=0, migrations=0)


def closing_early(seed: int) -> Callable[[FakeNode], LoopbackNode]:
    """Makes nodes that close each connection within `EARLY` of an answer."""
    chance = random.Random(seed)
    return lambda node: LoopbackNode(node, idle=lambda: chance.uniform(0.0, EARLY))


async def chat(cluster: LoopbackCluster, *, stream: bool = False) -> None:
    """Ask, and check the answer."""
    now = asyncio.get_running_loop().time()
    body = {"model": MODEL, **body_for(Endpoint.CHAT, stream=stream)}
    request = ClientRequest(
        "r-1", Endpoint.CHAT, HeldBody(body), (), MODEL, stream, 0, now, now + PATIENT, lambda: True
    )
    reply = await cluster.orchestrator.answer(request)
    said = await read(reply)
    assert reply.status == 200
    if stream:
        assert read_answer(Endpoint.CHAT, said).texts[0] == right(Endpoint.CHAT)


async def embed(cluster: LoopbackCluster) -> None:
    deadline = asyncio.get_running_loop().time() + PATIENT
    request = ForwardRequest("r-1", "POST", "/v1/embeddings", (), HeldBody(b"{}"), MODEL, deadline, lambda: True)
    assert (await cluster.orchestrator.forward(request)).status == 200


async def lost(cluster: LoopbackCluster, ask: Callable[[], Awaitable[None]], number: int) -> int:
    """How many requests of so many fail; they come at random times, a few together."""
    chance, failed = random.Random(number), itertools.count()

    async def one_after_the_other(count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(chance.uniform(0.0, 2 * EARLY))
            try:
                await ask()
            except Exception:  # noqa: BLE001 - counted, whatever it is
                next(failed)

    await asyncio.gather(*(one_after_the_other(number // TOGETHER) for _ in range(TOGETHER)))
    return next(failed)


@pytest.mark.parametrize("number", [200, pytest.param(1600, marks=pytest.mark.long)])
async def test_no_chat_is_lost(number: int) -> None:
    async with loopback_cluster(1, 1, ONCE, node=closing_early(number)) as cluster:
        streams = itertools.cycle((False, True))
        assert await lost(cluster, lambda: chat(cluster, stream=next(streams)), number) == 0
        assert cluster.count("pdproxy_resends_total") > 0
        assert cluster.count("pdproxy_leg_faults_total") == 0
        assert cluster.count("pdproxy_local_total") == 0
        await cluster.close()


async def prefill_alone(cluster: LoopbackCluster) -> None:
    """A prefill leg and its release."""
    node, hand_over_id = cluster.pool.view("p0").node, next(random_ids())
    body = {"model": MODEL, **body_for(Endpoint.COMPLETIONS, stream=False)}
    leg = prefill_body(Endpoint.COMPLETIONS, body, hand_over_id, readers=1)
    answer = await prefill(cluster.transport, node, Endpoint.COMPLETIONS, leg, (), Timeouts(), lambda: None)
    assert answer.ticket
    await release(cluster.transport, node, MODEL, hand_over_id, Timeouts())


@pytest.mark.parametrize("ask", [embed, prefill_alone])
@pytest.mark.parametrize("number", [160, pytest.param(1200, marks=pytest.mark.long)])
async def test_no_leg_alone_is_lost(number: int, ask: Ask) -> None:
    async with loopback_cluster(1, 1, ONCE, node=closing_early(number)) as cluster:
        assert await lost(cluster, lambda: ask(cluster), number) == 0
        assert cluster.count("pdproxy_resends_total") > 0
        assert cluster.count("pdproxy_leg_faults_total") == 0
        await cluster.close()


class Losing:
    """Makes nodes that process a request and end its connection instead of answering, once `armed` for it."""

    def __init__(self) -> None:
        self.armed = ""
        self.lost: list[str] = []

    def __call__(self, node: FakeNode) -> LoopbackNode:
        return LoopbackNode(node, loses=lambda path, body: self._loses(kind_of(node.name, path, body)))

    def _loses(self, kind: str) -> bool:
        if kind != self.armed:
            return False
        self.armed = ""
        self.lost.append(kind)
        return True


def kind_of(name: str, path: str, body: bytes) -> str:
    """Which leg a request is."""
    if path.startswith("/v1/pdproxy/streams"):
        return "resume" if b"pdproxy_resume" in body else "journaled"
    if b"pdproxy_release" in body:
        return "release"
    if path in ("/health", "/v1/embeddings"):
        return path
    return "prefill" if name.startswith("p") else "decode"


async def probe(cluster: LoopbackCluster) -> None:
    """As active health asks."""
    response = await cluster.transport.send(HttpRequest("GET", f"{cluster.nodes[-1].url}/health"), Timeouts())
    await read_to_end(response, 1000)
    await response.aclose()


async def recomputed(cluster: LoopbackCluster) -> None:
    """A chat whose hand-over is released, for the decode node does not read it."""
    cluster.fabric.deaf = True
    await chat(cluster)
    await until(lambda: not cluster.context.background.errands)
    cluster.fabric.deaf = False


async def prove_pair(cluster: LoopbackCluster) -> None:
    """The known-answer test of the two nodes."""
    nodes = [cluster.pool.view(name).node for name in ("p0", "d0")]
    result = await KnownAnswer(cluster.context).ask(*nodes)
    assert result.proof is Proof.PASSED
    await until(lambda: not cluster.context.background.errands)


LEGS: dict[str, tuple[str, Ask]] = {
    "prefill": ("prefill", chat),
    "decode": ("decode", chat),
    "decode, streamed": ("decode", lambda cluster: chat(cluster, stream=True)),
    "release": ("release", recomputed),
    "forward": ("/v1/embeddings", embed),
    "probe": ("/health", probe),
    "known answer, prefill": ("prefill", prove_pair),
    "known answer, decode": ("decode", prove_pair),
}


async def test_a_stream_is_resumed_by_a_leg_that_is_sent_again() -> None:
    losing = Losing()
    config = OrchestrationConfig(retries=0, migrations=1, routing_policy=LEAST_LOADED)
    async with loopback_cluster(1, 2, config, journaling=2, node=losing) as cluster:
        cluster.fabric.copies_allowed = True
        for _ in range(2):
            await chat(cluster, stream=True)  # by turns: one connection to each node
        losing.armed = "resume"
        for node in cluster.nodes[1:]:
            node.node.fault = InjectedFault(FaultKind.RESET, at=3, times=1)
        await chat(cluster, stream=True)
        assert losing.lost == ["resume"]
        assert cluster.count("pdproxy_resends_total") == 1
        assert cluster.count("pdproxy_leg_faults_total") == 1
        await cluster.close()


@pytest.mark.parametrize("leg", LEGS)
async def test_a_leg_that_was_processed_and_lost_is_sent_again(leg: str) -> None:
    """The worst case: the node has done all of it. Nothing stays behind on it, and nobody is to blame."""
    kind, ask = LEGS[leg]
    losing = Losing()
    async with loopback_cluster(1, 1, ONCE, node=losing) as cluster:
        cluster.fabric.copies_allowed = True
        await ask(cluster)
        losing.armed = kind
        await ask(cluster)
        assert losing.lost == [kind]
        assert cluster.count("pdproxy_resends_total") == 1
        assert cluster.count("pdproxy_leg_faults_total") == 0
        assert cluster.count("pdproxy_circuit_moves_total") == 0
        await cluster.close()
