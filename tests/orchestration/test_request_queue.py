"""The queue by itself: what waits, for whom, how long, and what is left behind."""

import asyncio
import dataclasses

import pytest
from prometheus_client import CollectorRegistry

from pdproxy.errors import ClientError
from pdproxy.observe.metrics import Metrics
from pdproxy.orchestration.request_queue import Admission, Asked, QueueLimits, QueueStatus, RequestQueue
from tests.fakes.clock import FakeClock

ASKED = Asked("key", 0, 10, deadline=1e9)


class QueueSetup:
    """A queue, and prompts that run until they are told to end. ``room``: how many have room on the nodes, by model."""

    def __init__(self, concurrency: int = 1, queue: int = 100, queue_seconds: float = 60.0) -> None:
        self.registry = CollectorRegistry()
        self.clock = FakeClock()
        limits = QueueLimits(concurrency, queue, queue_seconds)
        self.queue = RequestQueue(limits, self.clock, Metrics(self.registry))
        self.room: dict[str, int] = {}
        self.entered: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, name: str, asked: Asked = ASKED, model: str = "m") -> asyncio.Task[None]:
        self.tasks[name] = asyncio.create_task(self._run(name, asked, model))
        await settle()
        return self.tasks[name]

    async def end(self, *names: str) -> None:
        for name in names:
            self.ends[name].set()
            await settle()
            await self.tasks[name]

    async def rejected(self, name: str, asked: Asked = ASKED) -> ClientError:
        """The error of one that is turned away."""
        with pytest.raises(ClientError) as caught:
            await (await self.start(name, asked))
        return caught.value

    def check_empty(self) -> None:
        assert dataclasses.replace(self.queue.status(), seconds=None) == QueueStatus()
        assert self.registry.get_sample_value("pdproxy_requests_queued") == 0
        assert self.registry.get_sample_value("pdproxy_requests_active") == 0

    async def _run(self, name: str, asked: Asked, model: str) -> None:
        end = self.ends[name] = asyncio.Event()
        admission = Admission(self.queue, asked)
        try:
            assert await admission.begin(lambda: self._take(name, model), lambda: model) == name
            await end.wait()
            self.room[model] = self.room.get(model, 0) + 1
        finally:
            admission.end()
            admission.end()

    def _take(self, name: str, model: str) -> str | None:
        if self.room.get(model, 1000) < 1:
            return None
        self.room[model] = self.room.get(model, 1000) - 1
        self.entered.append(name)
        return name


async def settle() -> None:
    """Let every ready task run."""
    for _ in range(10):
        await asyncio.sleep(0)


def of(key: str = "key", priority: int = 0, **more: float) -> Asked:
    return ASKED._replace(key=key, priority=priority, **more)  # type: ignore[arg-type]


async def test_the_queue_is_served_by_priority_then_arrival() -> None:
    setup = QueueSetup()
    for name, priority in [("a", 0), ("b", 5), ("c", 0), ("d", 0)]:
        await setup.start(name, of(priority=priority))
    assert setup.entered == ["a"]
    assert setup.registry.get_sample_value("pdproxy_requests_queued") == 3
    await setup.end("a", "c", "d", "b")
    assert setup.entered == ["a", "c", "d", "b"]
    setup.check_empty()


async def test_without_pressure_the_loop_gets_no_turn() -> None:
    """A coroutine that does not wait ends at its first step."""
    setup = QueueSetup()
    admission = Admission(setup.queue, ASKED)
    step = admission.begin(lambda: "begun", lambda: "m")
    with pytest.raises(StopIteration) as ended:
        step.send(None)
    assert ended.value.value == "begun"
    admission.end()
    setup.check_empty()


async def test_one_for_which_there_is_no_room_waits_and_lets_no_smaller_one_pass() -> None:
    setup = QueueSetup(concurrency=9)
    setup.room["m"] = 0
    await setup.start("large")
    setup.room["m"] = 1
    await setup.start("small")
    assert setup.entered == [], "it is not the small one's turn"
    setup.queue.room_changed()
    await settle()
    assert setup.entered == ["large"]
    await setup.end("large", "small")
    setup.check_empty()


