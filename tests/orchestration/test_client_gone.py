"""The client leaves at every single await: nothing may stay held."""

import asyncio
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from pdproxy.request import Endpoint
from tests.fakes.faults import FaultKind, InjectedFault
from tests.fakes.reading import follow
from tests.orchestration.cluster import FakeCluster
from tests.orchestration.prompts import WORDS, body_for
from tests.tables import spread

COMPLETIONS = Endpoint.COMPLETIONS


def healthy(cluster: FakeCluster) -> None:
    """Nothing goes wrong."""


def everything_fails_first(cluster: FakeCluster) -> None:
    """Each leg is tried twice, the second decode leg breaks off in its middle."""
    cluster.prefills[0].fault = InjectedFault(FaultKind.RESET, at=0, times=1)
    cluster.decodes[0].fault = InjectedFault(FaultKind.RESET, times=1)
    cluster.decodes[1].fault = InjectedFault(FaultKind.RESET, at=3, times=1)


def decode_stalls(cluster: FakeCluster) -> None:
    """The ticket grows old while a decode node hangs: prefill runs again."""
    cluster.decodes[0].fault = InjectedFault(FaultKind.HANG, times=1)


BODIES: dict[str, dict[str, Any]] = {
    "whole": body_for(COMPLETIONS, stream=False, tokens=4),
    "stream": body_for(COMPLETIONS, stream=True, tokens=6),
    "choices": body_for(COMPLETIONS, stream=True, tokens=3, n=2),
    "prompts": {**body_for(COMPLETIONS, stream=False, tokens=3), "prompt": [WORDS, "four five"]},
    "prompt-streams": {**body_for(COMPLETIONS, stream=True, tokens=3), "prompt": [WORDS, "four five"]},
}

PREPARED = (healthy, everything_fails_first, decode_stalls)


async def _turns(count: int, task: asyncio.Task[Any]) -> None:
    for _ in range(count):
        if task.done():
            return
        await asyncio.sleep(0)


async def _until_held(cluster: FakeCluster) -> None:
    for _ in range(100):
        if cluster.fabric.held:
            return
        await asyncio.sleep(0)
    pytest.fail("no prefill leg came")


@pytest.mark.parametrize(("shape", "prepare", "cancels"), spread(BODIES, PREPARED, (1, 2)))
async def test_cancelled_at_every_await(shape: str, prepare: Callable[[FakeCluster], None], cancels: int) -> None:
    body = BODIES[shape]
    for turn in range(1000):
        cluster = FakeCluster(decodes=3)
        prepare(cluster)
        task = asyncio.ensure_future(cluster.ask(COMPLETIONS, body))
        await _turns(turn, task)
        finished = task.done()
        for _ in range(cancels):
            task.cancel()
            await asyncio.sleep(0)
        outcome = (await asyncio.gather(task, return_exceptions=True))[0]
        assert finished or isinstance(outcome, asyncio.CancelledError)
        await cluster.settle()
        assert len(asyncio.all_tasks()) == 1, "no task of ours is left"
        if finished:
            assert turn > 5
            return
        ends = [
            cluster.count("pdproxy_requests_total", endpoint=COMPLETIONS, outcome=end) for end in ("client_gone", "ok")
        ]
        assert sum(ends) == (1 if turn else 0), "before its first turn the request was never there"
    pytest.fail("the request never finished")


@pytest.mark.parametrize("body", [BODIES["stream"], BODIES["prompt-streams"]], ids=["one", "many"])
async def test_closed_after_every_piece(body: dict[str, Any]) -> None:
    pieces = 0
    while True:
        cluster = FakeCluster()
        reply = await cluster.orchestrator.answer(cluster.request(COMPLETIONS, body))
        assert not isinstance(reply.body, bytes)
        got = await follow(reply.body, pieces)
        taken, body_so_far = len(got), b"".join(got)
        await reply.body.aclose()
        await cluster.settle()
        assert len(asyncio.all_tasks()) == 1
        if taken <= pieces:
            break
        outcome = "ok" if body_so_far.endswith(b"[DONE]\n\n") else "client_gone"
        assert cluster.count("pdproxy_requests_total", endpoint=COMPLETIONS, outcome=outcome) == 1
        pieces += 1
    assert pieces >= 6


async def test_gone_between_prefill_and_decode_releases_the_hand_over() -> None:
    cluster = FakeCluster()
    task = asyncio.ensure_future(cluster.ask(COMPLETIONS, BODIES["whole"]))
    await _until_held(cluster)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await cluster.settle()
    assert len(cluster.fabric.released) == 1
    assert cluster.count("pdproxy_releases_total", outcome="done") == 1
    assert cluster.prefills[0].seen[-1].body["kv_transfer_params"] == {"pdproxy_release": cluster.fabric.released.pop()}


async def test_nothing_is_released_where_the_decode_node_read_it() -> None:
    cluster = FakeCluster()
    await cluster.ask(COMPLETIONS, BODIES["stream"])
    await cluster.settle()
    assert cluster.fabric.released == set()


@pytest.mark.parametrize("endpoint", [Endpoint.RESPONSES, COMPLETIONS], ids=["responses", "choices"])
async def test_a_first_event_that_does_not_prove_the_read_leaves_the_hand_over_unread(endpoint: Endpoint) -> None:
    body = body_for(endpoint, stream=True, **({"n": 2} if endpoint is COMPLETIONS else {}))
    cluster = FakeCluster()
    await cluster.ask(endpoint, body)
    await cluster.settle()
    assert cluster.fabric.released == set(), "the whole stream came: all have read"
    reply = await cluster.orchestrator.answer(cluster.request(endpoint, body))
    assert not isinstance(reply.body, bytes)
    await reply.body.read()
    await reply.body.aclose()
    await cluster.settle()
    assert len(cluster.fabric.released) == 1


async def test_a_failed_release_is_counted_and_does_no_harm() -> None:
    cluster = FakeCluster(prefills=1, decodes=1)
    task = asyncio.ensure_future(cluster.ask(COMPLETIONS, BODIES["whole"]))
    await _until_held(cluster)
    cluster.prefills[0].fault = InjectedFault(FaultKind.REFUSE)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await cluster.context.background.aclose()
    assert cluster.count("pdproxy_releases_total", outcome="failed") == 1
    assert cluster.context.background.errands == 0


async def test_a_release_whose_connection_breaks_is_left_to_the_lease() -> None:
    """The transport has tried a kept-alive connection that closed a second time already."""
    cluster = FakeCluster(prefills=1, decodes=1)
    respond, releases = cluster.prefills[0].respond, itertools.count()

    def break_releases(path: str, raw: bytes, headers: tuple[tuple[str, str], ...] = ()) -> Any:
        script = respond(path, raw, headers)
        if b"pdproxy_release" not in raw:
            return script
        next(releases)
        return dataclasses.replace(script, status=0, pieces=(), kind=FaultKind.RESET)

    cluster.prefills[0].respond = break_releases  # type: ignore[method-assign]
    task = asyncio.ensure_future(cluster.ask(COMPLETIONS, BODIES["whole"]))
    await _until_held(cluster)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await cluster.context.background.aclose()
    assert cluster.count("pdproxy_releases_total", outcome="failed") == 1
    assert next(releases) == 1
