"""The pool follows a source."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from pdproxy.nodes.discovery.follow import Follower
from pdproxy.nodes.discovery.source import Template
from pdproxy.nodes.drain import Drainer
from pdproxy.nodes.node import Node, Role, State
from pdproxy.nodes.pool import Pool
from tests.fakes.clock import FakeClock
from tests.nodes.turns import settle, until

TEMPLATE = Template(Role.DECODE)
ONE, TWO = TEMPLATE.node("d1", 8000), TEMPLATE.node("d2", 8000)


class Told:
    """A source that shows what it is told."""

    def __init__(self) -> None:
        self.shown: asyncio.Queue[tuple[Node, ...]] = asyncio.Queue()

    async def sightings(self) -> AsyncGenerator[tuple[Node, ...], None]:
        while True:
            yield await self.shown.get()


@pytest.fixture
def pool() -> Pool:
    return Pool(FakeClock())


@pytest.fixture
async def drainer(pool: Pool) -> AsyncIterator[Drainer]:
    made = Drainer(pool, FakeClock())
    yield made
    await made.aclose()


@pytest.fixture
def follower(pool: Pool, drainer: Drainer) -> Follower:
    return Follower(pool, drainer, Told(), 30)


def names(pool: Pool) -> dict[str, State]:
    return {view.node.name: view.state for view in pool.snapshot().nodes}


async def test_nodes_join_and_leave_by_draining(pool: Pool, follower: Follower) -> None:
    follower.apply((ONE, TWO))
    assert names(pool) == {"decode-d1:8000": State.JOINING, "decode-d2:8000": State.JOINING}
    leg = pool.occupy(TWO.name)
    follower.apply((ONE,))
    assert names(pool)[TWO.name] is State.DRAINING
    leg.release()
    await until(lambda: TWO.name not in names(pool))
    assert ONE.name in names(pool)


async def test_a_node_that_comes_back_while_it_drains_stays(pool: Pool, follower: Follower) -> None:
    follower.apply((ONE,))
    with pool.occupy(ONE.name):
        follower.apply(())
        await settle()
        follower.apply((ONE,))
    await settle()
    assert names(pool) == {ONE.name: State.JOINING}
    assert not pool.leaving(ONE.name).is_set()


async def test_other_settings_make_it_join_again(pool: Pool, follower: Follower) -> None:
    follower.apply((ONE,))
    pool.admit(ONE)
    follower.apply((ONE,))
    assert names(pool) == {ONE.name: State.UP}
    heavy = dataclasses.replace(ONE, weight=3.0)
    follower.apply((heavy,))
    assert names(pool) == {ONE.name: State.JOINING}
    assert pool.configured(ONE.name) == heavy


async def test_nodes_of_others_are_left_alone(pool: Pool, follower: Follower) -> None:
    pool.add(Node("mine", ONE.url, Role.DECODE))
    follower.apply((ONE, TWO))
    assert set(names(pool)) == {"mine", TWO.name}
    follower.apply(())
    await until(lambda: set(names(pool)) == {"mine"})
    assert names(pool)["mine"] is State.JOINING


async def test_what_the_operator_removed_stays_removed_until_it_is_found_anew(pool: Pool, follower: Follower) -> None:
    follower.apply((ONE,))
    pool.remove(ONE.name)
    follower.apply((dataclasses.replace(ONE, weight=2.0),))
    assert names(pool) == {}
    follower.apply(())
    follower.apply((ONE,))
    assert names(pool) == {ONE.name: State.JOINING}


async def test_it_follows_until_it_is_cancelled(pool: Pool, drainer: Drainer) -> None:
    source = Told()
    task = asyncio.create_task(Follower(pool, drainer, source, 30).run())
    for shown in ((ONE,), (ONE, TWO), ()):
        source.shown.put_nowait(shown)
        await until(lambda shown=shown: set(names(pool)) == {node.name for node in shown})  # type: ignore[misc]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
