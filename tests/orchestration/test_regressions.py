"""Requests that an earlier version lost, or after which it left something held."""

import asyncio
import dataclasses
import itertools
import logging

import pytest

from pdproxy.errors import Fault
from pdproxy.nodes.node import Node, Role
from pdproxy.orchestration.orchestrator import Orchestrator
from pdproxy.request import Endpoint
from tests.fakes.faults import FaultKind, InjectedFault
from tests.orchestration.answers import read_answer
from tests.orchestration.cluster import FakeCluster, read
from tests.orchestration.prompts import WORDS, body_for, right

CHAT, COMPLETIONS = Endpoint.CHAT, Endpoint.COMPLETIONS


def _other_model(cluster: FakeCluster) -> None:
    """The second decode node serves another model, so that the first one's can become unknown."""
    cluster.pool.remove("d1")
    node = Node("d1", cluster.decodes[1].url, (Role.DECODE,), "other")
    cluster.pool.add(node)
    cluster.pool.bring_up(node)


async def test_a_stream_on_a_removed_node_that_was_the_last_of_its_model_ends_there() -> None:
    cluster = FakeCluster()
    _other_model(cluster)
    reply = await cluster.orchestrator.answer(cluster.request(CHAT, body_for(CHAT, stream=True)))
    assert not isinstance(reply.body, bytes)
    cluster.pool.remove("d0")
    answer = read_answer(CHAT, await read(reply))
    assert (answer.texts[0], answer.error, answer.ended) == (right(CHAT), None, True)
    await cluster.settle()


async def test_a_stream_that_breaks_when_its_model_is_gone_ends_in_an_error_event() -> None:
    cluster = FakeCluster()
    _other_model(cluster)
    cluster.decodes[0].fault = InjectedFault(FaultKind.RESET, at=3)
    reply = await cluster.orchestrator.answer(cluster.request(CHAT, body_for(CHAT, stream=True)))
    assert not isinstance(reply.body, bytes)
    cluster.pool.remove("d0")
    answer = read_answer(CHAT, await read(reply))
    assert answer.error is not None
    assert answer.ended
    await cluster.settle()


async def test_giving_up_a_node_whose_model_was_renamed_leaves_its_stream_alone() -> None:
    cluster = FakeCluster()
    _other_model(cluster)
    reply = await cluster.orchestrator.answer(cluster.request(CHAT, body_for(CHAT, stream=True)))
    assert not isinstance(reply.body, bytes)
    cluster.pool.amend(dataclasses.replace(cluster.pool.configured("d0"), model="renamed"))
    cluster.pool.bring_up(cluster.pool.configured("d0"))
    for _ in range(3):
        cluster.pool.probed("d0", Fault.HEADERS_TIMEOUT, cluster.clock.now() + 1)
    assert read_answer(CHAT, await read(reply)).error is None
    await cluster.settle()


async def test_what_a_broken_leg_may_not_have_read_is_released_when_it_is_asked_anew() -> None:
    """The first of two choices may have read, and the other not."""
    cluster = FakeCluster()
    cluster.fabric.deaf = True
    cluster.decodes[0].fault = InjectedFault(FaultKind.RESET, at=1)
    asking = asyncio.create_task(cluster.ask(CHAT, body_for(CHAT, stream=True, n=2)))
    async with asyncio.timeout(60):
        while not cluster.decodes[0].legs():  # noqa: ASYNC110 - the fakes go on turn by turn
            await asyncio.sleep(0)
    cluster.fabric.deaf = False
    assert read_answer(CHAT, (await asking).body).error is None
    assert len(cluster.decodes[1].legs()) == 1
    await cluster.settle()


async def test_a_bug_in_one_of_several_streams_ends_them_all(access_log: list[logging.LogRecord]) -> None:
    cluster = FakeCluster()
    names = itertools.count()

    def name() -> str:
        number = next(names)
        if number == 2:
            raise RuntimeError("no name is left")
        return f"hand-over-{number}"

    context = dataclasses.replace(cluster.context, new_hand_over_id=name)
    orchestrator = Orchestrator(context)
    body = {**body_for(COMPLETIONS, stream=True), "prompt": [WORDS] * 3}
    async with asyncio.timeout(60):
        with pytest.raises(RuntimeError):
            await read(await orchestrator.answer(cluster.request(COMPLETIONS, body)))
    await context.background.aclose()
    assert [vars(line)["code"] for line in access_log] == ["internal_error"]
    access_log.clear()
    assert len(asyncio.all_tasks()) == 1
    assert not cluster.transport.open
