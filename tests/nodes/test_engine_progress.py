"""Whether an engine with requests still steps, and what health checks make of it."""

import pytest

from pdproxy.errors import Fault
from pdproxy.nodes.health_check import HealthCheck, read_engine_progress
from pdproxy.nodes.node import State
from pdproxy.nodes.pool import Pool
from tests.fakes.clock import FakeClock
from tests.nodes.fake_pool import FakePoolTransport
from tests.nodes.health import state, visit_all


def reading(running: float, steps: int, usage: float = 0.5) -> bytes:
    """The lines that matter among some that do not, as vLLM writes them."""
    return "\n".join(
        [
            "# HELP vllm:num_requests_running Number of requests in model execution batches.",
            f'vllm:num_requests_running{{engine="0",model_name="tiny"}} {running}',
            f'vllm:kv_cache_usage_perc{{engine="0",model_name="tiny"}} {usage}',
            f'vllm:iteration_tokens_total_count{{engine="0",model_name="tiny"}} {steps}.0',
            f"process_cpu_seconds_total {steps * 3.5 + usage}",
        ]
    ).encode()


@pytest.mark.parametrize("body", [b"", b"# nothing here\n", b"vllm:num_requests_running{} x\n", b"\xff\xfe"])
def test_statistics_that_are_off_give_no_progress(body: bytes) -> None:
    assert read_engine_progress(body, None, 0) is None


def test_engines_behind_one_server_are_added_up() -> None:
    body = b'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_running{engine="1"} 3.0\n'
    progress = read_engine_progress(body, None, 0)
    assert progress is not None
    assert progress.running == 5


@pytest.mark.parametrize(
    ("then", "still"),
    [
        (reading(1, 7), 30.0),
        (reading(1, 8), 0.0),
        (reading(2, 7), 0.0),
        (reading(1, 7, usage=0.6), 0.0),
    ],
)
def test_only_a_reading_that_does_not_change_is_still(then: bytes, still: float) -> None:
    first = read_engine_progress(reading(1, 7), None, 100)
    second = read_engine_progress(then, first, 130)
    assert first is not None
    assert second is not None
    assert second.still_seconds(130) == still


def test_an_engine_with_nothing_to_do_may_stand_still() -> None:
    idle = read_engine_progress(reading(0, 7), read_engine_progress(reading(0, 7), None, 100), 1000)
    assert idle is not None
    assert idle.still_seconds(1000) == 0


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
