"""A node that active health gives up is not waited for: its legs go elsewhere long before their own deadlines."""

import asyncio

import pytest

from pdproxy.errors import Fault, NodeFault
from pdproxy.nodes.pool import Pool
from pdproxy.orchestration.leg_wait import LegWait
from pdproxy.request import ClientRequest, Endpoint, HeldBody
from tests.fakes.faults import FaultKind, InjectedFault
from tests.fakes.reading import pieces_of
from tests.orchestration.answers import read_answer
from tests.orchestration.cluster import MODEL, FakeCluster, read
from tests.orchestration.loopback_cluster import PATIENT, LoopbackCluster, loopback_cluster, until
from tests.orchestration.prompts import body_for, right

DAYS = 1e6
FINISHED = b'"finish_reason":"length"'
FROZEN_NODES = [("p0", -1), ("d0", -1), ("d0", 0), ("d0", 3)]
"""Which node, and after how many events: before the head, before the first event, in the middle."""


def _request(*, stream: bool, **more: object) -> ClientRequest:
    now = asyncio.get_running_loop().time()
    body = {"model": MODEL, **body_for(Endpoint.COMPLETIONS, stream=stream, tokens=8, **more)}
    return ClientRequest(
        "r-1", Endpoint.COMPLETIONS, HeldBody(body), (), MODEL, stream, 0, now, now + DAYS, lambda: True
    )


def _freeze(cluster: LoopbackCluster, name: str, at: int) -> None:
    for node in cluster.nodes:
        if node.node.name == name:
            node.node.fault = InjectedFault(FaultKind.STALL if at >= 0 else FaultKind.HANG, at=at, times=1)


def _give_up(pool: Pool, name: str) -> None:
    """As active health does: three probes in a row fail that began after the node's last progress."""
    for _ in range(3):
        pool.probed(name, Fault.HEADERS_TIMEOUT, asyncio.get_running_loop().time())


async def _answer(cluster: LoopbackCluster, **more: object) -> bytes:
    return await read(await cluster.orchestrator.answer(_request(stream=True, **more)))


@pytest.mark.parametrize(("name", "at"), FROZEN_NODES)
async def test_the_stream_continues_on_another_node(name: str, at: int) -> None:
    async with loopback_cluster() as cluster:
        _freeze(cluster, name, at)
        frozen = next(node.node for node in cluster.nodes if node.node.name == name)
        asking = asyncio.create_task(_answer(cluster))
        await until(lambda: frozen.fault is None and frozen.running > 0)
        while not asking.done():
            _give_up(cluster.pool, name)
            await asyncio.sleep(0.01)
        async with asyncio.timeout(PATIENT):
            answer = read_answer(Endpoint.COMPLETIONS, await asking)
        assert (answer.texts[0], answer.error, answer.ended) == (right(Endpoint.COMPLETIONS), None, True)
        await cluster.close()


async def test_the_last_prefill_node_is_not_waited_for() -> None:
    """The decode node computes the prompt, and those that come later."""
    async with loopback_cluster(prefills=1, decodes=1) as cluster:
        _freeze(cluster, "p0", -1)
        frozen, decode = (node.node for node in cluster.nodes)
        asking = asyncio.create_task(_answer(cluster))
        await until(lambda: frozen.running > 0)
        cluster.pool.give_up("p0", "silent")
        async with asyncio.timeout(PATIENT):
            for body in (await asking, await _answer(cluster)):
                answer = read_answer(Endpoint.COMPLETIONS, body)
                assert (answer.texts[0], answer.error, answer.ended) == (right(Endpoint.COMPLETIONS), None, True)
        assert (len(frozen.legs()), len(decode.legs())) == (1, 2)
        await cluster.close()


async def test_a_stream_of_any_shape_is_resumed_by_its_journal() -> None:
    async with loopback_cluster(journaling=2) as cluster:
        _freeze(cluster, "d0", 3)
        frozen = cluster.nodes[2].node
        asking = asyncio.create_task(_answer(cluster, n=2))
        await until(lambda: frozen.fault is None and frozen.running > 0)
        while not asking.done():
            _give_up(cluster.pool, "d0")
            await asyncio.sleep(0.01)
        async with asyncio.timeout(PATIENT):
            answer = read_answer(Endpoint.COMPLETIONS, await asking)
        assert (answer.texts[0], answer.error, answer.ended) == (right(Endpoint.COMPLETIONS), None, True)
        assert answer.finishes == {0: "length", 1: "length"}
        await cluster.close()


