"""How nodes leave."""

from collections.abc import AsyncIterator

import pytest

from pdproxy.background import Background
from pdproxy.nodes.drain import AfterDrain, Drainer
from pdproxy.nodes.node import Node, Role, State
from pdproxy.nodes.pool import Pool, UnknownNode
from tests.fakes.clock import FakeClock
from tests.nodes.fake_pool import settle, until

NODE = Node("d1", "http://d1", (Role.DECODE,), "tiny")


@pytest.fixture
def pool(clock: FakeClock) -> Pool:
    made = Pool(clock)
    made.add(NODE)
    made.bring_up(NODE)
    return made


@pytest.fixture
async def drainer(pool: Pool, clock: FakeClock) -> AsyncIterator[Drainer]:
    background = Background(clock)
    yield Drainer(pool, clock, background, grace=5)
    await background.aclose()


async def test_an_idle_node_is_removed_at_once(pool: Pool, drainer: Drainer) -> None:
    drainer.start("d1", 30, AfterDrain.REMOVE)
    assert pool.view("d1").state is State.DRAINING
    await until(lambda: not pool.state().nodes)


async def test_running_requests_may_finish(pool: Pool, drainer: Drainer, clock: FakeClock) -> None:
    leg, leaving = pool.acquire("d1"), pool.leaving("d1")
    drainer.start("d1", 30, AfterDrain.REMOVE)
    await settle()
    clock.advance(29)
    await settle()
    assert not leaving.is_set()
    leg.release()
    await until(lambda: not pool.state().nodes)


async def test_at_the_deadline_streams_must_leave_and_get_time_for_it(
    pool: Pool, drainer: Drainer, clock: FakeClock
) -> None:
    leg, leaving = pool.acquire("d1"), pool.leaving("d1")
    drainer.start("d1", 30, AfterDrain.REMOVE)
    await settle()
    clock.advance(30)
    await until(leaving.is_set)
    assert pool.view("d1").state is State.DRAINING
    await settle()
    clock.advance(5)
    await until(lambda: not pool.state().nodes)
    leg.release()


async def test_a_drained_node_is_kept_if_so_wanted(pool: Pool, drainer: Drainer) -> None:
    drainer.start("d1", 30, AfterDrain.KEEP)
    await settle()
    assert pool.view("d1").state is State.DRAINING


async def test_a_second_drain_replaces_the_first(pool: Pool, drainer: Drainer, clock: FakeClock) -> None:
    with pool.acquire("d1"):
        drainer.start("d1", 30, AfterDrain.KEEP)
        await settle()
        drainer.start("d1", 0, AfterDrain.REMOVE)
        await until(pool.leaving("d1").is_set)
    await until(lambda: not pool.state().nodes)


async def test_a_stopped_drain_has_no_deadline_any_more(pool: Pool, drainer: Drainer, clock: FakeClock) -> None:
    with pool.acquire("d1"):
        drainer.start("d1", 30, AfterDrain.REMOVE)
        await settle()
        drainer.stop("d1")
        pool.rejoin("d1")
        await settle()
        clock.advance(100)
        await settle()
        assert not pool.leaving("d1").is_set()
    assert pool.view("d1").state is State.JOINING


async def test_an_unknown_node_cannot_be_drained(drainer: Drainer) -> None:
    with pytest.raises(UnknownNode):
        drainer.start("absent", 30, AfterDrain.KEEP)


async def test_streams_leave_a_terminating_node_at_the_deadline_also_those_that_came_late(
    pool: Pool, drainer: Drainer, clock: FakeClock
) -> None:
    drainer.terminate("d1", 30)
    await settle()
    with pool.acquire("d1"):
        leaving = pool.leaving("d1")
        clock.advance(29)
        await settle()
        assert (pool.view("d1").state, leaving.is_set()) == (State.TERMINATING, False)
        clock.advance(1)
        await until(leaving.is_set)
    assert pool.view("d1").state is State.TERMINATING


async def test_a_terminating_node_that_is_gone_is_removed(pool: Pool, drainer: Drainer) -> None:
    drainer.terminate("d1", 30)
    drainer.start("d1", 30, AfterDrain.REMOVE)
    await until(lambda: not pool.state().nodes)