async def test_full_nodes_of_one_model_delay_no_other() -> None:
    setup = QueueSetup(concurrency=2)
    setup.room["full"] = 0
    waits = await setup.start("a", model="full")
    await setup.start("b", model="free")
    assert setup.entered == ["b"]
    assert setup.queue.status().by_model == {"full": 1}
    waits.cancel()
    await setup.end("b")
    setup.check_empty()


async def test_a_model_that_gets_room_is_begun_though_another_ones_more_urgent_head_has_none() -> None:
    setup = QueueSetup(concurrency=9)
    setup.room = {"full": 0, "free": 0}
    waits = await setup.start("a", of(priority=-1), model="full")
    await setup.start("b", model="free")
    setup.room["free"] = 1
    setup.queue.room_changed()
    await settle()
    assert setup.entered == ["b"]
    waits.cancel()
    await setup.end("b")
    setup.check_empty()


async def test_priority_counts_across_models() -> None:
    setup = QueueSetup()
    await setup.start("first")
    await setup.start("x", model="x")
    await setup.start("y", of(priority=-1), model="y")
    await setup.end("first", "y", "x")
    assert setup.entered == ["first", "y", "x"]


async def test_models_that_compete_for_the_same_places_take_turns() -> None:
    setup = QueueSetup()
    await setup.start("first")
    for number in range(3):
        await setup.start(f"x{number}", model="x")
    await setup.start("y0", model="y")
    await setup.end("first", "x0", "y0", "x1", "x2")
    assert setup.entered == ["first", "x0", "y0", "x1", "x2"]


async def test_a_flood_of_one_key_delays_another_key_by_one() -> None:
    setup = QueueSetup()
    names = [f"flood{number}" for number in range(20)]
    for name in names:
        await setup.start(name, of("flood"))
    await setup.start("quiet", of("quiet"))
    await setup.end(*names[:2])
    assert setup.entered[2] == "quiet"
    await setup.end("quiet", *names[2:])
    setup.check_empty()


async def test_a_full_queue_answers_429_with_retry_after() -> None:
    setup = QueueSetup(queue=1)
    await setup.start("a")
    await setup.start("b")
    error = await setup.rejected("c")
    assert (error.status, error.code, error.kind) == (429, "queue_full", "rate_limit_error")
    assert dict(error.headers)["retry-after"] == "5", "nothing has left the queue yet"
    assert setup.registry.get_sample_value("pdproxy_rejected_total", {"reason": "queue_full"}) == 1
    await setup.end("a", "b")
    setup.check_empty()


async def test_retry_after_follows_the_rate_at_which_others_left() -> None:
    setup = QueueSetup(queue=4)
    names = [f"r{number}" for number in range(7)]
    for name in names[:5]:
        await setup.start(name)
    for ends, name in zip(names[:2], names[5:], strict=True):
        setup.clock.advance(3)
        await setup.end(ends)
        await setup.start(name)
    error = await setup.rejected("late")
    assert dict(error.headers)["retry-after"] == "12", "four wait, and one leaves every three seconds"
    assert "4 requests wait already: try again in 12 s" in error.message
    await setup.end(*names[2:])


async def test_a_key_that_fills_the_queue_gives_way_to_another() -> None:
    setup = QueueSetup(queue=3)
    await setup.start("runs")
    for number in range(3):
        await setup.start(f"flood{number}", of("flood"))
    await setup.start("quiet", of("quiet"))
    with pytest.raises(ClientError, match="wait already"):
        await setup.tasks["flood2"]
    assert setup.queue.status().by_key == {"flood": 2, "quiet": 1}
    refused = await setup.rejected("quiet2", of("quiet"))
    assert refused.code == "queue_full", "it would have as much as the other"
    await setup.end("runs", "flood0", "quiet", "flood1")
    setup.check_empty()


