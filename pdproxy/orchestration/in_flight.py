"""Requests that are being answered, the last failures, and what caches were worth: for operators."""

import collections
import dataclasses
import enum
import itertools

from pdproxy.clock import Clock
from pdproxy.errors import Fault
from pdproxy.failures import Step
from pdproxy.observe.labels import Leg, Outcome, Phase
from pdproxy.observe.metrics import Metrics
from pdproxy.request import ClientRequest


class Timeline:
    """Phases follow each other, beginning with the plan; a phase that is entered again adds to its time.

    Attributes:
        start: monotonic seconds when the request arrived.
        began: when its plan began; it waited until then.
        now: the phase that it is in.
        took: seconds, of the phases that it has left.
        nodes: the node that works in a phase, by name, where one does.
    """

    __slots__ = ("_clock", "_entered", "_metrics", "began", "nodes", "now", "start", "took")

    def __init__(self, clock: Clock, metrics: Metrics, arrived: float) -> None:
        self._clock = clock
        self._metrics = metrics
        self.start = arrived
        self.began = self._entered = clock.now()
        self.now = Phase.PLAN
        self.took: dict[Phase, float] = {}
        self.nodes: dict[Phase, str] = {}

    def enter(self, phase: Phase, node: str = "") -> None:
        """The next phase begins."""
        moment = self._clock.now()
        self.took[self.now] = self.took.get(self.now, 0.0) + moment - self._entered
        self.now, self._entered = phase, moment
        if node:
            self.nodes[phase] = node

    def first_byte(self) -> None:
        """The first byte for the client is here; counts every phase so far."""
        self.took[Phase.FIRST_TOKEN] = self._clock.now() - self.start
        for phase, seconds in self.took.items():
            if phase is not Phase.DECODE:
                self._metrics.phase_took(phase, seconds)

    def end(self) -> None:
        """The request has ended; counts what `first_byte` could not know."""
        self.enter(self.now)
        self.took[Phase.TOTAL] = self._entered - self.start
        self._metrics.phase_took(Phase.TOTAL, self.took[Phase.TOTAL])
        if Phase.DECODE in self.took:
            self._metrics.phase_took(Phase.DECODE, self.took[Phase.DECODE])

    def so_far(self, phase: Phase) -> float:
        """Seconds spent in a phase until now."""
        running = self._clock.now() - self._entered if phase is self.now else 0.0
        return self.took.get(phase, 0.0) + running

    def header(self) -> str:
        """The value of `Server-Timing`, in milliseconds: the way to the first byte."""
        told = ((phase, seconds) for phase, seconds in self.took.items() if phase not in _AFTERWARDS)
        return ", ".join(f"{phase};dur={seconds * 1000:.1f}" for phase, seconds in told)


_AFTERWARDS = frozenset({Phase.DECODE, Phase.TOTAL})


class Route(enum.StrEnum):
    """How a prompt was computed, and so whose cache its hits were in."""

    DISAGGREGATED = "disaggregated"
    """By a prefill node: hits are those of its cache."""
    LOCAL = "local"
    """By the decode node alone."""
    RECOMPUTED = "recomputed"
    """By the decode node, though it had a ticket."""


@dataclasses.dataclass(slots=True)
class TokenSums:
    """Prompts that were answered, and their tokens."""

    prompts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


class CacheStats:
    """Sums since the start."""

    def __init__(self) -> None:
        self.by_way = {way: TokenSums() for way in Route}

    def count(self, way: Route, prompt_tokens: int, cached_tokens: int) -> None:
        """A prompt was answered."""
        of = self.by_way[way]
        of.prompts += 1
        of.prompt_tokens += prompt_tokens
        of.cached_tokens += cached_tokens


MAX_SHOWN = 65536
"""Requests that are known at once; the oldest are forgotten first. Admission keeps them far below."""
MAX_FAILURES = 20
"""Failures that are remembered."""


@dataclasses.dataclass(slots=True, eq=False)
class InFlightRequest:
    """One client request on its way; `outcome` once it has ended."""

    request: ClientRequest
    timeline: Timeline
    outcome: Outcome | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class LegFailure:
    """A leg that failed, and what was done about it.

    Attributes:
        at: monotonic seconds.
        name: of the request; with the prompt's number where there are several.
        ride: the request, whose end tells what became of it; None where it is not known any more.
    """

    at: float
    name: str
    leg: Leg
    node: str
    fault: Fault
    step: Step
    ride: InFlightRequest | None = None


class InFlightRequests:
    """Every change is O(1)."""

    def __init__(self) -> None:
        self._rides: dict[int, InFlightRequest] = {}
        self._failures: collections.deque[LegFailure] = collections.deque(maxlen=MAX_FAILURES)
        self.hits = CacheStats()

    def __len__(self) -> int:
        """Requests on the way."""
        return len(self._rides)

    def begin(self, request: ClientRequest, timeline: Timeline) -> None:
        """A request is on the way until `end`. Two may have the same id, which clients choose: the object counts."""
        if len(self._rides) >= MAX_SHOWN:
            del self._rides[next(iter(self._rides))]
        self._rides[id(request)] = InFlightRequest(request, timeline)

    def end(self, request: ClientRequest, outcome: Outcome) -> None:
        """The request has ended."""
        ride = self._rides.pop(id(request), None)
        if ride is not None:
            ride.outcome = outcome

    def failed(self, request: ClientRequest, failure: LegFailure) -> None:
        """One of the request's legs failed. A client's own mistake is no failure of ours, and is not kept."""
        if failure.fault is not Fault.CLIENT_ERROR:
            self._failures.append(dataclasses.replace(failure, ride=self._rides.get(id(request))))

    def newest(self, most: int) -> list[InFlightRequest]:
        """The requests that began last, newest first."""
        return list(itertools.islice(reversed(self._rides.values()), most))

    def failures(self) -> list[LegFailure]:
        """The last failures, newest first."""
        return list(reversed(self._failures))
