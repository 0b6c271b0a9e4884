"""The one queue of the proxy: what waits in it, and what runs.

A prompt (each of a list by itself) waits here before its first plan, holding nothing on any node, until fewer than
`QueueLimits.concurrency` run and a decode node has room for it. A hand-over that was begun before would keep blocks of
a prefill node while the decode node has none. Which one goes next: `planning.queue`, apart for each model, so that full
nodes of one model delay no other's requests. The one that goes next goes alone: a smaller one behind it does not pass,
or a long prompt would never fit.

Before all that waits go further plans of a prompt that runs (a leg failed, a stream moves): it is late already, and
what it takes counts. Known-answer tests pass by the queue, and are not counted.
"""

import asyncio
import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from pdproxy.clock import Clock
from pdproxy.errors import ClientError, PdproxyError
from pdproxy.observe.labels import Rejection
from pdproxy.observe.metrics import Metrics
from pdproxy.orchestration.client_errors import deadline_error, rejected_error
from pdproxy.planning.queue import DepartureRate, FairQueue, Waiting
from pdproxy.request import SubRequest

T = TypeVar("T")

UNKNOWN_WAIT, LONGEST_WAIT = 5, 60
"""Seconds of Retry-After: while nothing has left the queue yet, and at most."""


@dataclasses.dataclass(frozen=True, slots=True)
class QueueLimits:
    """What the operator allows.

    Attributes:
        concurrency: prompts that run at once.
        queue: prompts that may wait.
        queue_seconds: how long one may wait.
    """

    concurrency: int = 1024
    queue: int = 4096
    queue_seconds: float = 600.0


class Asked(NamedTuple):
    """What the queue has to know of a prompt.

    Attributes:
        key: the name of its API key.
        priority: smaller goes first.
        cost: in prompt tokens, of its key's share.
        deadline: monotonic seconds by which its whole request must have ended.
        later: it is not the first prompt of its request. The request has begun, so it is not refused any more: it waits
            until the request's deadline, however many wait.
    """

    key: str
    priority: int
    cost: float
    deadline: float
    later: bool = False

    @classmethod
    def of(cls, sub_request: SubRequest, prompt_tokens: int) -> "Asked":
        """For a prompt of about so many tokens."""
        request = sub_request.request
        return cls(request.api_key, request.priority, prompt_tokens, request.deadline, sub_request.index > 0)


@dataclasses.dataclass(slots=True, eq=False)
class _Waiter(Waiting):
    """A prompt that waits. ``turn`` is set once it runs, or ``error`` says why it will not."""

    lane: str
    later: bool
    start: Callable[[], bool]
    turn: asyncio.Future[None]
    queued: bool = False
    error: Exception | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class QueueStatus:
    """For operators: how many prompts run and wait, and in how many seconds these will have left; None for unknown."""

    running: int = 0
    waiting: int = 0
    by_key: Mapping[str, int] = dataclasses.field(default_factory=dict)
    by_model: Mapping[str, int] = dataclasses.field(default_factory=dict)
    seconds: float | None = None


