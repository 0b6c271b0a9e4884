"""A queue by itself, with prompts that run until they are told to end."""

import asyncio
import dataclasses
from collections.abc import Mapping

import pytest
from prometheus_client import CollectorRegistry

from pdproxy.errors import ClientError
from pdproxy.observe.metrics import Metrics
from pdproxy.orchestration.request_queue import QueuedPrompt, QueueLimits, QueueStatus, RequestQueue
from pdproxy.planning.queue import Queued
from pdproxy.planning.shares import KeyLimits, LimitsByKey
from tests.fakes.clock import FakeClock

ASKED = Queued("key", 0, 10, deadline=1e9)


def queued_prompt(queue: RequestQueue, asked: Queued = ASKED) -> QueuedPrompt:
    return QueuedPrompt(queue, **dataclasses.asdict(asked))


class QueueSetup:
    """A queue, and prompts that run until they are told to end. ``room``: how many have room on the nodes, by model."""

    def __init__(
        self,
        concurrency: int = 1,
        queue: int = 100,
        queue_seconds: float = 60.0,
        reserve: float = 0.125,
        keys: Mapping[str, KeyLimits] | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        self.clock = FakeClock()
        limits = QueueLimits(concurrency, queue, queue_seconds, reserve)
        self.keys = LimitsByKey(keys)
        self.metrics = Metrics(self.registry)
        self.queue = RequestQueue(limits, self.clock, self.metrics, self.keys)
        self.prompts: dict[str, QueuedPrompt] = {}
        self.room: dict[str, int] = {}
        self.entered: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, name: str, asked: Queued = ASKED, model: str = "m") -> asyncio.Task[None]:
        self.tasks[name] = asyncio.create_task(self._run(name, asked, model))
        await settle()
        return self.tasks[name]

    async def end(self, *names: str) -> None:
        for name in names:
            self.ends[name].set()
            await settle()
            await self.tasks[name]

    async def rejected(self, name: str, asked: Queued = ASKED) -> ClientError:
        """The error of one that is turned away."""
        with pytest.raises(ClientError) as caught:
            await (await self.start(name, asked))
        return caught.value

    def check_empty(self) -> None:
        assert dataclasses.replace(self.queue.status(), seconds=None) == QueueStatus()
        assert self.registry.get_sample_value("pdproxy_requests_queued") == 0
        assert self.registry.get_sample_value("pdproxy_requests_active") == 0

    async def _run(self, name: str, asked: Queued, model: str) -> None:
        end = self.ends[name] = asyncio.Event()
        queued = self.prompts[name] = queued_prompt(self.queue, asked)
        try:
            await queued.start_when_room(lambda _: self._take(name, model), lambda: model)
            assert self.entered.count(name) == 1
            await end.wait()
            self.room[model] = self.room.get(model, 0) + 1
        finally:
            queued.end()
            queued.end()

    def _take(self, name: str, model: str) -> bool:
        if self.room.get(model, 1000) < 1:
            return False
        self.room[model] = self.room.get(model, 1000) - 1
        self.entered.append(name)
        return True


async def settle() -> None:
    """Let every ready task run."""
    for _ in range(10):
        await asyncio.sleep(0)


def of(key: str = "key", priority: int = 0, **more: float) -> Queued:
    return dataclasses.replace(ASKED, key=key, priority=priority, **more)  # type: ignore[arg-type]
