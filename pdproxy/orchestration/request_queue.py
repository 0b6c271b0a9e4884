"""The one queue of the proxy: what waits in it, and what runs.

A prompt (each of a list by itself) waits here before its first plan, holding nothing on any node, until fewer than
`QueueLimits.concurrency` run and a decode node has room for it. A hand-over that was begun before would keep blocks of
a prefill node while the decode node has none. Which one goes next: `planning.queue`, apart for each model, so that full
nodes of one model delay no other's requests. The one that goes next goes alone: a smaller one behind it does not pass,
or a long prompt would never fit. Passed are only prompts of a key that runs as many as it may, or has its share while
others ask (`planning.shares`): what is left is for the others then.

Before all that waits go further plans of a prompt that runs (a leg failed, a stream moves): it is late already, and
what it takes counts. Known-answer tests pass by the queue, and are not counted.
"""

import asyncio
import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from pdproxy.clock import Clock
from pdproxy.errors import ClientError, PdproxyError
from pdproxy.nodes.node import NodeView
from pdproxy.observe.labels import Rejection
from pdproxy.observe.metrics import Metrics
from pdproxy.orchestration.client_errors import deadline_error, rejected_error
from pdproxy.planning.queue import DepartureRate, FairQueue, Queued
from pdproxy.planning.shares import KeyShares, LimitsByKey, ShareUse

UNKNOWN_WAIT, LONGEST_WAIT = 5, 60
"""Seconds of Retry-After: while nothing has left the queue yet, and at most."""
LEAST_AHEAD, MOST_AHEAD = 0.01, 0.025
"""Seconds of work that a prefill node may still have where a key whose share is used up gives it more. In between it is
a tenth of what the node needs for the prompt: enough that it is hardly ever without, and little: a prompt of another
key that comes while two are there waits for both."""
AHEAD_SHARE = 0.1
CLOSE = 0.001
"""Seconds: so much too early is not too early."""

Start = Callable[[ShareUse], bool]
"""Begins a prompt, if there is room for it: whether it did. It is told how much of its share the
key uses: there may be less room."""


@dataclasses.dataclass(frozen=True, slots=True)
class QueueLimits:
    """The operator's limits.

    Attributes:
        concurrency: prompts that run at once.
        queue: prompts that may wait.
        queue_seconds: how long one may wait.
        reserve: the part of all room that keys which run more than their shares leave, while others ask; 0 for none,
            and then shares count in the queue alone.
    """

    concurrency: int = 1024
    queue: int = 4096
    queue_seconds: float = 600.0
    reserve: float = 0.125


