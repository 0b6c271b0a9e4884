"""The one queue of the proxy: what waits in it, and what runs.

A prompt (each of a list by itself) waits here before its first plan, holding nothing on any node, until fewer than
`QueueLimits.concurrency` run and a decode node has room for it. A hand-over that was begun before would keep blocks of
a prefill node while the decode node has none. Which one goes next: `planning.queue`, apart for each model, so that full
nodes of one model delay no other's requests. The one that goes next goes alone: a smaller one behind it does not pass,
or a long prompt would never fit. Passed are only prompts of a key that runs as many as it may, or has its share while
others ask (`planning.shares`): what is left is for the others then.

Before all that waits go further plans of a prompt that runs (a leg failed, a stream moves): it is late already, and
what it takes counts. Known-answer tests pass by the queue, and are not counted.

How a prompt gets its turn:

    `QueuedPrompt.start_when_room`     asks for it; where nothing waits and there is room, `start_at_once` starts it
    `RequestQueue.wait`                puts it into its model's lane, and returns once it runs or was turned away
    `room_changed`, `_on_timer`        something ended, or a node is about done: look through the lanes
    `_start_while_room`                starts the first of each lane's next prompts, again and again, until none fits
    `_start_or_turn_away`              calls the prompt's ``start``, which plans it and takes its slots if there is room

A key's use of its share (`ShareUse`) decides how much room its prompts find: the more it uses, the less. So "full" has
a degree: *full from* a share use means that prompts of keys which use so much, or more, have no room now, while others
may have.
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
"""Starts a prompt, if there is room for it: whether it did. Its argument is how much of its share the key uses: there
may be less room."""


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


class QueuedPrompt(Queued):
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
        if not self._queue.start_at_once(self, start):
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
        """How many prompts of each key wait."""
        self._length = 0
        self._lanes: dict[str, FairQueue[QueuedPrompt]] = {}
        """By model, the one that was served last at the end."""
        self._rate = DepartureRate()
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._about_done_at = math.inf
        """When the first of the nodes that were found too busy is about done, in monotonic seconds."""
        self._key_limits = key_limits or LimitsByKey()
        self._shares = KeyShares(self._key_limits)
        metrics.watch_requests(lambda: self._running, lambda: self._length)
        metrics.keys.watch_queue(self._shares.running, lambda key: self._waiting[key])

    def room_changed(self) -> None:
        """There may be room for one that waits: whoever can run now is begun in the loop's next turn. Cheap."""
        if self._length and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._start_waiting)

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
            self._about_done_at = min(self._about_done_at, self._clock.now() + early)
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
            raise self._rejection(Rejection.QUEUE_FULL, key)

    def start_at_once(self, asked: QueuedPrompt, start: Start) -> bool:
        """Where nothing waits and there is room, one more runs: whether it does."""
        now, key = self._clock.now(), asked.key
        self._shares.asked(key, now, asked.prompt)
        if self._length or self._running >= self._limits.concurrency or not self._shares.may_run(key):
            return False
        share_use = self._share_use(key, now)
        if (share_use is ShareUse.OVER and self._running >= self._most_over_share) or not start(share_use):
            return False
        self._count_running(asked)
        return True

    async def wait(self, waiter: QueuedPrompt, lane: str, start: Start) -> None:
        """Return once ``start`` was called in this one's turn, and there was room: then one more runs.

        ``start`` must not wait, and may run in any task. ``lane`` is the model.

        Raises:
            ClientError: 429 with Retry-After (full, or too long); 504 where a request that has begun came to its end.
            Exception: of ``start``.
        """
        self._enter(waiter, lane, start)
        try:
            if self._next_in(self._lanes[lane], waiter.since, self._full_above(waiter)) is waiter:
                self._start_or_turn_away(waiter)
                self._set_timer()
            await self._await_turn(waiter)
        finally:
            if waiter.queued:
                self._leave(waiter)
                self.room_changed()  # it may have stood before one for which there is room
        if waiter.error is not None:
            raise waiter.error

    def ended(self, asked: QueuedPrompt) -> None:
        """One that ran runs no more."""
        self._running -= 1
        self._shares.ended(asked.key, asked.began_with)
        self.room_changed()

    def correct(self, waiter: QueuedPrompt, cost: float) -> None:
        """One that has waited has really cost so much."""
        lane = self._lanes.get(waiter.lane)
        if lane is not None:
            lane.correct(waiter, cost, self._key_limits.of_key(waiter.key).weight)
        waiter.cost = cost

    def _count_running(self, asked: QueuedPrompt) -> None:
        self._running += 1
        self._shares.began(asked.key, asked.began_with)
        asked.runs = True

    def _enter(self, waiter: QueuedPrompt, lane: str, start: Start) -> None:
        """Put a prompt into its lane, where the queue is not full, or another key's prompt makes way."""
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
            raise self._rejection(Rejection.QUEUE_FULL, key)
        self._turn_away(last, self._rejection(Rejection.QUEUE_FULL, last.key))

    def _to_give_way(self, key: str) -> QueuedPrompt | None:
        """The one that leaves a full queue for another key's; None where it is the newcomer that has to."""
        longest, most = max(self._waiting.items(), key=lambda each: each[1], default=("", 0))
        if self._waiting[key] + 1 >= most:
            return None
        last = next(filter(None, (lane.newest(longest) for lane in self._lanes.values())))
        return None if last.later else last

    def _leave(self, waiter: QueuedPrompt) -> None:
        """Take a prompt out of its lane: it runs now, was turned away, or its task was cancelled."""
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

    async def _await_turn(self, waiter: QueuedPrompt) -> None:
        """Return when it runs or was turned away."""
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

    def _full_above(self, waiter: QueuedPrompt) -> ShareUse | None:
        """The next share use above that of this prompt's key; None where there is none. Prompts of keys that use so
        much find less room, and wait since they found none: this one need not wait behind them."""
        share_use = self._share_use(waiter.key, waiter.since)
        return None if share_use is ShareUse.OVER else ShareUse(share_use + 1)

    def _next_in(self, lane: FairQueue[QueuedPrompt], now: float, full_from: ShareUse | None) -> QueuedPrompt | None:
        """The next prompt of a lane that may have room: its key may run one more, and uses less of its share than
        ``full_from``, where that is given."""
        may_run = self._shares.may_run
        if full_from is None:
            return lane.head(now, may_run)
        return lane.head(now, lambda key: may_run(key) and self._share_use(key, now) < full_from)

    def _start_waiting(self) -> None:
        """Start all that can run now."""
        self._scheduled = False
        self._about_done_at = math.inf
        self._start_while_room()
        self._set_timer()

    def _set_timer(self) -> None:
        """Look again when a node is about done with its prompts, for no event tells that."""
        if not self._length or math.isinf(self._about_done_at):
            return
        loop = asyncio.get_running_loop()
        when = loop.time() + max(self._about_done_at - self._clock.now(), CLOSE)
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = loop.call_at(when, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.room_changed()

    def _start_while_room(self) -> None:
        """Start the next prompt of the lanes, until all lanes are full or empty."""
        full_from: dict[str, ShareUse] = {}
        """By lane. A prompt that found no room holds back those behind it whose keys use as much or more; `WITHIN` is
        the least use, so that it holds back all of them."""
        now = self._clock.now()
        while self._running < self._limits.concurrency:
            lanes = [(lane, full_from.get(name)) for name, lane in self._lanes.items()]
            heads = [self._next_in(lane, now, full) for lane, full in lanes if full is not ShareUse.WITHIN]
            head = min(filter(None, heads), key=lambda each: each.priority, default=None)
            if head is None:
                return
            found_full_from = self._start_or_turn_away(head)
            if found_full_from is not None:
                full_from[head.lane] = found_full_from

    def _start_or_turn_away(self, waiter: QueuedPrompt) -> ShareUse | None:
        """Start the next prompt of a lane, or turn it away with an error. Where there is no room for it, it goes on
        waiting, and the lane is full from the share use that is returned."""
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
            self._turn_away(waiter, error)
            return None
        except Exception as error:  # a bug: its request fails, and those behind it do not wait for ever
            self._turn_away(waiter, error)
            raise
        self._mark_started(waiter)
        return None

    def _mark_started(self, waiter: QueuedPrompt) -> None:
        """The prompt's ``start`` has begun it: count it, charge its key, and wake the task that waits for its turn."""
        self._count_running(waiter)
        self._rate.departed(self._clock.now())
        lane = self._lanes.pop(waiter.lane)
        self._lanes[waiter.lane] = lane
        lane.served(waiter, self._key_limits.of_key(waiter.key).weight)
        self._leave(waiter)
        waiter.turn.set_result(None)

    def _expire(self, waiter: QueuedPrompt) -> None:
        """Turn away a prompt that has waited until its deadline."""
        late = deadline_error() if waiter.later else self._rejection(Rejection.QUEUE_TIMEOUT, waiter.key)
        self._turn_away(waiter, late)

    def _turn_away(self, waiter: QueuedPrompt, error: Exception) -> None:
        """The prompt leaves the queue without having run; `wait` raises this error in its task."""
        self._leave(waiter)
        self.room_changed()
        waiter.error = error
        if not waiter.turn.done():
            waiter.turn.set_result(None)

    def _rejection(self, reason: Rejection, key: str) -> ClientError:
        """The 429 for a prompt of this key, which is counted: why, and after how long to try again."""
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
