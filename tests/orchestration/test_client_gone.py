"""The client leaves, at every single await: nothing may be left anywhere."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pdproxy.request import Endpoint
from tests.fakes.faults import FaultKind, InjectedFault
from tests.fakes.reading import follow
from tests.orchestration.cluster import FakeCluster
from tests.orchestration.prompts import WORDS, body_for

COMPLETIONS = Endpoint.COMPLETIONS


def healthy(world: FakeCluster) -> None:
    """Nothing goes wrong."""


def everything_fails_first(world: FakeCluster) -> None:
    """Each leg is tried twice, the second decode leg breaks off in its middle."""
    world.prefills[0].trouble = InjectedFault(FaultKind.RESET, at=0, times=1)
    world.decodes[0].trouble = InjectedFault(FaultKind.RESET, times=1)
    world.decodes[1].trouble = InjectedFault(FaultKind.RESET, at=3, times=1)


def decode_stalls(world: FakeCluster) -> None:
    """The ticket grows old while a decode node hangs: prefill runs again."""
    world.decodes[0].trouble = InjectedFault(FaultKind.HANG, times=1)


BODIES: dict[str, dict[str, Any]] = {
    "whole": body_for(COMPLETIONS, stream=False, tokens=4),
    "stream": body_for(COMPLETIONS, stream=True, tokens=6),
    "choices": body_for(COMPLETIONS, stream=True, tokens=3, n=2),
    "prompts": {**body_for(COMPLETIONS, stream=False, tokens=3), "prompt": [WORDS, "four five"]},
    "prompt-streams": {**body_for(COMPLETIONS, stream=True, tokens=3), "prompt": [WORDS, "four five"]},
}


async def _turns(count: int, task: asyncio.Task[Any]) -> None:
    for _ in range(count):
        if task.done():
            return
        await asyncio.sleep(0)


async def _until_held(world: FakeCluster) -> None:
    for _ in range(100):
        if world.fabric.held:
            return
        await asyncio.sleep(0)
    pytest.fail("no prefill leg came")


@pytest.mark.parametrize("cancels", [1, 2], ids=["once", "twice"])
@pytest.mark.parametrize("prepare", [healthy, everything_fails_first, decode_stalls])
@pytest.mark.parametrize("body", BODIES.values(), ids=list(BODIES))
async def test_cancelled_at_every_await(
    body: dict[str, Any], prepare: Callable[[FakeCluster], None], cancels: int
) -> None:
    for turn in range(1000):
        world = FakeCluster(decodes=3)
        prepare(world)
        task = asyncio.ensure_future(world.ask(COMPLETIONS, body))
        await _turns(turn, task)
        finished = task.done()
        for _ in range(cancels):
            task.cancel()
            await asyncio.sleep(0)
        outcome = (await asyncio.gather(task, return_exceptions=True))[0]
        assert finished or isinstance(outcome, asyncio.CancelledError)
        await world.settle()
        assert len(asyncio.all_tasks()) == 1, "no task of ours is left"
        if finished:
            assert turn > 5
            return
        ends = [
            world.count("pdproxy_requests_total", endpoint=COMPLETIONS, outcome=end) for end in ("client_gone", "ok")
        ]
        assert sum(ends) == (1 if turn else 0), "before its first turn the request was never there"
    pytest.fail("the request never finished")


@pytest.mark.parametrize("body", [BODIES["stream"], BODIES["prompt-streams"]], ids=["one", "many"])
async def test_closed_after_every_piece(body: dict[str, Any]) -> None:
    pieces = 0
    while True:
        world = FakeCluster()
        reply = await world.orchestrator.answer(world.request(COMPLETIONS, body))
        assert not isinstance(reply.body, bytes)
        got = await follow(reply.body, pieces)
        taken, body_so_far = len(got), b"".join(got)
        await reply.body.aclose()
        await world.settle()
        assert len(asyncio.all_tasks()) == 1
        if taken <= pieces:
            break
        outcome = "ok" if body_so_far.endswith(b"[DONE]\n\n") else "client_gone"
        assert world.count("pdproxy_requests_total", endpoint=COMPLETIONS, outcome=outcome) == 1
        pieces += 1
    assert pieces >= 6


async def test_gone_between_prefill_and_decode_releases_the_hand_over() -> None:
    world = FakeCluster()
    task = asyncio.ensure_future(world.ask(COMPLETIONS, BODIES["whole"]))
    await _until_held(world)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await world.settle()
    assert len(world.fabric.released) == 1
    assert world.count("pdproxy_releases_total", outcome="done") == 1
    assert world.prefills[0].seen[-1].body["kv_transfer_params"] == {"pdproxy_release": world.fabric.released.pop()}


async def test_nothing_is_released_where_the_decode_node_read_it() -> None:
    world = FakeCluster()
    await world.ask(COMPLETIONS, BODIES["stream"])
    await world.settle()
    assert world.fabric.released == set()


@pytest.mark.parametrize("endpoint", [Endpoint.RESPONSES, COMPLETIONS], ids=["responses", "choices"])
async def test_a_first_event_that_proves_no_reading_leaves_the_hand_over_unread(endpoint: Endpoint) -> None:
    body = body_for(endpoint, stream=True, **({"n": 2} if endpoint is COMPLETIONS else {}))
    world = FakeCluster()
    await world.ask(endpoint, body)
    await world.settle()
    assert world.fabric.released == set(), "the whole stream came: all have read"
    reply = await world.orchestrator.answer(world.request(endpoint, body))
    assert not isinstance(reply.body, bytes)
    await anext(reply.body)
    await reply.body.aclose()
    await world.settle()
    assert len(world.fabric.released) == 1


async def test_a_failed_release_is_counted_and_does_no_harm() -> None:
    world = FakeCluster(prefills=1, decodes=1)
    task = asyncio.ensure_future(world.ask(COMPLETIONS, BODIES["whole"]))
    await _until_held(world)
    world.prefills[0].trouble = InjectedFault(FaultKind.REFUSE)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await world.background_tasks.aclose()
    assert world.count("pdproxy_releases_total", outcome="failed") == 1
    assert len(world.background_tasks) == 0
