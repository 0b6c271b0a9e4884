"""Work beside requests: loops begin again, watches are cancelled, errands are waited for, failures are logged."""

import asyncio
import logging

import pytest
from prometheus_client import CollectorRegistry

from pdproxy.background import Background
from pdproxy.observe.labels import Task
from pdproxy.observe.metrics import Metrics
from tests.fakes.clock import FakeClock
from tests.nodes.fake_pool import settle, until


class Work:
    """Fails the first time, returns the second time, then goes on; says what became of it."""

    def __init__(self) -> None:
        self.begun = 0
        self.ended = 0

    async def run(self) -> None:
        self.begun += 1
        try:
            if self.begun == 1:
                raise ValueError("something odd")
            if self.begun > 2:
                await asyncio.get_running_loop().create_future()
        finally:
            self.ended += 1


async def test_a_task_that_ends_is_logged_and_started_again(caplog: pytest.LogCaptureFixture) -> None:
    clock, registry, work = FakeClock(), CollectorRegistry(), Work()
    keeper = Background(clock, Metrics(registry).task_failed, pause=1.0)
    with caplog.at_level(logging.ERROR):
        keeper.run_forever(Task.HEALTH, work.run)
        for begun in (1, 2):
            await until(lambda: len(caplog.records) == begun)  # noqa: B023 - awaited before the next turn
            await settle()
            assert work.begun == begun
            clock.advance(1.0)
        await until(lambda: work.begun == 3)
    assert "something odd" in caplog.text
    assert registry.get_sample_value("pdproxy_task_failures_total", {"task": "health"}) == 2
    assert work.ended == 2
    await keeper.aclose()
    assert work.ended == 3


async def test_a_look_is_taken_again_some_seconds_after_it_ended() -> None:
    clock, looks = FakeClock(), 0

    async def look() -> None:
        nonlocal looks
        looks += 1
        await asyncio.sleep(0)

    background = Background(clock)
    background.every("looks", 5.0, look)
    for expected in (1, 2, 3):
        await settle()
        assert looks == expected
        clock.advance(4.9)
        await settle()
        assert looks == expected
        clock.advance(0.1)
    await settle()
    await background.aclose()
    clock.advance(5.0)
    await settle()
    assert looks == 4


async def test_an_errand_is_waited_for_and_cancelled_where_it_takes_too_long() -> None:
    ends = list[str]()

    async def errand(name: str, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
            ends.append(f"{name} done")
        except asyncio.CancelledError:
            ends.append(f"{name} cancelled")
            raise

    background = Background(patience=0.05)
    background.finish("short", errand("short", 0.0))
    background.finish("endless", errand("endless", 3600.0))
    assert background.errands == 2
    await background.aclose()
    assert ends == ["short done", "endless cancelled"]
    assert background.errands == 0


async def test_a_watch_is_cancelled_at_once() -> None:
    background = Background(patience=3600.0)
    task = background.start("watch", asyncio.sleep(3600.0, None))
    await background.aclose()
    assert task.cancelled()


@pytest.mark.parametrize("way", ["start", "finish"])
async def test_a_failure_is_logged_by_its_name(way: str, caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ValueError("something odd")

    background = Background()
    with caplog.at_level(logging.ERROR):
        getattr(background, way)("an errand", fail())
        await until(lambda: bool(caplog.records))
    assert caplog.messages == ["an errand failed"]
    assert "something odd" in caplog.text
    await background.aclose()