class Admission(Queued):
    """One prompt on its way through the queue: it waits, runs and ends. To be ended on every exit.

    Attributes:
        runs: it counts among those that run.
        queued: it waits.
        waited: it has waited, and so is charged for what it really costs.
        lane: the model in whose queue it waits.
        start: begins it, while it waits.
        turn: set once it runs, or ``error`` says why it will not.
        since: monotonic seconds when it began to wait.
        began_with: its cost, as it counts while it runs.
    """

    __slots__ = (
        "_queue", "began_with", "error", "lane", "queued", "runs", "since", "start", "turn", "waited",
    )  # fmt: skip

    def __init__(
        self,
        queue: "RequestQueue",
        key: str,
        priority: int,
        cost: float,
        deadline: float,
        *,
        later: bool = False,
        prompt: int = 0,
    ) -> None:
        super().__init__(key, priority, cost, deadline, later, prompt)
        self._queue = queue
        self.runs = self.queued = self.waited = False
        self.began_with = cost

    async def start_when_room(self, start: Start, lane: Callable[[], str]) -> None:
        """Return once ``start`` has begun it: that is called until there is room. Raises as `RequestQueue.wait`.

        Where there is room and nothing waits, the loop gets no turn. ``lane``: its model; called if it waits.
        """
        if not self._queue.begin_at_once(self, start):
            self.waited = True
            await self._queue.wait(self, lane(), start)

    def correct_cost(self, tokens: int) -> None:
        """The prompt has cost so many tokens, of prompt and answers. One that did not wait was not charged at all."""
        if self.waited:
            self._queue.correct(self, tokens)

    def end(self) -> None:
        """The prompt runs no more. Idempotent."""
        if self.runs:
            self.runs = False
            self._queue.ended(self)

    def wait_in(self, lane: str, start: Start, since: float) -> None:
        """The prompt waits from now on."""
        self.lane, self.start, self.since, self.queued = lane, start, since, True
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.error: Exception | None = None


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

    def __init__(
        self, limits: QueueLimits, clock: Clock, metrics: Metrics, key_limits: LimitsByKey | None = None
    ) -> None:
        self._limits = limits
        self._most_over_share = limits.concurrency * (1 - limits.reserve)
        self._clock = clock
        self._metrics = metrics
        self._running = 0
        self._waiting: collections.Counter[str] = collections.Counter()
        """By key."""
        self._length = 0
        self._lanes: dict[str, FairQueue[Admission]] = {}
        """By model, the one that was served last at the end."""
        self._rate = DepartureRate()
        self._scheduled = False
        self._look_again: asyncio.TimerHandle | None = None
        self._soonest = math.inf
        """When a node is about done, of those that were found too busy."""
        self._key_limits = key_limits or LimitsByKey()
        self._shares = KeyShares(self._key_limits)
        metrics.watch_requests(lambda: self._running, lambda: self._length)
        metrics.keys.watch_queue(self._shares.running, lambda key: self._waiting[key])

    def room_changed(self) -> None:
        """There may be room for one that waits: whoever can run now is begun in the loop's next turn. Cheap."""
        if self._length and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._begin_all)

    def status(self) -> QueueStatus:
        """How it stands."""
        seconds = self._rate.seconds_to_leave(self._length, self._clock.now())
        lanes = {lane: len(waiting) for lane, waiting in self._lanes.items()}
        known = None if math.isinf(seconds) else seconds
        return QueueStatus(self._running, self._length, dict(self._waiting), lanes, known)

    def without_reserve(self, room: float) -> float:
        """The part of some room that keys may take which run more than their shares."""
        return room * (1 - self._limits.reserve)

    def about_done(self, left: float, takes: float) -> bool:
        """Whether a place may be given a prompt of a key whose share is used up.

        The place must be about done with the prompts that it has: one is not taken back once it is there, and all that
        come behind it wait. ``left``: seconds that the place still needs for those; ``takes``: for this one.
        """
        early = left - min(max(LEAST_AHEAD, AHEAD_SHARE * takes), MOST_AHEAD)
        if early > CLOSE:
            self._soonest = min(self._soonest, self._clock.now() + early)
        return early <= CLOSE

    def leaves_nodes(self, node: str, nodes: Sequence[NodeView], key: str) -> bool:
        """Whether one of some nodes may be given a prompt of a key that runs more than its share: enough are left then.

        A key whose prompts are longer than those of the others leaves them at least one node, where there are several.
        """
        now, most = self._clock.now(), math.ceil(self.without_reserve(len(nodes)))
        if most == len(nodes) > 1 and self._shares.asks_longer(key):
            most -= 1
        taken = {
            view.name
            for view in nodes
            if any(self._share_use(key, now) is ShareUse.OVER for place in view.places for key in place.keys)
        }
        return len(taken | {node}) <= most

    def check_room(self, key: str) -> None:
        """Raise the `ClientError` 429 where a prompt of a key would be refused if it came now: the queue is full."""
        if self._length and self._length >= self._limits.queue and self._to_give_way(key) is None:
            raise self._rejected(Rejection.QUEUE_FULL, key)

    def begin_at_once(self, asked: Admission, start: Start) -> bool:
        """Where nothing waits and there is room, one more runs: whether it does."""
        now, key = self._clock.now(), asked.key
        self._shares.asked(key, now, asked.prompt)
        if self._length or self._running >= self._limits.concurrency or not self._shares.may_run(key):
            return False
        share_use = self._share_use(key, now)
        if (share_use is ShareUse.OVER and self._running >= self._most_over_share) or not start(share_use):
            return False
        self._runs(asked)
        return True

    async def wait(self, waiter: Admission, lane: str, start: Start) -> None:
        """Return once ``start`` was called in this one's turn, and there was room: then one more runs.

        ``start`` must not wait, and may run in any task. ``lane`` is the model.

        Raises:
            ClientError: 429 with Retry-After (full, or too long); 504 where a request that has begun came to its end.
            Exception: of ``start``.
        """
        self._enter(waiter, lane, start)
        try:
            if self._head(self._lanes[lane], waiter.since, self._refused_beside(waiter)) is waiter:
                self._try(waiter)
                self._look_again_in_time()
            await self._turn(waiter)
        finally:
            if waiter.queued:
                self._leave(waiter)
                self.room_changed()  # it may have stood before one for which there is room
        if waiter.error is not None:
            raise waiter.error

    def ended(self, asked: Admission) -> None:
        """One that ran runs no more."""
        self._running -= 1
        self._shares.ended(asked.key, asked.began_with)
        self.room_changed()

    def correct(self, waiter: Admission, cost: float) -> None:
        """One that has waited has really cost so much."""
        lane = self._lanes.get(waiter.lane)
        if lane is not None:
            lane.correct(waiter, cost, self._key_limits.of_key(waiter.key).weight)
        waiter.cost = cost

    def _runs(self, asked: Admission) -> None:
        self._running += 1
        self._shares.began(asked.key, asked.began_with)
        asked.runs = True

    def _enter(self, waiter: Admission, lane: str, start: Start) -> None:
        now = self._clock.now()
        if not waiter.later:
            waiter.deadline = min(waiter.deadline, now + self._limits.queue_seconds)
            if self._length >= self._limits.queue:
                self._make_way(waiter.key)
        if not self._length:
            self._rate.first_waits(now)
        waiter.wait_in(lane, start, now)
        self._lanes.setdefault(lane, FairQueue(self._expire)).push(waiter)
        self._length += 1
        self._waiting[waiter.key] += 1

    def _make_way(self, key: str) -> None:
        """The queue is full: the key that has most in it gives way to one that has less, so that none can shut it."""
        last = self._to_give_way(key)
        if last is None:
            raise self._rejected(Rejection.QUEUE_FULL, key)
        self._refuse(last, self._rejected(Rejection.QUEUE_FULL, last.key))

    def _to_give_way(self, key: str) -> Admission | None:
        """The one that leaves a full queue for another key's; None where it is the newcomer that has to."""
        longest, most = max(self._waiting.items(), key=lambda each: each[1], default=("", 0))
        if self._waiting[key] + 1 >= most:
            return None
        last = next(filter(None, (lane.newest(longest) for lane in self._lanes.values())))
        return None if last.later else last

    def _leave(self, waiter: Admission) -> None:
        waiter.queued = False
        del waiter.start  # it holds the request
        self._metrics.keys.waited(waiter.key, self._clock.now() - waiter.since)
        self._length -= 1
        self._waiting[waiter.key] -= 1
        if not self._waiting[waiter.key]:
            del self._waiting[waiter.key]
        lane = self._lanes[waiter.lane]
        lane.remove(waiter)
        if not lane:
            del self._lanes[waiter.lane]

    async def _turn(self, waiter: Admission) -> None:
        """Return when it runs or has an error."""
        if not waiter.turn.done():
            try:
                # Not wait_for: in Python 3.11 that swallows a cancellation which comes together with the turn.
                async with asyncio.timeout(waiter.deadline - self._clock.now()):
                    await waiter.turn
            except TimeoutError:
                if waiter.queued:
                    self._expire(waiter)

    def _share_use(self, key: str, now: float) -> ShareUse:
        return self._shares.share_use(key, now) if self._limits.reserve > 0 else ShareUse.WITHIN

    def _refused_beside(self, waiter: Admission) -> ShareUse | None:
        """The least use of a share that waits beside this prompt: there is no room for prompts of such keys."""
        share_use = self._share_use(waiter.key, waiter.since)
        return None if share_use is ShareUse.OVER else ShareUse(share_use + 1)

    def _head(self, lane: FairQueue[Admission], now: float, refused: ShareUse | None) -> Admission | None:
        """The next prompt among those of keys that may run one more, and use less of their shares than ``refused``."""
        may_run = self._shares.may_run
        if refused is None:
            return lane.head(now, may_run)
        return lane.head(now, lambda key: may_run(key) and self._share_use(key, now) < refused)

    def _begin_all(self) -> None:
        """Begin whoever can run now."""
        self._scheduled = False
        self._soonest = math.inf
        self._begin_while_room()
        self._look_again_in_time()

    def _look_again_in_time(self) -> None:
        """No event tells that a node is about done with its prompts."""
        if not self._length or math.isinf(self._soonest):
            return
        loop = asyncio.get_running_loop()
        when = loop.time() + max(self._soonest - self._clock.now(), CLOSE)
        if self._look_again is not None:
            if self._look_again.when() <= when:
                return
            self._look_again.cancel()
        self._look_again = loop.call_at(when, self._looked_again)

    def _looked_again(self) -> None:
        self._look_again = None
        self.room_changed()

    def _begin_while_room(self) -> None:
        refused: dict[str, ShareUse] = {}
        """By lane: there is no room for keys that use so much of their shares, or more."""
        now = self._clock.now()
        while self._running < self._limits.concurrency:
            lanes = [(lane, refused.get(name)) for name, lane in self._lanes.items()]
            heads = [self._head(lane, now, worst) for lane, worst in lanes if worst is not ShareUse.WITHIN]
            head = min(filter(None, heads), key=lambda each: each.priority, default=None)
            if head is None:
                return
            share_use = self._try(head)
            if share_use is not None:
                refused[head.lane] = share_use

    def _try(self, waiter: Admission) -> ShareUse | None:
        """Begin the head of a lane, or refuse it; the use of its key's share where there is no room for such."""
        if waiter.turn.done():  # cancelled: its task will come to know
            self._leave(waiter)
            return None
        if self._running >= self._limits.concurrency:
            return ShareUse.WITHIN
        share_use = self._share_use(waiter.key, self._clock.now())
        if share_use is ShareUse.OVER and self._running >= self._most_over_share:
            return share_use
        try:
            if not waiter.start(share_use):
                return share_use
        except PdproxyError as error:
            self._refuse(waiter, error)
            return None
        except Exception as error:  # a bug: its request fails, and those behind it do not wait for ever
            self._refuse(waiter, error)
            raise
        self._begin(waiter)
        return None

    def _begin(self, waiter: Admission) -> None:
        self._runs(waiter)
        self._rate.departed(self._clock.now())
        lane = self._lanes.pop(waiter.lane)
        self._lanes[waiter.lane] = lane
        lane.served(waiter, self._key_limits.of_key(waiter.key).weight)
        self._leave(waiter)
        waiter.turn.set_result(None)

    def _expire(self, waiter: Admission) -> None:
        late = deadline_error() if waiter.later else self._rejected(Rejection.QUEUE_TIMEOUT, waiter.key)
        self._refuse(waiter, late)

    def _refuse(self, waiter: Admission, error: Exception) -> None:
        self._leave(waiter)
        self.room_changed()
        waiter.error = error
        if not waiter.turn.done():
            waiter.turn.set_result(None)

    def _rejected(self, reason: Rejection, key: str) -> ClientError:
        self._metrics.rejected(reason, key)
        seconds = self._rate.seconds_to_leave(self._length, self._clock.now())
        wait = UNKNOWN_WAIT if math.isinf(seconds) else min(LONGEST_WAIT, max(1, math.ceil(seconds)))
        if not self._shares.may_run(key):
            most = self._key_limits.of_key(key).concurrency
            text = f"This API key may have {most} requests running at once, and has them"
        elif reason is Rejection.QUEUE_FULL:
            text = f"All nodes are full, and {self._length} requests wait already"
        else:
            text = "All nodes are full, and there was no room for this request in time"
        return rejected_error(reason, f"{text}: try again in {wait} s.", wait)
