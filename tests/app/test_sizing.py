"""Requests through the proxy become advice about the number of nodes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from pdproxy.app.sizing import EVERY, SizingWatch
from pdproxy.background import Background
from pdproxy.nodes.demand import Limit, Wanted
from pdproxy.nodes.node import Binding, Capacity
from pdproxy.nodes.pool_entry import LegLoad
from pdproxy.request import Endpoint
from tests.fakes.clock import FakeClock
from tests.nodes.fake_pool import settle
from tests.orchestration.cluster import FakeCluster, read
from tests.orchestration.prompts import body_for

CHAT = body_for(Endpoint.CHAT, stream=True, tokens=20) | {"stream_options": {"include_usage": True}}
WANTED = Wanted(prefill_busy=0.5, cache_fill=0.5, token_seconds=0.05)


@contextlib.asynccontextmanager
async def slow_prefill(cluster: FakeCluster, seconds: float) -> AsyncIterator[None]:
    """The prefill leg that runs inside takes so long, on the clock that is set."""
    node = cluster.pool.view("p0").node.name

    async def wait() -> None:
        while not cluster.pool.view(node).active:  # noqa: ASYNC110 - a few turns of the loop
            await asyncio.sleep(0)
        cluster.clock.advance(seconds)

    async with asyncio.timeout(10):
        task = asyncio.create_task(wait())
        yield
        await task


async def test_prompts_and_streams_become_nodes() -> None:
    capacity = Capacity(tokens=1000, sequences=None, longest=1, binding=Binding.ATTENTION)
    cluster = FakeCluster(prefills=1, decodes=1, capacity=capacity)
    watch = SizingWatch(cluster.context, WANTED)
    async with slow_prefill(cluster, 15.0):
        reply = await cluster.orchestrator.answer(cluster.request(Endpoint.CHAT, CHAT))
    held = cluster.pool.view("d0").footprint.tokens
    watch.look()
    await read(reply)
    advice = watch.advice()
    assert advice.prefill == pytest.approx(15 / 60 / 0.5)
    assert held > 0
    assert advice.decode == pytest.approx(held / 1000 / 0.5)
    assert (advice.limit, advice.streams_each) == (Limit.CACHE, None)
    await cluster.settle()


async def test_how_quickly_tokens_came_is_learned_from_streams() -> None:
    cluster = FakeCluster(prefills=1, decodes=1)
    paces = ((1, 0.4), (5, 2.0))
    for count, seconds in paces:
        asked = [cluster.request(Endpoint.CHAT, CHAT, name=f"r-{n}") for n in range(count)]
        replies = [await cluster.orchestrator.answer(each) for each in asked]
        cluster.clock.advance(seconds)
        for reply in replies:
            await read(reply)
    watch = SizingWatch(cluster.context, WANTED)
    watch.look()
    # Beside four others tokens took 0.1 s each; and so they did beside three, two and one, since all ended at once.
    assert watch.advice().streams_each == 1
    await cluster.settle()


async def test_the_advice_is_on_the_metrics_and_follows_the_time() -> None:
    cluster = FakeCluster(prefills=1, decodes=1, clock=FakeClock())
    background = Background(cluster.clock)
    background.every("sizing", EVERY, SizingWatch(cluster.context, WANTED).look)
    try:
        await settle()
        assert cluster.registry.get_sample_value("pdproxy_nodes_needed", {"role": "prefill"}) == 0
        async with slow_prefill(cluster, 30.0):
            reply = await cluster.orchestrator.answer(cluster.request(Endpoint.CHAT, CHAT))
        await read(reply)
        cluster.clock.advance(EVERY)
        await settle()
        assert cluster.registry.get_sample_value("pdproxy_nodes_needed", {"role": "prefill"}) == pytest.approx(
            30 / (2 * 60) / 0.5  # two minutes of the clock were touched
        )
        assert cluster.registry.get_sample_value("pdproxy_nodes_needed", {"role": "decode"}) is not None
    finally:
        await background.aclose()
    await cluster.settle()


async def test_a_prompt_on_a_node_of_both_roles_is_no_stream() -> None:
    """One node carries a single stream as quickly as wanted; beside its stream it computes three prompts."""
    cluster = FakeCluster(0, 0, shared=1)
    with contextlib.ExitStack() as legs:
        stream = legs.enter_context(cluster.pool.acquire("n0"))
        for _ in range(3):
            legs.enter_context(cluster.pool.acquire("n0", LegLoad(queued=100)))
        stream.streamed(100, 2.0)
        cluster.pool.load.demand.decoded(2, 100, 20.0)
        watch = SizingWatch(cluster.context, WANTED)
        watch.look()
        assert (watch.advice().streams_each, watch.advice().decode) == (1, 1.0)
