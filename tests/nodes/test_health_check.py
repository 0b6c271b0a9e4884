"""Active health, visit by visit and as it runs."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pdproxy.errors import Fault
from pdproxy.nodes.circuit_breaker import CircuitBreakerConfig
from pdproxy.nodes.health_check import HealthCheck
from pdproxy.nodes.join import Joiner
from pdproxy.nodes.node import Node, Role, State
from pdproxy.nodes.pool import Pool
from pdproxy.nodes.preflight import Preflight
from pdproxy.nodes.reachability import OutageLog
from tests.fakes.clock import FakeClock
from tests.nodes.fake_pool import FakeNodeInfo, FakePoolTransport, settle, until


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def village() -> FakePoolTransport:
    return FakePoolTransport(p1=FakeNodeInfo(Role.PREFILL), d1=FakeNodeInfo(Role.DECODE))


@pytest.fixture
async def pool(clock: FakeClock, village: FakePoolTransport) -> Pool:
    made = Pool(clock, CircuitBreakerConfig(failures=3, cool_down=10))
    made.add(village.node("p1"))
    made.add(village.node("d1"))
    return made


@pytest.fixture
def health(pool: Pool, village: FakePoolTransport, clock: FakeClock) -> HealthCheck:
    return HealthCheck(pool, Joiner(pool, Preflight(village)), village, clock)


def state(pool: Pool, name: str) -> State:
    return pool.view(name).state


@asynccontextmanager
async def running(health: HealthCheck) -> AsyncIterator[None]:
    task = asyncio.create_task(health.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_first_visit_brings_nodes_in(pool: Pool, health: HealthCheck) -> None:
    await health.visit_all()
    assert [view.state for view in pool.snapshot().nodes] == [State.UP, State.UP]


@pytest.mark.parametrize("fault", [Fault.HEADERS_TIMEOUT, Fault.REFUSED, Fault.RESET, Fault.STALL])
async def test_three_misses_in_a_row_give_a_node_up(
    pool: Pool, village: FakePoolTransport, health: HealthCheck, fault: Fault
) -> None:
    await health.visit_all()
    village.houses["d1"].fault = fault
    await health.visit_all()
    await health.visit_all()
    assert state(pool, "d1") is State.UP
    await health.visit_all()
    assert state(pool, "d1") is State.DOWN
    assert state(pool, "p1") is State.UP
    assert pool.leaving("d1").is_set()


async def test_a_node_that_is_given_up_is_logged_once_and_again_when_it_is_back(
    pool: Pool, village: FakePoolTransport, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    outages = OutageLog(clock)
    health = HealthCheck(pool, Joiner(pool, Preflight(village), outages=outages), village, clock, outages=outages)
    caplog.set_level(logging.INFO, "pdproxy.nodes.reachability")

    def said() -> list[str]:
        lines = [record.getMessage() for record in caplog.records if record.name == "pdproxy.nodes.reachability"]
        caplog.clear()
        return lines

    await health.visit_all()
    village.houses["d1"].fault = Fault.HEADERS_TIMEOUT
    await health.visit_all()
    await health.visit_all()
    assert said() == []
    for _ in range(3):
        await health.visit_all()
    [line] = said()
    assert line.startswith("node d1 cannot be reached: as told. ")
    village.houses["d1"].fault = None
    village.houses["d1"].paths["/health"] = (503, b"")
    clock.advance(61)
    await health.visit_all()
    assert said() == ["node d1 still cannot be used, for 1 min now: /health answers 503"]
    village.houses["d1"].paths.clear()
    await health.visit_all()
    assert said() == ["node d1 answers again, after 1 min"]


async def test_what_we_lack_ourselves_changes_nothing(
    pool: Pool, village: FakePoolTransport, health: HealthCheck
) -> None:
    await health.visit_all()
    for fault, then in ((None, State.UP), (Fault.REFUSED, State.DOWN)):
        village.houses["d1"].fault = fault
        for _ in range(3):
            await health.visit_all()
        village.houses["d1"].fault = Fault.BUSY
        for _ in range(5):
            await health.visit_all()
        assert state(pool, "d1") is then


async def test_a_node_that_says_it_is_dead_is_believed(
    pool: Pool, village: FakePoolTransport, health: HealthCheck
) -> None:
    await health.visit_all()
    village.houses["d1"].paths["/health"] = (503, b"")
    for _ in range(3):
        await health.visit_all()
    assert state(pool, "d1") is State.DOWN


async def test_a_node_without_a_health_page_is_alive(
    pool: Pool, village: FakePoolTransport, health: HealthCheck
) -> None:
    await health.visit_all()
    village.houses["d1"].paths["/health"] = (404, b"")
    for _ in range(5):
        await health.visit_all()
    assert state(pool, "d1") is State.UP


async def test_slow_probes_now_and_then_change_nothing(
    pool: Pool, village: FakePoolTransport, health: HealthCheck
) -> None:
    await health.visit_all()
    for fault in [Fault.HEADERS_TIMEOUT, Fault.HEADERS_TIMEOUT, None] * 5:
        village.houses["d1"].fault = fault
        await health.visit_all()
        assert state(pool, "d1") is State.UP


async def test_a_node_that_comes_back_passes_its_preflight_again(
    pool: Pool, village: FakePoolTransport, health: HealthCheck
) -> None:
    await health.visit_all()
    village.houses["d1"].fault = Fault.HEADERS_TIMEOUT
    for _ in range(3):
        await health.visit_all()
    village.houses["d1"].fault = None
    village.houses["d1"].labels = None
    village.houses["d1"].version = "0.33.0"
    await health.visit_all()
    assert state(pool, "d1") is State.UP
    assert pool.view("d1").node.cohort == "0.33.0"
    assert pool.view("d1").share < 1


async def test_a_quick_restart_behind_the_same_address_is_noticed(
    pool: Pool, village: FakePoolTransport, health: HealthCheck
) -> None:
    await health.visit_all()
    village.houses["d1"].fault = Fault.REFUSED
    await health.visit_all()
    assert state(pool, "d1") is State.UP
    village.houses["d1"].fault = None
    village.houses["d1"].labels = None
    await health.visit_all()
    assert pool.view("d1").node.cohort == "0.32.0"


class Greeter:
    """Notes who is introduced."""

    def __init__(self) -> None:
        self.met: list[str] = []

    async def join(self, node: Node) -> None:
        self.met.append(node.name)


@pytest.mark.parametrize("misses", [1, 3])
async def test_a_node_that_comes_back_is_introduced_to_its_partners_again(
    pool: Pool, village: FakePoolTransport, clock: FakeClock, misses: int
) -> None:
    greeter = Greeter()
    health = HealthCheck(pool, Joiner(pool, Preflight(village), greeter), village, clock)
    await health.visit_all()
    village.houses["d1"].fault = Fault.REFUSED
    for _ in range(misses):
        await health.visit_all()
    village.houses["d1"].fault = None
    await health.visit_all()
    await health.visit_all()
    assert greeter.met == ["p1", "d1", "d1"]


async def test_a_circuit_that_requests_opened_is_not_closed_by_a_health_page(
    pool: Pool, clock: FakeClock, health: HealthCheck
) -> None:
    await health.visit_all()
    for _ in range(3):
        pool.report("d1", Fault.SERVER_ERROR)
    await health.visit_all()
    assert state(pool, "d1") is State.DOWN
    clock.advance(10)
    await health.visit_all()
    assert state(pool, "d1") is State.PROBING


async def test_a_draining_node_is_not_taken_back(pool: Pool, village: FakePoolTransport, health: HealthCheck) -> None:
    await health.visit_all()
    pool.drain("d1")
    village.houses["d1"].fault = Fault.REFUSED
    for _ in range(4):
        await health.visit_all()
    village.houses["d1"].fault = None
    await health.visit_all()
    assert state(pool, "d1") is State.DRAINING


async def test_it_runs_by_the_clock(
    pool: Pool, village: FakePoolTransport, clock: FakeClock, health: HealthCheck
) -> None:
    async with running(health):
        await until(lambda: all(view.state is State.UP for view in pool.snapshot().nodes))
        village.houses["d1"].fault = Fault.REFUSED
        asked = village.houses["d1"].asked
        for probes in (1, 2, 3):
            await settle()
            clock.advance(5)
            await settle()
            assert asked.count(("/health", None)) == probes
        await until(lambda: state(pool, "d1") is State.DOWN)


async def test_a_node_that_comes_up_late_is_tried_every_second(
    pool: Pool, village: FakePoolTransport, clock: FakeClock, health: HealthCheck
) -> None:
    village.houses["d1"].fault = Fault.REFUSED
    async with running(health):
        await settle()
        village.houses["p1"].asked.clear()
        village.houses["d1"].fault = None
        clock.advance(1)
        await settle()
        assert state(pool, "d1") is State.UP
        assert ("/health", None) not in village.houses["p1"].asked


async def test_a_node_added_later_is_visited_at_once(
    pool: Pool, village: FakePoolTransport, health: HealthCheck
) -> None:
    async with running(health):
        await until(lambda: state(pool, "p1") is State.UP)
        village.houses["d2"] = FakeNodeInfo(Role.DECODE)
        pool.add(village.node("d2"))
        await until(lambda: state(pool, "d2") is State.UP)


async def test_a_slow_node_delays_no_other(
    pool: Pool, village: FakePoolTransport, clock: FakeClock, health: HealthCheck
) -> None:
    async with running(health):
        await until(lambda: all(view.state is State.UP for view in pool.snapshot().nodes))
        village.houses["p1"].held.clear()
        for probes in (1, 2, 3):
            await settle()
            clock.advance(5)
            await settle()
            assert village.houses["d1"].asked.count(("/health", None)) == probes
        assert village.houses["p1"].asked.count(("/health", None)) == 0


async def test_a_node_removed_while_it_is_visited_harms_nobody(
    pool: Pool, village: FakePoolTransport, health: HealthCheck
) -> None:
    async with running(health):
        village.houses["d1"].held.clear()
        await until(lambda: state(pool, "p1") is State.UP)
        pool.remove("d1")
        village.houses["d1"].held.set()
        village.houses["d2"] = FakeNodeInfo(Role.DECODE)
        pool.add(village.node("d2"))
        await until(lambda: state(pool, "d2") is State.UP)


async def visits(health: HealthCheck, clock: FakeClock, count: int) -> None:
    """As many rounds, five seconds apart."""
    for _ in range(count):
        clock.advance(5)
        await health.visit_all()


def engine(running: int, steps: int) -> tuple[int, bytes]:
    return 200, f"vllm:num_requests_running {running}\nvllm:iteration_tokens_total_count {steps}\n".encode()


async def test_an_engine_that_stands_still_is_given_up_though_its_server_answers(
    pool: Pool, village: FakePoolTransport, clock: FakeClock, health: HealthCheck
) -> None:
    await health.visit_all()
    village.houses["d1"].paths["/metrics"] = engine(1, 7)
    with pool.acquire("d1"):
        await visits(health, clock, 14)
        assert state(pool, "d1") is State.UP
        await visits(health, clock, 1)
        assert state(pool, "d1") is State.DOWN
        assert pool.leaving("d1").is_set()
    await visits(health, clock, 50)
    assert state(pool, "d1") is State.DOWN
    village.houses["d1"].paths["/metrics"] = engine(1, 8)
    await visits(health, clock, 1)
    assert state(pool, "d1") is State.UP


async def test_a_long_prefill_that_steps_on_is_left_alone(
    pool: Pool, village: FakePoolTransport, clock: FakeClock, health: HealthCheck
) -> None:
    await health.visit_all()
    with pool.acquire("p1"):
        for steps in range(50):
            village.houses["p1"].paths["/metrics"] = engine(1, steps)
            await visits(health, clock, 1)
    assert state(pool, "p1") is State.UP


async def test_a_node_that_streams_is_not_even_asked_for_its_vitals(
    pool: Pool, village: FakePoolTransport, clock: FakeClock, health: HealthCheck
) -> None:
    await health.visit_all()
    village.houses["d1"].asked.clear()
    village.houses["d1"].paths["/metrics"] = engine(1, 7)
    with pool.acquire("d1") as stream:
        for _ in range(50):
            stream.progress()
            await visits(health, clock, 1)
    assert state(pool, "d1") is State.UP
    assert ("/metrics", None) not in village.houses["d1"].asked


@pytest.mark.parametrize("answer", [Fault.HEADERS_TIMEOUT, (404, b""), engine(0, 7)])
async def test_missing_vitals_prove_nothing(
    pool: Pool, village: FakePoolTransport, clock: FakeClock, health: HealthCheck, answer: tuple[int, bytes] | Fault
) -> None:
    await health.visit_all()
    village.houses["d1"].paths["/metrics"] = answer
    with pool.acquire("d1"):
        await visits(health, clock, 50)
    assert state(pool, "d1") is State.UP
