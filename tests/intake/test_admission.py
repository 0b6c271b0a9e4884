"""Places, the queue, and who is turned away."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from pdproxy.errors import ClientError
from pdproxy.intake.admission import Admission
from pdproxy.intake.auth import ANONYMOUS, ApiKey
from pdproxy.observe.metrics import Metrics


class Stage:
    """An admission, and requests that run until they are told to end."""

    def __init__(self, concurrency: int, queue: int, patience: float = 60.0, key_limit: int = 0) -> None:
        self.registry = CollectorRegistry()
        self.admission = Admission(concurrency, queue, patience, Metrics(self.registry), key_limit)
        self.entered: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}

    async def run(self, name: str, priority: int = 0, api_key: ApiKey = ANONYMOUS) -> None:
        end = self.ends[name] = asyncio.Event()
        async with self.admission.admit(api_key, priority):
            self.entered.append(name)
            await end.wait()

    async def start(self, name: str, priority: int = 0, api_key: ApiKey = ANONYMOUS) -> asyncio.Task[None]:
        task = asyncio.create_task(self.run(name, priority, api_key))
        await settle()
        return task

    def gauge(self, name: str) -> float | None:
        return self.registry.get_sample_value(name)


async def settle() -> None:
    """Let every ready task run."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_queue_is_served_by_priority_then_arrival() -> None:
    stage = Stage(concurrency=1, queue=3)
    tasks = [await stage.start(name, priority) for name, priority in [("a", 0), ("b", 5), ("c", 0), ("d", 0)]]
    assert stage.entered == ["a"]
    assert stage.gauge("pdproxy_requests_queued") == 3
    for name in ["a", "c", "d", "b"]:
        stage.ends[name].set()
        await settle()
    assert stage.entered == ["a", "c", "d", "b"]
    await asyncio.gather(*tasks)
    assert stage.gauge("pdproxy_requests_queued") == 0
    assert stage.gauge("pdproxy_requests_active") == 0


async def test_a_full_queue_says_when_to_come_back() -> None:
    stage = Stage(concurrency=1, queue=1)
    tasks = [await stage.start("a"), await stage.start("b")]
    with pytest.raises(ClientError) as caught:
        await stage.run("c")
    assert caught.value.status == 429
    assert dict(caught.value.headers)["retry-after"] == "5"
    assert stage.registry.get_sample_value("pdproxy_rejected_total", {"reason": "queue_full"}) == 1
    for name in "ab":
        stage.ends[name].set()
        await settle()
    await asyncio.gather(*tasks)


async def test_a_wait_has_an_end() -> None:
    stage = Stage(concurrency=1, queue=1, patience=0.01)
    task = await stage.start("a")
    with pytest.raises(ClientError, match="No place became free"):
        await stage.run("b")
    assert stage.gauge("pdproxy_requests_queued") == 0
    stage.ends["a"].set()
    await task


async def test_who_leaves_the_queue_takes_no_place_along() -> None:
    stage = Stage(concurrency=1, queue=5)
    first, second, third = [await stage.start(name) for name in "abc"]
    second.cancel()
    stage.ends["a"].set()
    await settle()
    assert stage.entered == ["a", "c"]
    assert second.cancelled()
    stage.ends["c"].set()
    await asyncio.gather(first, third)
    again = await stage.start("e")
    assert stage.entered[-1] == "e"
    stage.ends["e"].set()
    await again


async def test_a_place_that_comes_in_the_moment_of_leaving_is_passed_on() -> None:
    stage = Stage(concurrency=1, queue=5)
    first, second, third = [await stage.start(name) for name in "abc"]
    stage.ends["a"].set()
    await asyncio.sleep(0)
    second.cancel()
    await settle()
    assert "c" in stage.entered
    stage.ends["c"].set()
    await asyncio.gather(first, third)


@pytest.mark.parametrize(("api_key", "key_limit"), [(ApiKey("k", 1), 0), (ApiKey("k"), 1), (ApiKey("k", 1), 9)])
async def test_a_key_has_its_own_limit(api_key: ApiKey, key_limit: int) -> None:
    stage = Stage(concurrency=9, queue=9, key_limit=key_limit)
    task = await stage.start("a", api_key=api_key)
    with pytest.raises(ClientError, match="1 requests open"):
        await stage.run("b", api_key=api_key)
    other = await stage.start("c", api_key=ApiKey("other", 1))
    for name in "ac":
        stage.ends[name].set()
    await asyncio.gather(task, other)
    again = await stage.start("d", api_key=api_key)
    assert stage.entered == ["a", "c", "d"]
    stage.ends["d"].set()
    await again
