"""A few cells of the failure matrix over real sockets."""

import asyncio

import pytest

from pdproxy.request import ClientRequest, Endpoint, HeldBody
from pdproxy.response import ProxyResponse
from tests.fakes.faults import FaultKind, InjectedFault
from tests.orchestration.answers import read_answer
from tests.orchestration.cluster import MODEL, read
from tests.orchestration.loopback_cluster import PATIENT, LoopbackCluster, loopback_cluster
from tests.orchestration.prompts import body_for, right


def _request(endpoint: Endpoint, *, stream: bool, tokens: int = 8) -> ClientRequest:
    now = asyncio.get_running_loop().time()
    body = {"model": MODEL, **body_for(endpoint, stream=stream, tokens=tokens)}
    return ClientRequest("r-1", endpoint, HeldBody(body), (), MODEL, stream, 0, now, now + PATIENT, lambda: True)


async def _ask(cluster: LoopbackCluster, endpoint: Endpoint, *, stream: bool) -> tuple[ProxyResponse, bytes]:
    reply = await cluster.orchestrator.answer(_request(endpoint, stream=stream))
    return reply, await read(reply)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("endpoint", Endpoint)
async def test_healthy(endpoint: Endpoint, stream: bool) -> None:
    async with loopback_cluster() as cluster:
        for _ in range(3):
            reply, body = await _ask(cluster, endpoint, stream=stream)
            assert reply.status == 200
        if stream:
            assert read_answer(endpoint, body).texts[0] == right(endpoint)
        await cluster.close()


@pytest.mark.parametrize(
    ("role", "trouble"),
    [
        ("p", InjectedFault(FaultKind.RESET, times=1)),
        ("p", InjectedFault(FaultKind.STATUS, status=500, times=1)),
        ("d", InjectedFault(FaultKind.RESET, times=1)),
        ("d", InjectedFault(FaultKind.RESET, at=0, times=1)),
        ("d", InjectedFault(FaultKind.RESET, at=3, times=1)),
        ("d", InjectedFault(FaultKind.SHORT, at=3, times=1)),
        ("d", InjectedFault(FaultKind.ERROR_EVENT, at=3, times=1)),
    ],
    ids=str,
)
async def test_one_node_fails(role: str, trouble: InjectedFault) -> None:
    async with loopback_cluster() as cluster:
        for node in cluster.nodes:
            if node.node.name == f"{role}0":
                node.node.fault = trouble
        _, body = await _ask(cluster, Endpoint.CHAT, stream=True)
        answer = read_answer(Endpoint.CHAT, body)
        assert (answer.texts[0], answer.error, answer.ended) == (right(Endpoint.CHAT), None, True)
        await cluster.close()


@pytest.mark.parametrize("victim", ["p0", "d0"])
async def test_a_node_is_gone(victim: str) -> None:
    async with loopback_cluster() as cluster:
        for node in cluster.nodes:
            if node.node.name == victim:
                await node.kill()
        for _ in range(4):
            _, body = await _ask(cluster, Endpoint.COMPLETIONS, stream=True)
            assert read_answer(Endpoint.COMPLETIONS, body).texts[0] == right(Endpoint.COMPLETIONS)
        await cluster.close()


async def test_everything_is_gone() -> None:
    async with loopback_cluster() as cluster:
        for node in cluster.nodes:
            await node.kill()
        with pytest.raises(Exception, match="could be reached"):
            await _ask(cluster, Endpoint.CHAT, stream=False)
        await cluster.close()


async def test_the_client_leaves() -> None:
    async with loopback_cluster() as cluster:
        reply = await cluster.orchestrator.answer(_request(Endpoint.CHAT, stream=True, tokens=5000))
        assert not isinstance(reply.body, bytes)
        await reply.body.read()
        await reply.body.aclose()
        await cluster.close()