async def test_a_stream_that_lacks_only_its_end_is_ended_by_the_proxy() -> None:
    """All was said before the node froze: nobody waits for it, and nothing is asked of another node."""
    async with loopback_cluster() as cluster:
        _freeze(cluster, "d0", 10)
        other = cluster.nodes[3].node
        stream = (await cluster.orchestrator.answer(_request(stream=True))).body
        assert not isinstance(stream, bytes)
        seen = b""
        async with asyncio.timeout(PATIENT):
            async for piece in pieces_of(stream):
                seen += piece
                if FINISHED in seen:
                    asyncio.get_running_loop().call_soon(cluster.pool.give_up, "d0", "silent")
        answer = read_answer(Endpoint.COMPLETIONS, seen)
        assert (answer.texts[0], answer.error, answer.ended) == (right(Endpoint.COMPLETIONS), None, True)
        assert other.legs() == []
        await cluster.close()


async def test_without_an_alternative_the_leg_waits_on() -> None:
    async with loopback_cluster(prefills=1, decodes=1) as cluster:
        slot = cluster.pool.acquire("d0")
        answer = asyncio.Event()

        async def wait() -> str:
            with LegWait(slot, lambda: False):
                await answer.wait()
            return "here"

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        _give_up(cluster.pool, "d0")
        await asyncio.sleep(0)
        answer.set()
        assert await waiting == "here"
        slot.release()
        await cluster.close()


async def _given_up_twice(pool: Pool, name: str) -> None:
    with pool.acquire(name) as slot, LegWait(slot, lambda: True):
        for _ in range(2):
            _give_up(pool, name)
        await asyncio.sleep(PATIENT)


async def test_a_wait_that_ends_as_its_node_is_given_up_is_not_interrupted_later() -> None:
    async with loopback_cluster(prefills=1, decodes=1) as cluster:
        task = asyncio.current_task()
        assert task is not None
        with cluster.pool.acquire("d0") as slot:
            with LegWait(slot, lambda: True):
                _give_up(cluster.pool, "d0")
            await asyncio.sleep(0)
        with pytest.raises(NodeFault, match="gave the node up"):
            await _given_up_twice(cluster.pool, "p0")
        assert task.cancelling() == 0
        await cluster.close()


async def test_a_task_that_is_cancelled_as_well_stays_cancelled() -> None:
    async with loopback_cluster(prefills=1, decodes=1) as cluster:

        async def wait() -> None:
            with cluster.pool.acquire("d0") as slot, LegWait(slot, lambda: True):
                _give_up(cluster.pool, "d0")
                waiting.cancel()
                await asyncio.sleep(PATIENT)

        waiting = asyncio.create_task(wait())
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert waiting.cancelled()
        await cluster.close()


async def test_a_timeout_raised_inside_is_not_a_node_down_fault() -> None:
    async with loopback_cluster(prefills=1, decodes=1) as cluster:
        with cluster.pool.acquire("d0") as slot, pytest.raises(TimeoutError), LegWait(slot, lambda: True):
            raise TimeoutError
        await cluster.close()


async def test_a_stream_that_lacks_only_its_end_does_not_move() -> None:
    """Its finish reason is out; anything that another node says would be too much."""
    cluster = FakeCluster()
    request = cluster.request(Endpoint.CHAT, body_for(Endpoint.CHAT, stream=True))
    stream = (await cluster.orchestrator.answer(request)).body
    assert not isinstance(stream, bytes)
    seen = b""
    async for piece in pieces_of(stream):
        seen += piece
        if FINISHED in seen:
            cluster.pool.leaving("d0").set()
    assert seen.count(FINISHED) == 1
    answer = read_answer(Endpoint.CHAT, seen)
    assert (answer.texts[0], answer.ended) == (right(Endpoint.CHAT), True)
    assert cluster.decodes[1].legs() == []
    await cluster.settle()
