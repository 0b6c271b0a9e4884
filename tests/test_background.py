"""Background tasks that end are logged and started again."""

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
        keeper.keep(Task.HEALTH, work.run)
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
