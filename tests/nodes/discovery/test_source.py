"""The pool is kept in step with a source."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from pdproxy.background import Background
from pdproxy.nodes.discovery.source import DiscoverySync, Template, TerminatingNode, one_for_each_url
from pdproxy.nodes.drain import Drainer
from pdproxy.nodes.node import Node, Role, State
from pdproxy.nodes.pool import Pool
from tests.fakes.clock import FakeClock
from tests.nodes.fake_pool import settle, until

TEMPLATE = Template((Role.DECODE,))
ONE, TWO = TEMPLATE.node_at("d1", 8000), TEMPLATE.node_at("d2", 8000)


class FakeSource:
    """A source whose lists a test puts in."""

    where = "a test"

    def __init__(self) -> None:
        self.shown: asyncio.Queue[tuple[Node, ...]] = asyncio.Queue()

    async def watch(self) -> AsyncGenerator[tuple[Node, ...], None]:
        while True:
            yield await self.shown.get()

    async def list(self) -> tuple[Node, ...]:
        return await self.shown.get()


@pytest.fixture
def pool() -> Pool:
    return Pool(FakeClock())


@pytest.fixture
async def drainer(pool: Pool) -> AsyncIterator[Drainer]:
    background = Background()
    yield Drainer(pool, FakeClock(), background)
    await background.aclose()


@pytest.fixture
def sync(pool: Pool, drainer: Drainer) -> DiscoverySync:
    return DiscoverySync(pool, drainer, [FakeSource()], 30)


def names(pool: Pool) -> dict[str, State]:
    return {view.node.name: view.state for view in pool.state().nodes}


async def test_nodes_join_and_leave_by_draining(pool: Pool, sync: DiscoverySync) -> None:
    sync.apply((ONE, TWO))
    assert names(pool) == {"decode-d1:8000": State.JOINING, "decode-d2:8000": State.JOINING}
    leg = pool.acquire(TWO.name)
    sync.apply((ONE,))
    assert names(pool)[TWO.name] is State.DRAINING
    leg.release()
    await until(lambda: TWO.name not in names(pool))
    assert ONE.name in names(pool)


async def test_a_node_that_comes_back_while_it_drains_stays(pool: Pool, sync: DiscoverySync) -> None:
    sync.apply((ONE,))
    with pool.acquire(ONE.name):
        sync.apply(())
        await settle()
        sync.apply((ONE,))
    await settle()
    assert names(pool) == {ONE.name: State.JOINING}
    assert not pool.leaving(ONE.name).is_set()


async def test_other_settings_make_it_join_again(pool: Pool, sync: DiscoverySync) -> None:
    sync.apply((ONE,))
    pool.bring_up(ONE)
    sync.apply((ONE,))
    assert names(pool) == {ONE.name: State.UP}
    heavy = dataclasses.replace(ONE, weight=3.0)
    sync.apply((heavy,))
    assert names(pool) == {ONE.name: State.JOINING}
    assert pool.configured(ONE.name) == heavy


async def test_nodes_of_others_are_left_alone(pool: Pool, sync: DiscoverySync) -> None:
    pool.add(Node("mine", ONE.url, (Role.DECODE,)))
    sync.apply((ONE, TWO))
    assert set(names(pool)) == {"mine", TWO.name}
    sync.apply(())
    await until(lambda: set(names(pool)) == {"mine"})
    assert names(pool)["mine"] is State.JOINING


async def test_what_the_operator_removed_stays_removed_until_it_is_found_anew(pool: Pool, sync: DiscoverySync) -> None:
    sync.apply((ONE,))
    pool.remove(ONE.name)
    sync.apply((dataclasses.replace(ONE, weight=2.0),))
    assert names(pool) == {}
    sync.apply(())
    sync.apply((ONE,))
    assert names(pool) == {ONE.name: State.JOINING}


async def test_it_follows_until_it_is_cancelled(pool: Pool, drainer: Drainer) -> None:
    source = FakeSource()
    task = asyncio.create_task(DiscoverySync(pool, drainer, [source], 30).run())
    for shown in ((ONE,), (ONE, TWO), ()):
        source.shown.put_nowait(shown)
        await until(lambda shown=shown: set(names(pool)) == {node.name for node in shown})  # type: ignore[misc]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()


GOING = TEMPLATE.terminating("d1", 8000)


async def test_a_node_that_terminates_is_the_last_resort_until_it_is_gone(pool: Pool, sync: DiscoverySync) -> None:
    sync.apply((ONE, TWO))
    pool.bring_up(ONE)
    sync.apply((GOING, TWO))
    assert names(pool)[ONE.name] is State.TERMINATING
    sync.apply((GOING, TWO))
    assert names(pool)[ONE.name] is State.TERMINATING
    leg = pool.acquire(ONE.name)
    sync.apply((TWO,))
    assert names(pool)[ONE.name] is State.DRAINING
    leg.release()
    await until(lambda: ONE.name not in names(pool))


async def test_a_node_that_terminates_before_it_has_joined_gets_no_requests(pool: Pool, sync: DiscoverySync) -> None:
    sync.apply((GOING,))
    assert names(pool) == {}
    sync.apply((ONE,))
    sync.apply((GOING,))
    assert names(pool) == {ONE.name: State.DRAINING}


async def test_an_address_that_terminated_may_be_a_new_nodes(pool: Pool, sync: DiscoverySync) -> None:
    sync.apply((ONE,))
    pool.bring_up(ONE)
    sync.apply((GOING,))
    sync.apply((ONE,))
    assert names(pool) == {ONE.name: State.JOINING}


async def test_a_terminating_node_that_the_operator_removed_stays_removed(pool: Pool, sync: DiscoverySync) -> None:
    sync.apply((ONE,))
    pool.remove(ONE.name)
    sync.apply((GOING,))
    assert names(pool) == {}


async def test_what_two_sources_list_at_one_address_is_one_node(pool: Pool, drainer: Drainer) -> None:
    prefills, decodes = FakeSource(), FakeSource()
    task = asyncio.create_task(DiscoverySync(pool, drainer, [prefills, decodes], 30).run())
    as_prefill = Template((Role.PREFILL,)).node_at("d1", 8000)

    async def shown(source: FakeSource, *nodes: Node) -> dict[str, tuple[Role, ...]]:
        source.shown.put_nowait(nodes)
        await settle()
        return {view.name: pool.configured(view.name).roles for view in pool.state().nodes}

    assert await shown(decodes, ONE) == {"decode-d1:8000": (Role.DECODE,)}
    assert await shown(prefills, as_prefill) == {"decode-d1:8000": tuple(Role)}
    assert await shown(decodes) == {"decode-d1:8000": (Role.PREFILL,)}
    assert names(pool)["decode-d1:8000"] is State.JOINING
    assert await shown(decodes, TWO) == {"decode-d1:8000": (Role.PREFILL,), "decode-d2:8000": (Role.DECODE,)}
    task.cancel()
    await asyncio.wait([task])


async def test_an_address_leaves_when_no_list_keeps_it() -> None:
    going = Template((Role.PREFILL,)).terminating("d1", 8000)
    assert one_for_each_url([going, ONE]) == (dataclasses.replace(ONE, name=going.name, roles=tuple(Role)),)
    (both,) = one_for_each_url([going, TEMPLATE.terminating("d1", 8000)])
    assert isinstance(both, TerminatingNode)
    assert both.roles == tuple(Role)
