"""Which of the requests that wait goes next, and about how long a wait is. Pure: times are passed in.

A lower ``priority`` goes first, as in vLLM (0.32, v1/request.py). Within one priority each key gets a share of the
tokens by its weight, by start-time fair queueing (Goyal, Vin, Cheng 1996): a key's next request starts, in virtual
time, when its last one would have ended at that share, and the smallest start goes first. A key that did not wait, or
that was passed over since it may not run more, goes on at the start that was served last: it has saved up nothing, and
how much another key has waiting does not delay it. What a request costs is estimated when it goes, and corrected once
it is known. Within one key requests go in order of arrival. What is past its deadline is not served any more.
"""

import collections
import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable
from typing import Generic, TypeVar


@dataclasses.dataclass(slots=True, eq=False)
class Queued:
    """A prompt, as the queue knows it.

    Attributes:
        key: the name of its API key.
        priority: smaller goes first.
        cost: what it takes of its key's share: tokens of its prompt, and of its answers as long as they are expected.
        deadline: monotonic seconds, after which it is not served any more.
        later: it is not the first prompt of its request. The request has begun, so it is not refused any more: it waits
            until the request's deadline, however many wait.
        prompt: about how many tokens it has.
    """

    key: str
    priority: int
    cost: float
    deadline: float
    later: bool = False
    prompt: int = 0


W = TypeVar("W", bound=Queued)


class _Flow(Generic[W]):
    """The waiting prompts of one key at one priority, in order of arrival.

    ``start``: of its first request, in virtual time; ``token``: of its one valid item on the heap, -1 for none.
    """

    __slots__ = ("entries", "start", "token")

    def __init__(self) -> None:
        self.entries: collections.OrderedDict[W, None] = collections.OrderedDict()  # its first is found in O(1)
        self.start = 0.0
        self.token = -1


class _Priority(Generic[W]):
    """One priority: its virtual time, its keys while any request of this priority waits, and how many wait."""

    __slots__ = ("flows", "length", "virtual_time")

    def __init__(self) -> None:
        self.virtual_time = 0.0
        self.flows: dict[str, _Flow[W]] = {}
        self.length = 0


class FairQueue(Generic[W]):
    """Requests in the order in which they go. Every change takes O(log n), spread over the changes.

    ``expired`` is called with each one that was removed since it is past its deadline.
    """

    def __init__(self, expired: Callable[[W], None]) -> None:
        self._expired = expired
        self._levels: dict[int, _Priority[W]] = {}
        self._heap: list[tuple[int, float, int, _Flow[W]]] = []
        self._tokens = itertools.count()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, entry: W) -> None:
        """The prompt waits from now on."""
        level = self._levels.setdefault(entry.priority, _Priority())
        flow = level.flows.setdefault(entry.key, _Flow())
        if not flow.entries:
            flow.start = max(flow.start, level.virtual_time)
            self._put(entry.priority, flow)
        flow.entries[entry] = None
        level.length += 1
        self._length += 1

    def head(self, now: float, may_go: Callable[[str], bool] = lambda _: True) -> W | None:
        """The one that goes next, of the keys that may; None where none waits. Those that are past their deadline are
        removed. Where the first key may not go, all are looked at: O(n) in the number of keys."""
        while self._heap:
            _, _, token, flow = self._heap[0]
            if token != flow.token:
                heapq.heappop(self._heap)
                continue
            entry: W | None = next(iter(flow.entries))
            if entry is not None and not may_go(entry.key):
                entry = self._first_that(may_go)
            if entry is None or entry.deadline > now:
                return entry
            self.remove(entry)
            self._expired(entry)
        return None

    def _first_that(self, may_go: Callable[[str], bool]) -> W | None:
        first = found = None
        for item in self._heap:
            flow = item[3]
            if item[2] == flow.token and (first is None or item < first):
                entry = next(iter(flow.entries))
                if may_go(entry.key):
                    first, found = item, entry
        return found

    def served(self, entry: W, weight: float = 1.0) -> None:
        """The prompt goes: it waits no more, and its key's share is charged."""
        level = self._levels[entry.priority]
        flow = level.flows[entry.key]
        level.virtual_time = max(level.virtual_time, flow.start)
        flow.start = level.virtual_time + max(1.0, entry.cost) / weight
        if len(flow.entries) > 1:
            self._put(entry.priority, flow)
        self.remove(entry)

    def correct(self, entry: W, cost: float, weight: float = 1.0) -> None:
        """One that was served has cost so much. Of no effect where nothing of its priority has waited since."""
        level = self._levels.get(entry.priority)
        flow = None if level is None else level.flows.get(entry.key)
        if flow is not None:
            flow.start += (max(1.0, cost) - max(1.0, entry.cost)) / weight
            if flow.entries:
                self._put(entry.priority, flow)
                self._compact()

    def remove(self, entry: W) -> None:
        """The prompt waits no more; nothing is charged. No effect if it does not wait."""
        level = self._levels.get(entry.priority)
        flow = None if level is None else level.flows.get(entry.key)
        if level is None or flow is None or entry not in flow.entries:
            return
        del flow.entries[entry]
        self._length -= 1
        level.length -= 1
        if not flow.entries:
            flow.token = -1
        if not level.length:
            del self._levels[entry.priority]  # whoever comes next finds nobody before him: shares begin anew
        self._compact()

    def newest(self, key: str) -> W | None:
        """The last arrival of the key's least urgent prompts; None where no prompt of the key waits."""
        there = [
            (priority, level.flows[key])
            for priority, level in self._levels.items()
            if key in level.flows and level.flows[key].entries
        ]
        return next(reversed(max(there, key=lambda found: found[0])[1].entries)) if there else None

    def _put(self, priority: int, flow: _Flow[W]) -> None:
        """An earlier item of the flow counts no more."""
        flow.token = next(self._tokens)
        heapq.heappush(self._heap, (priority, flow.start, flow.token, flow))

    def _compact(self) -> None:
        """Items that count no more are dropped before they are more than what waits."""
        if len(self._heap) > 2 * self._length + 8:
            self._heap = [item for item in self._heap if item[2] == item[3].token]
            heapq.heapify(self._heap)


WEIGHT_OF_NEWEST = 0.1
"""In the mean time between two departures."""


class DepartureRate:
    """How fast requests leave a queue, to tell others how long they would wait."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._mean: float | None = None

    def first_waits(self, now: float) -> None:
        """Requests wait again after none did: the time without any is no time between departures."""
        self._last = now

    def departed(self, now: float) -> None:
        """A request has left the queue, to run."""
        if self._last is not None:
            between = now - self._last
            known = between if self._mean is None else self._mean
            self._mean = known + WEIGHT_OF_NEWEST * (between - known)
        self._last = now

    def seconds_to_leave(self, requests: int, now: float) -> float:
        """How long so many requests take to leave; infinite while that is unknown."""
        if self._mean is None or self._last is None:
            return math.inf
        return requests * max(self._mean, (now - self._last) if requests else 0.0)
