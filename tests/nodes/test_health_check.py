"""Active health, visit by visit and as it runs."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pdproxy.errors import Fault
from pdproxy.nodes.circuit_breaker import CircuitBreakerConfig
from pdproxy.nodes.health_check import HealthCheck
from pdproxy.nodes.join import Joiner, OutageLog
from pdproxy.nodes.node import Node, Role, State
from pdproxy.nodes.pool import Pool
from pdproxy.nodes.preflight import Preflight
from tests.fakes.clock import FakeClock
from tests.nodes.fake_pool import FakeNodeInfo, FakePoolTransport, settle, until


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def transport() -> FakePoolTransport:
    return FakePoolTransport(p1=FakeNodeInfo(Role.PREFILL), d1=FakeNodeInfo(Role.DECODE))


@pytest.fixture
async def pool(clock: FakeClock, transport: FakePoolTransport) -> Pool:
    made = Pool(clock, CircuitBreakerConfig(failures=3, cool_down=10))
    made.add(transport.node("p1"))
    made.add(transport.node("d1"))
    return made


@pytest.fixture
def health(pool: Pool, transport: FakePoolTransport, clock: FakeClock) -> HealthCheck:
    return health_check(pool, transport, clock)


class FakeProof:
    """Notes the joining nodes."""

    def __init__(self) -> None:
        self.joined: list[str] = []

    async def __call__(self, node: Node) -> None:
        self.joined.append(node.name)


def health_check(
    pool: Pool, transport: FakePoolTransport, clock: FakeClock, proof: FakeProof | None = None
) -> HealthCheck:
    joiner = Joiner(pool, Preflight(transport), proof or FakeProof(), OutageLog(clock))
    return HealthCheck(pool, joiner, transport, clock)


async def visit_all(health: HealthCheck, pool: Pool) -> None:
    """One visit to each node, to its end."""
    await asyncio.gather(*(health.visit(view) for view in pool.snapshot().nodes))


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
    await visit_all(health, pool)
    assert [view.state for view in pool.snapshot().nodes] == [State.UP, State.UP]


@pytest.mark.parametrize("fault", [Fault.HEADERS_TIMEOUT, Fault.REFUSED, Fault.RESET, Fault.STALL])
async def test_three_misses_in_a_row_give_a_node_up(
    pool: Pool, transport: FakePoolTransport, health: HealthCheck, fault: Fault
) -> None:
    await visit_all(health, pool)
    transport.nodes["d1"].fault = fault
    await visit_all(health, pool)
    await visit_all(health, pool)
    assert state(pool, "d1") is State.UP
    await visit_all(health, pool)
    assert state(pool, "d1") is State.DOWN
    assert state(pool, "p1") is State.UP
    assert pool.leaving("d1").is_set()


async def test_a_node_that_is_given_up_is_logged_once_and_again_when_it_is_back(
    pool: Pool, transport: FakePoolTransport, clock: FakeClock, health: HealthCheck, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pdproxy.nodes.join")

    def logged() -> list[str]:
        lines = [record.getMessage() for record in caplog.records if record.name == "pdproxy.nodes.join"]
        caplog.clear()
        return [line for line in lines if " serves tiny as " not in line]

    await visit_all(health, pool)
    transport.nodes["d1"].fault = Fault.HEADERS_TIMEOUT
    await visit_all(health, pool)
    await visit_all(health, pool)
    assert logged() == []
    for _ in range(3):
        await visit_all(health, pool)
    [line] = logged()
    assert line.startswith("node d1 cannot be reached: as told. ")
    transport.nodes["d1"].fault = None
    transport.nodes["d1"].paths["/health"] = (503, b"")
    clock.advance(61)
    await visit_all(health, pool)
    assert logged() == ["node d1 still cannot be used, for 1 min now: /health answers 503"]
    transport.nodes["d1"].paths.clear()
    await visit_all(health, pool)
    assert logged() == ["node d1 answers again, after 1 min"]


async def test_what_we_lack_ourselves_changes_nothing(
    pool: Pool, transport: FakePoolTransport, health: HealthCheck
) -> None:
    await visit_all(health, pool)
    for fault, then in ((None, State.UP), (Fault.REFUSED, State.DOWN)):
        transport.nodes["d1"].fault = fault
        for _ in range(3):
            await visit_all(health, pool)
        transport.nodes["d1"].fault = Fault.BUSY
        for _ in range(5):
            await visit_all(health, pool)
        assert state(pool, "d1") is then


async def test_a_node_that_says_it_is_dead_is_believed(
    pool: Pool, transport: FakePoolTransport, health: HealthCheck
) -> None:
    await visit_all(health, pool)
    transport.nodes["d1"].paths["/health"] = (503, b"")
    for _ in range(3):
        await visit_all(health, pool)
    assert state(pool, "d1") is State.DOWN


async def test_a_node_without_a_health_page_is_alive(
    pool: Pool, transport: FakePoolTransport, health: HealthCheck
) -> None:
    await visit_all(health, pool)
    transport.nodes["d1"].paths["/health"] = (404, b"")
    for _ in range(5):
        await visit_all(health, pool)
    assert state(pool, "d1") is State.UP


async def test_slow_probes_now_and_then_change_nothing(
    pool: Pool, transport: FakePoolTransport, health: HealthCheck
) -> None:
    await visit_all(health, pool)
    for fault in [Fault.HEADERS_TIMEOUT, Fault.HEADERS_TIMEOUT, None] * 5:
        transport.nodes["d1"].fault = fault
        await visit_all(health, pool)
        assert state(pool, "d1") is State.UP


async def test_a_node_that_comes_back_passes_its_preflight_again(
    pool: Pool, transport: FakePoolTransport, health: HealthCheck
) -> None:
    await visit_all(health, pool)
    transport.nodes["d1"].fault = Fault.HEADERS_TIMEOUT
    for _ in range(3):
        await visit_all(health, pool)
    transport.nodes["d1"].fault = None
    transport.nodes["d1"].labels = None
    transport.nodes["d1"].version = "0.33.0"
    await visit_all(health, pool)
    assert state(pool, "d1") is State.UP
    assert pool.view("d1").node.cohort == "0.33.0"
    assert pool.view("d1").share < 1


async def test_a_quick_restart_behind_the_same_address_is_noticed(
    pool: Pool, transport: FakePoolTransport, health: HealthCheck
) -> None:
    await visit_all(health, pool)
    transport.nodes["d1"].fault = Fault.REFUSED
    await visit_all(health, pool)
    assert state(pool, "d1") is State.UP
    transport.nodes["d1"].fault = None
    transport.nodes["d1"].labels = None
    await visit_all(health, pool)
    assert pool.view("d1").node.cohort == "0.32.0"


@pytest.mark.parametrize("misses", [1, 3])
async def test_a_node_that_comes_back_is_proved_again(
    pool: Pool, transport: FakePoolTransport, clock: FakeClock, misses: int
) -> None:
    proof = FakeProof()
    health = health_check(pool, transport, clock, proof)
    await visit_all(health, pool)
    transport.nodes["d1"].fault = Fault.REFUSED
    for _ in range(misses):
        await visit_all(health, pool)
    transport.nodes["d1"].fault = None
    await visit_all(health, pool)
    await visit_all(health, pool)
    assert proof.joined == ["p1", "d1", "d1"]


async def test_a_circuit_that_requests_opened_is_not_closed_by_a_health_page(
    pool: Pool, clock: FakeClock, health: HealthCheck
) -> None:
    await visit_all(health, pool)
    for _ in range(3):
        pool.report("d1", Fault.SERVER_ERROR)
    await visit_all(health, pool)
    assert state(pool, "d1") is State.DOWN
    clock.advance(10)
    await visit_all(health, pool)
    assert state(pool, "d1") is State.PROBING


async def test_a_draining_node_is_not_taken_back(pool: Pool, transport: FakePoolTransport, health: HealthCheck) -> None:
    await visit_all(health, pool)
    pool.drain("d1")
    transport.nodes["d1"].fault = Fault.REFUSED
    for _ in range(4):
        await visit_all(health, pool)
    transport.nodes["d1"].fault = None
    await visit_all(health, pool)
    assert state(pool, "d1") is State.DRAINING


async def test_it_runs_by_the_clock(
    pool: Pool, transport: FakePoolTransport, clock: FakeClock, health: HealthCheck
) -> None:
    async with running(health):
        await until(lambda: all(view.state is State.UP for view in pool.snapshot().nodes))
        transport.nodes["d1"].fault = Fault.REFUSED
        asked = transport.nodes["d1"].asked
        for probes in (1, 2, 3):
            await settle()
            clock.advance(5)
            await settle()
            assert asked.count(("/health", None)) == probes
        await until(lambda: state(pool, "d1") is State.DOWN)


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
        await until(lambda: all(view.state is State.UP for view in pool.snapshot().nodes))
        transport.nodes["p1"].held.clear()
        for probes in (1, 2, 3):
            await settle()
            clock.advance(5)
            await settle()
            assert transport.nodes["d1"].asked.count(("/health", None)) == probes
        assert transport.nodes["p1"].asked.count(("/health", None)) == 0


async def test_a_node_removed_while_it_is_visited_harms_nobody(
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


async def visits(health: HealthCheck, pool: Pool, clock: FakeClock, count: int) -> None:
    """As many rounds, five seconds apart."""
    for _ in range(count):
        clock.advance(5)
        await visit_all(health, pool)


def engine(running: int, steps: int) -> tuple[int, bytes]:
    return 200, f"vllm:num_requests_running {running}\nvllm:iteration_tokens_total_count {steps}\n".encode()


async def test_an_engine_that_stands_still_is_given_up_though_its_server_answers(
    pool: Pool, transport: FakePoolTransport, clock: FakeClock, health: HealthCheck
) -> None:
    await visit_all(health, pool)
    transport.nodes["d1"].paths["/metrics"] = engine(1, 7)
    with pool.acquire("d1"):
        await visits(health, pool, clock, 14)
        assert state(pool, "d1") is State.UP
        await visits(health, pool, clock, 1)
        assert state(pool, "d1") is State.DOWN
        assert pool.leaving("d1").is_set()
    await visits(health, pool, clock, 50)
    assert state(pool, "d1") is State.DOWN
    transport.nodes["d1"].paths["/metrics"] = engine(1, 8)
    await visits(health, pool, clock, 1)
    assert state(pool, "d1") is State.UP


async def test_a_long_prefill_that_steps_on_is_left_alone(
    pool: Pool, transport: FakePoolTransport, clock: FakeClock, health: HealthCheck
) -> None:
    await visit_all(health, pool)
    with pool.acquire("p1"):
        for steps in range(50):
            transport.nodes["p1"].paths["/metrics"] = engine(1, steps)
            await visits(health, pool, clock, 1)
    assert state(pool, "p1") is State.UP


async def test_a_node_that_streams_is_not_even_asked_for_its_progress(
    pool: Pool, transport: FakePoolTransport, clock: FakeClock, health: HealthCheck
) -> None:
    await visit_all(health, pool)
    transport.nodes["d1"].asked.clear()
    transport.nodes["d1"].paths["/metrics"] = engine(1, 7)
    with pool.acquire("d1") as stream:
        for _ in range(50):
            stream.progress()
            await visits(health, pool, clock, 1)
    assert state(pool, "d1") is State.UP
    assert ("/metrics", None) not in transport.nodes["d1"].asked


@pytest.mark.parametrize("answer", [Fault.HEADERS_TIMEOUT, (404, b""), engine(0, 7)])
async def test_missing_progress_proves_nothing(
    pool: Pool, transport: FakePoolTransport, clock: FakeClock, health: HealthCheck, answer: tuple[int, bytes] | Fault
) -> None:
    await visit_all(health, pool)
    transport.nodes["d1"].paths["/metrics"] = answer
    with pool.acquire("d1"):
        await visits(health, pool, clock, 50)
    assert state(pool, "d1") is State.UP
