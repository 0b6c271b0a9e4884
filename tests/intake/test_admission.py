"""Admission: concurrency, the queue, and rejections."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from pdproxy.errors import ClientError
from pdproxy.intake.admission import Admission
from pdproxy.intake.auth import ANONYMOUS, ApiKey
from pdproxy.observe.metrics import Metrics


class AdmissionSetup:
    """An admission, and requests that run until they are told to end."""

    def __init__(self, concurrency: int, queue: int, queue_seconds: float = 60.0, key_limit: int = 0) -> None:
        self.registry = CollectorRegistry()
        self.admission = Admission(concurrency, queue, queue_seconds, Metrics(self.registry), key_limit)
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
    setup = AdmissionSetup(concurrency=1, queue=3)
    tasks = [await setup.start(name, priority) for name, priority in [("a", 0), ("b", 5), ("c", 0), ("d", 0)]]
    assert setup.entered == ["a"]
    assert setup.gauge("pdproxy_requests_queued") == 3
    for name in ["a", "c", "d", "b"]:
        setup.ends[name].set()
        await settle()
    assert setup.entered == ["a", "c", "d", "b"]
    await asyncio.gather(*tasks)
    assert setup.gauge("pdproxy_requests_queued") == 0
    assert setup.gauge("pdproxy_requests_active") == 0


async def test_a_full_queue_answers_429_with_retry_after() -> None:
    setup = AdmissionSetup(concurrency=1, queue=1)
    tasks = [await setup.start("a"), await setup.start("b")]
    with pytest.raises(ClientError) as caught:
        await setup.run("c")
    assert caught.value.status == 429
    assert dict(caught.value.headers)["retry-after"] == "5"
    assert setup.registry.get_sample_value("pdproxy_rejected_total", {"reason": "queue_full"}) == 1
    for name in "ab":
        setup.ends[name].set()
        await settle()
    await asyncio.gather(*tasks)


async def test_a_wait_in_the_queue_times_out() -> None:
    setup = AdmissionSetup(concurrency=1, queue=1, queue_seconds=0.01)
    task = await setup.start("a")
    with pytest.raises(ClientError, match="No place became free"):
        await setup.run("b")
    assert setup.gauge("pdproxy_requests_queued") == 0
    setup.ends["a"].set()
    await task


async def test_a_cancelled_wait_holds_no_place() -> None:
    setup = AdmissionSetup(concurrency=1, queue=5)
    first, second, third = [await setup.start(name) for name in "abc"]
    second.cancel()
    setup.ends["a"].set()
    await settle()
    assert setup.entered == ["a", "c"]
    assert second.cancelled()
    setup.ends["c"].set()
    await asyncio.gather(first, third)
    again = await setup.start("e")
    assert setup.entered[-1] == "e"
    setup.ends["e"].set()
    await again


async def test_a_place_given_at_the_moment_of_cancellation_is_passed_on() -> None:
    setup = AdmissionSetup(concurrency=1, queue=5)
    first, second, third = [await setup.start(name) for name in "abc"]
    setup.ends["a"].set()
    await asyncio.sleep(0)
    second.cancel()
    await settle()
    assert "c" in setup.entered
    setup.ends["c"].set()
    await asyncio.gather(first, third)


@pytest.mark.parametrize(("api_key", "key_limit"), [(ApiKey("k", 1), 0), (ApiKey("k"), 1), (ApiKey("k", 1), 9)])
async def test_a_key_has_its_own_limit(api_key: ApiKey, key_limit: int) -> None:
    setup = AdmissionSetup(concurrency=9, queue=9, key_limit=key_limit)
    task = await setup.start("a", api_key=api_key)
    with pytest.raises(ClientError, match="1 requests open"):
        await setup.run("b", api_key=api_key)
    other = await setup.start("c", api_key=ApiKey("other", 1))
    for name in "ac":
        setup.ends[name].set()
    await asyncio.gather(task, other)
    again = await setup.start("d", api_key=api_key)
    assert setup.entered == ["a", "c", "d"]
    setup.ends["d"].set()
    await again