async def test_a_wait_ends_with_queue_seconds_or_the_requests_deadline() -> None:
    setup = QueueSetup(queue_seconds=0.02)
    await setup.start("a")
    assert (await setup.rejected("b")).code == "queue_timeout"
    patient = QueueSetup()
    await patient.start("a")
    error = await patient.rejected("b", of(deadline=patient.clock.now() + 0.02))
    assert (error.code, error.status) == ("queue_timeout", 429)
    for each in (setup, patient):
        await each.end("a")
        each.check_empty()


async def test_what_is_past_its_deadline_is_not_begun() -> None:
    setup = QueueSetup()
    await setup.start("a")
    late = await setup.start("b", of(deadline=setup.clock.now() + 50))
    setup.clock.advance(50)
    await setup.end("a")
    with pytest.raises(ClientError, match="no room for this request in time"):
        await late
    assert setup.entered == ["a"]
    setup.check_empty()


async def test_later_prompts_of_a_request_that_has_begun_are_not_turned_away() -> None:
    setup = QueueSetup(queue=0, queue_seconds=0.0)
    await setup.start("first")
    later = await setup.start("later", ASKED._replace(later=True))
    assert not later.done()
    await setup.end("first", "later")
    await setup.start("again")
    deadline = setup.clock.now() + 0.02
    error = await setup.rejected("too late", ASKED._replace(later=True, deadline=deadline))
    assert (error.status, error.code) == (504, "deadline")
    await setup.end("again")
    setup.check_empty()


async def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    setup = QueueSetup()
    for name in "abc":
        await setup.start(name)
    setup.tasks["b"].cancel()
    await setup.end("a")
    assert setup.entered == ["a", "c"]
    assert setup.tasks["b"].cancelled()
    await setup.end("c")
    setup.check_empty()


async def test_the_head_that_leaves_lets_the_next_one_go() -> None:
    setup = QueueSetup(concurrency=9)
    setup.room["m"] = 0
    await setup.start("a")
    await setup.start("b")
    setup.room["m"] = 1
    setup.tasks["a"].cancel()
    await settle()
    assert setup.entered == ["b"]
    await setup.end("b")
    setup.check_empty()


@pytest.mark.parametrize("turns", range(4))
async def test_one_that_is_cancelled_at_the_moment_of_its_turn_gives_it_back(turns: int) -> None:
    setup = QueueSetup()
    for name in "abc":
        await setup.start(name)
    setup.ends["a"].set()
    for _ in range(turns):
        await asyncio.sleep(0)
    setup.tasks["b"].cancel()
    await settle()
    assert "c" in setup.entered
    await setup.end("c")
    setup.check_empty()


async def test_one_that_has_been_cancelled_is_not_begun() -> None:
    setup = QueueSetup(concurrency=9)
    setup.room["m"] = 0
    await setup.start("a")
    setup.room["m"] = 1
    setup.queue.room_changed()
    setup.tasks["a"].cancel()
    await settle()
    assert setup.entered == []
    setup.check_empty()


async def test_a_prompt_of_a_request_that_has_begun_does_not_give_way() -> None:
    setup = QueueSetup(queue=2)
    await setup.start("runs", of("list"))
    later = [await setup.start(f"later{number}", of("list")._replace(later=True)) for number in range(3)]
    error = await setup.rejected("quiet", of("quiet"))
    assert error.code == "queue_full"
    assert not any(task.done() for task in later)
    await setup.end("runs", "later0", "later1", "later2")
    setup.check_empty()


async def test_an_error_of_the_attempt_is_its_own() -> None:
    setup = QueueSetup()
    await setup.start("a")
    admission = Admission(setup.queue, ASKED)

    def fail() -> str | None:
        raise ClientError(503, "no node")

    failing = asyncio.create_task(admission.begin(fail, lambda: "m"))
    await setup.start("b")
    await setup.end("a")
    with pytest.raises(ClientError, match="no node"):
        await failing
    assert not admission.runs
    assert setup.entered == ["a", "b"]
    await setup.end("b")
    setup.check_empty()