class RequestQueue:
    """Prompts that wait, in their order, and the number of those that run."""

    def __init__(self, limits: QueueLimits, clock: Clock, metrics: Metrics) -> None:
        self._limits = limits
        self._clock = clock
        self._metrics = metrics
        self._running = 0
        self._waiting: collections.Counter[str] = collections.Counter()
        """By key."""
        self._length = 0
        self._lanes: dict[str, FairQueue[_Waiter]] = {}
        """By model, the one that was served last at the end."""
        self._rate = DepartureRate()
        self._scheduled = False
        metrics.watch_requests(lambda: self._running, lambda: self._length)

    def room_changed(self) -> None:
        """There may be room for one that waits: whoever can run now is begun in the loop's next turn. Cheap."""
        if self._length and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._begin_all)

    def status(self) -> QueueStatus:
        """How it stands."""
        seconds = self._rate.seconds(self._length, self._clock.now())
        lanes = {lane: len(waiting) for lane, waiting in self._lanes.items()}
        known = None if math.isinf(seconds) else seconds
        return QueueStatus(self._running, self._length, dict(self._waiting), lanes, known)

    def begin_at_once(self, start: Callable[[], bool]) -> bool:
        """Where nothing waits and there is room, one more runs: whether it does."""
        if self._length or self._running >= self._limits.concurrency or not start():
            return False
        self._running += 1
        return True

    async def wait(self, asked: Asked, lane: str, start: Callable[[], bool]) -> None:
        """Return once ``start`` was called in this one's turn, and there was room: then one more runs.

        ``start`` is False while there is no room for it; it must not wait, and may run in any task. ``lane`` is the
        model.

        Raises:
            ClientError: 429 with Retry-After (full, or too long); 504 where a request that has begun came to its end.
            Exception: of ``start``.
        """
        waiter = self._enter(asked, lane, start)
        try:
            if self._lanes[lane].head(self._clock.now()) is waiter:
                self._try(waiter)
            await self._turn(waiter)
        finally:
            if waiter.queued:
                self._leave(waiter)
                self.room_changed()  # it may have stood before one for which there is room
        if waiter.error is not None:
            raise waiter.error

    def ended(self) -> None:
        """One that ran runs no more."""
        self._running -= 1
        self.room_changed()

    def _enter(self, asked: Asked, lane: str, start: Callable[[], bool]) -> _Waiter:
        now = self._clock.now()
        deadline = asked.deadline if asked.later else min(asked.deadline, now + self._limits.queue_seconds)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(asked.key, asked.priority, asked.cost, deadline, lane, asked.later, start, turn)
        if self._length >= self._limits.queue and not asked.later:
            self._make_way(asked.key)
        if not self._length:
            self._rate.began(now)
        self._lanes.setdefault(lane, FairQueue(self._expire)).push(waiter)
        waiter.queued = True
        self._length += 1
        self._waiting[waiter.key] += 1
        return waiter

    def _make_way(self, key: str) -> None:
        """The queue is full: the key that has most in it gives way to one that has less, so that none can shut it."""
        longest, most = max(self._waiting.items(), key=lambda each: each[1], default=("", 0))
        last = None
        if self._waiting[key] + 1 < most:
            last = next(filter(None, (lane.newest(longest) for lane in self._lanes.values())))
        if last is None or last.later:
            raise self._rejected(Rejection.QUEUE_FULL)
        self._refuse(last, self._rejected(Rejection.QUEUE_FULL))

    def _leave(self, waiter: _Waiter) -> None:
        waiter.queued = False
        self._length -= 1
        self._waiting[waiter.key] -= 1
        if not self._waiting[waiter.key]:
            del self._waiting[waiter.key]
        lane = self._lanes[waiter.lane]
        lane.remove(waiter)
        if not lane:
            del self._lanes[waiter.lane]

    async def _turn(self, waiter: _Waiter) -> None:
        """Return when it runs or has an error."""
        if not waiter.turn.done():
            try:
                # Not wait_for: in Python 3.11 that swallows a cancellation which comes together with the turn.
                async with asyncio.timeout(waiter.deadline - self._clock.now()):
                    await waiter.turn
            except TimeoutError:
                if waiter.queued:
                    self._expire(waiter)

    def _begin_all(self) -> None:
        """Begin whoever can run now."""
        self._scheduled = False
        now, full = self._clock.now(), set[str]()
        while self._running < self._limits.concurrency:
            heads = [each.head(now) for lane, each in list(self._lanes.items()) if lane not in full]
            head = min(filter(None, heads), key=lambda each: each.priority, default=None)
            if head is None:
                return
            if not self._try(head):
                full.add(head.lane)

    def _try(self, waiter: _Waiter) -> bool:
        """Begin the head of a lane, if there is room for it; whether it waits no more."""
        if waiter.turn.done():  # cancelled: its task will come to know
            self._leave(waiter)
            return True
        if self._running >= self._limits.concurrency:
            return False
        try:
            if not waiter.start():
                return False
        except PdproxyError as error:
            self._refuse(waiter, error)
            return True
        except Exception as error:  # a bug: its request fails, and those behind it do not wait for ever
            self._refuse(waiter, error)
            raise
        self._running += 1
        self._rate.departed(self._clock.now())
        lane = self._lanes.pop(waiter.lane)
        self._lanes[waiter.lane] = lane
        lane.served(waiter)
        self._leave(waiter)
        waiter.turn.set_result(None)
        return True

    def _expire(self, waiter: _Waiter) -> None:
        self._refuse(waiter, deadline_error() if waiter.later else self._rejected(Rejection.QUEUE_TIMEOUT))

    def _refuse(self, waiter: _Waiter, error: Exception) -> None:
        self._leave(waiter)
        self.room_changed()
        waiter.error = error
        if not waiter.turn.done():
            waiter.turn.set_result(None)

    def _rejected(self, reason: Rejection) -> ClientError:
        self._metrics.rejected(reason)
        seconds = self._rate.seconds(self._length, self._clock.now())
        wait = UNKNOWN_WAIT if math.isinf(seconds) else min(LONGEST_WAIT, max(1, math.ceil(seconds)))
        if reason is Rejection.QUEUE_FULL:
            text = f"All nodes are full, and {self._length} requests wait already"
        else:
            text = "All nodes are full, and there was no room for this request in time"
        return rejected_error(reason, f"{text}: try again in {wait} s.", wait)


class Admission:
    """One prompt on its way through the queue; to be ended on every exit. ``runs``: it counts among those that run."""

    __slots__ = ("_asked", "_queue", "runs")

    def __init__(self, queue: RequestQueue, asked: Asked) -> None:
        self._queue = queue
        self._asked = asked
        self.runs = False

    async def begin(self, attempt: Callable[[], T | None], lane: Callable[[], str]) -> T:
        """What ``attempt`` returns once there is room: until then that is None. Raises as `RequestQueue.wait`.

        Where there is room and nothing waits, the loop gets no turn. ``lane``: its model; called if it waits.
        """
        begun: list[T] = []
        start = functools.partial(self._start, attempt, begun)
        if not self._queue.begin_at_once(start):
            await self._queue.wait(self._asked, lane(), start)
        return begun[0]

    def end(self) -> None:
        """It runs no more. Idempotent."""
        if self.runs:
            self.runs = False
            self._queue.ended()

    def _start(self, attempt: Callable[[], T | None], begun: list[T]) -> bool:
        result = attempt()
        if result is not None:
            begun.append(result)
            self.runs = True
        return self.runs
