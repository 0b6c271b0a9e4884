"""Active health as it runs: when it visits which node."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdproxy.errors import Fault
from pdproxy.nodes.health_check import HealthCheck
from pdproxy.nodes.node import Role, State
from pdproxy.nodes.pool import Pool
from tests.fakes.clock import FakeClock
from tests.nodes.fake_pool import FakeNodeInfo, FakePoolTransport, settle, until
from tests.nodes.health import state


def all_up(pool: Pool) -> bool:
    return all(view.state is State.UP for view in pool.state().nodes)


@asynccontextmanager
async def running(health: HealthCheck) -> AsyncIterator[None]:
    task = asyncio.create_task(health.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def interval_of_two(clock: FakeClock) -> None:
    """The time after which two nodes are due, and that until both are visited."""
    for seconds in (5, 0.5):
        await settle()
        clock.advance(seconds)
    await settle()


async def test_it_runs_by_the_clock(
    pool: Pool, transport: FakePoolTransport, clock: FakeClock, health: HealthCheck
) -> None:
    async with running(health):
        await until(lambda: all_up(pool))
        transport.nodes["d1"].fault = Fault.REFUSED
        asked = transport.nodes["d1"].asked
        for probes in (1, 2, 3):
            await interval_of_two(clock)
            assert asked.count(("/health", None)) == probes
        await until(lambda: state(pool, "d1") is State.DOWN)


async def test_an_idle_node_whose_process_is_killed_is_down_two_seconds_after_the_first_probe(
    pool: Pool, transport: FakePoolTransport, clock: FakeClock, health: HealthCheck
) -> None:
    """No request tells of it. Its host refuses connections at once, so the next probes need not wait for their turn."""
    async with running(health):
        await until(lambda: all_up(pool))
        transport.nodes["d1"].fault = Fault.REFUSED
        for _ in range(6):
            clock.advance(1)
            await settle()
        assert state(pool, "d1") is State.UP
        clock.advance(1)
        await settle()
        assert state(pool, "d1") is State.DOWN
        assert transport.nodes["p1"].asked.count(("/health", None)) == 1
        asked = transport.nodes["d1"].asked.count(("/health", None))
        for _ in range(5):
            clock.advance(1)
            await settle()
        assert transport.nodes["d1"].asked.count(("/health", None)) == asked + 1, "each interval, once it is down"


async def test_nodes_that_joined_together_are_visited_one_after_the_other(
    pool: Pool, transport: FakePoolTransport, clock: FakeClock, health: HealthCheck
) -> None:
    names = [f"n{number}" for number in range(8)]
    for name in names:
        transport.nodes[name] = FakeNodeInfo(Role.DECODE)
        pool.add(transport.node(name))

    def visited() -> int:
        return sum(node.asked.count(("/health", None)) for node in transport.nodes.values())

    async with running(health):
        await until(lambda: all_up(pool))
        for interval in range(3):
            await settle()
            clock.advance(5 - (0.9 if interval else 0))
            for number in range(10):
                await settle()
                assert visited() == 10 * interval + number + 1
                clock.advance(0.1)


async def test_nodes_that_join_are_visited_at_once(
    pool: Pool, transport: FakePoolTransport, health: HealthCheck
) -> None:
    async with running(health):
        await settle()
        assert all_up(pool)


async def test_a_node_that_refused_a_connection_is_not_put_off(
    pool: Pool, transport: FakePoolTransport, clock: FakeClock, health: HealthCheck
) -> None:
    transport.nodes["p1"].fault = Fault.REFUSED
    async with running(health):
        await settle()
        transport.nodes["p1"].fault = None
        clock.advance(1)
        await settle()
        assert all_up(pool)
        transport.nodes["d1"].fault = Fault.REFUSED
        for seconds, probes in ((4, 1), (1, 2)):  # at the second time p1, which joined later, is due as well
            clock.advance(seconds)
            await settle()
            assert transport.nodes["d1"].asked.count(("/health", None)) == probes
        assert transport.nodes["p1"].asked.count(("/health", None)) == 1


async def test_a_node_that_comes_up_late_is_tried_every_second(
    pool: Pool, transport: FakePoolTransport, clock: FakeClock, health: HealthCheck
) -> None:
    transport.nodes["d1"].fault = Fault.REFUSED
    async with running(health):
        await settle()
        transport.nodes["p1"].asked.clear()
        transport.nodes["d1"].fault = None
        clock.advance(1)
        await settle()
        assert state(pool, "d1") is State.UP
        assert ("/health", None) not in transport.nodes["p1"].asked


async def test_a_node_added_later_is_visited_at_once(
    pool: Pool, transport: FakePoolTransport, health: HealthCheck
) -> None:
    async with running(health):
        await until(lambda: state(pool, "p1") is State.UP)
        transport.nodes["d2"] = FakeNodeInfo(Role.DECODE)
        pool.add(transport.node("d2"))
        await until(lambda: state(pool, "d2") is State.UP)


async def test_a_slow_node_delays_no_other(
    pool: Pool, transport: FakePoolTransport, clock: FakeClock, health: HealthCheck
) -> None:
    async with running(health):
        await until(lambda: all_up(pool))
        transport.nodes["p1"].held.clear()
        for probes in (1, 2, 3):
            await interval_of_two(clock)
            assert transport.nodes["d1"].asked.count(("/health", None)) == probes
        assert transport.nodes["p1"].asked.count(("/health", None)) == 0


async def test_a_node_removed_while_it_is_visited_does_no_harm(
    pool: Pool, transport: FakePoolTransport, health: HealthCheck
) -> None:
    async with running(health):
        transport.nodes["d1"].held.clear()
        await until(lambda: state(pool, "p1") is State.UP)
        pool.remove("d1")
        transport.nodes["d1"].held.set()
        transport.nodes["d2"] = FakeNodeInfo(Role.DECODE)
        pool.add(transport.node("d2"))
        await until(lambda: state(pool, "d2") is State.UP)
