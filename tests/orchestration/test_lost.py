"""What once lost a request, or left something behind."""

import asyncio
import dataclasses
import itertools

import pytest

from pdproxy.errors import Fault
from pdproxy.nodes.node import Node, Role
from pdproxy.orchestration.orchestrator import Orchestrator
from pdproxy.orchestration.resources import BackgroundTasks
from pdproxy.request import Endpoint
from tests.fakes.faults import FaultKind, InjectedFault
from tests.orchestration.answers import read_answer
from tests.orchestration.cluster import FakeCluster, read
from tests.orchestration.prompts import WORDS, body_for, right

CHAT, COMPLETIONS = Endpoint.CHAT, Endpoint.COMPLETIONS


def _other_model(world: FakeCluster) -> None:
    """The second decode node serves another model, so that the first one's can become unknown."""
    world.pool.remove("d1")
    node = Node("d1", world.decodes[1].url, Role.DECODE, "other")
    world.pool.add(node)
    world.pool.admit(node)


async def test_a_stream_whose_node_was_the_last_of_its_model_and_is_removed_goes_on_there() -> None:
    world = FakeCluster()
    _other_model(world)
    reply = await world.orchestrator.answer(world.request(CHAT, body_for(CHAT, stream=True)))
    assert not isinstance(reply.body, bytes)
    world.pool.remove("d0")
    told = read_answer(CHAT, await read(reply))
    assert (told.texts[0], told.error, told.ended) == (right(CHAT), None, True)
    await world.settle()


async def test_a_stream_that_breaks_when_its_model_is_gone_ends_in_an_error_event() -> None:
    world = FakeCluster()
    _other_model(world)
    world.decodes[0].trouble = InjectedFault(FaultKind.RESET, at=3)
    reply = await world.orchestrator.answer(world.request(CHAT, body_for(CHAT, stream=True)))
    assert not isinstance(reply.body, bytes)
    world.pool.remove("d0")
    told = read_answer(CHAT, await read(reply))
    assert told.error is not None
    assert told.ended
    await world.settle()


async def test_giving_a_node_up_whose_model_is_gone_disturbs_nobody() -> None:
    world = FakeCluster()
    _other_model(world)
    reply = await world.orchestrator.answer(world.request(CHAT, body_for(CHAT, stream=True)))
    assert not isinstance(reply.body, bytes)
    world.pool.amend(dataclasses.replace(world.pool.configured("d0"), model="renamed"))
    world.pool.admit(world.pool.configured("d0"))
    for _ in range(3):
        world.pool.probed("d0", Fault.HEADERS_TIMEOUT, world.clock.now() + 1)
    assert read_answer(CHAT, await read(reply)).error is None
    await world.settle()


async def test_what_a_broken_leg_may_not_have_read_is_released_when_it_is_asked_anew() -> None:
    """The first of two choices may have read, and the other not."""
    world = FakeCluster()
    world.fabric.deaf = True
    world.decodes[0].trouble = InjectedFault(FaultKind.RESET, at=1)
    asking = asyncio.create_task(world.ask(CHAT, body_for(CHAT, stream=True, n=2)))
    async with asyncio.timeout(60):
        while not world.decodes[0].legs():  # noqa: ASYNC110 - the fakes go on turn by turn
            await asyncio.sleep(0)
    world.fabric.deaf = False
    assert read_answer(CHAT, (await asking).body).error is None
    assert len(world.decodes[1].legs()) == 1
    await world.settle()


async def test_a_bug_in_one_of_several_streams_ends_them_all() -> None:
    world = FakeCluster()
    names = itertools.count()

    def name() -> str:
        number = next(names)
        if number == 2:
            raise RuntimeError("no name is left")
        return f"hand-over-{number}"

    context = dataclasses.replace(world.context, new_hand_over_id=name)
    background_tasks = BackgroundTasks(context)
    orchestrator = Orchestrator(context, background_tasks)
    body = {**body_for(COMPLETIONS, stream=True), "prompt": [WORDS] * 3}
    async with asyncio.timeout(60):
        with pytest.raises(RuntimeError):
            await read(await orchestrator.answer(world.request(COMPLETIONS, body)))
    await background_tasks.aclose()
    assert len(asyncio.all_tasks()) == 1
    assert not world.transport.open
