"""Requests that are being answered, their phases, the last failures, how much caches saved, how long answers are."""

import collections
import dataclasses
import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from pdproxy.clock import Clock
from pdproxy.errors import Fault
from pdproxy.failures import Step
from pdproxy.nodes.node import Role
from pdproxy.observe.labels import Affinity, Leg, Move, Outcome, Phase, Prediction, RouteReason
from pdproxy.observe.metrics import Metrics
from pdproxy.orchestration.answer_record import AnswerRecord, Route, StreamMove
from pdproxy.planning.plan_types import Decision
from pdproxy.request import ClientRequest, Endpoint
from pdproxy.usage import Usage

MAX_SHOWN = 65536
"""Requests in flight that are kept; the oldest are dropped first. Admission keeps their number far below."""
MAX_FAILURES = 20
MAX_BAD, RECENT_MINUTES = 2048, 15
"""Failed legs, and requests that ended badly, that are kept for operators; minutes whose ends are counted."""
LONGEST_NAME = 60
"""Characters of a model's name that are kept for operators: a client can send any."""
FIRST_GUESS = 256
"""Tokens of an answer, before any was seen."""
GUESS_COUNTS = 8
"""For as many answers the first guess counts."""
REMEMBERED = 64
"""Answers that the mean is taken over, about."""
MOST_MODELS = 256
_AFTER_FIRST_BYTE = frozenset({Phase.DECODE, Phase.TOTAL})
_NO_AFFINITIES: Mapping[Role, Affinity] = MappingProxyType({})


class Timeline:
    """The phases of one request, one after the other, from the plan on; one that is entered again adds to its time.

    Attributes:
        start: monotonic seconds when the request arrived.
        began: when its plan began; it was queued until then.
        now: the phase that it is in.
        took: seconds spent in each phase that it has left.
        nodes: name of the node that works in a phase, where one does.
        affinities: whether the nodes of the last plan are its session's own, by role; of policies that know sessions.
        decision: of the last plan, where the policy goes by what is cached.
        answer: what is recorded of the answer; one for all prompts of a request.
    """

    __slots__ = (
        "_clock", "_entered", "_metrics", "affinities", "answer", "began", "decision", "nodes", "now", "start", "took",
    )  # fmt: skip

    def __init__(self, clock: Clock, metrics: Metrics, arrived: float, answer: AnswerRecord | None = None) -> None:
        self._clock = clock
        self._metrics = metrics
        self.start = arrived
        self.began = self._entered = clock.now()
        self.now = Phase.PLAN
        self.took: dict[Phase, float] = {}
        self.nodes: dict[Phase, str] = {}
        self.affinities: Mapping[Role, Affinity] = _NO_AFFINITIES
        self.decision: Decision | None = None
        self.answer = AnswerRecord() if answer is None else answer

    def enter(self, phase: Phase, node: str = "") -> None:
        """The next phase begins."""
        moment = self._clock.now()
        self.took[self.now] = self.took.get(self.now, 0.0) + moment - self._entered
        self.now, self._entered = phase, moment
        if node:
            self.nodes[phase] = node

    def first_byte(self) -> None:
        """The first byte for the client is here; put every phase so far on the metrics."""
        for phase, seconds in self.took.items():
            if phase is not Phase.DECODE:
                self._metrics.phase_took(phase, seconds)
        self.took[Phase.FIRST_TOKEN] = self._clock.now() - self.start

    def moved(self, move: Move, stall: float) -> None:
        """A stream went on at another node, after so many seconds without bytes for the client."""
        self.answer.moves += (StreamMove(move, stall),)
        self._metrics.stalled(move, stall)

    def end(self) -> None:
        """The request has ended; put the phase on the metrics that `first_byte` could not know."""
        self.enter(self.now)
        self.took[Phase.TOTAL] = self._entered - self.start
        if Phase.DECODE in self.took:
            self._metrics.phase_took(Phase.DECODE, self.took[Phase.DECODE])

    def so_far(self, phase: Phase) -> float:
        """Seconds spent in a phase until now."""
        running = self._clock.now() - self._entered if phase is self.now else 0.0
        return self.took.get(phase, 0.0) + running

    def header(self) -> str:
        """The value of `Server-Timing`, in milliseconds, of the phases up to the first byte."""
        phases = [(phase, seconds) for phase, seconds in self.took.items() if phase not in _AFTER_FIRST_BYTE]
        return ", ".join([f"{phase};dur={seconds * 1000:.1f}" for phase, seconds in phases])


@dataclasses.dataclass(slots=True)
class CacheStats:
    """Prompts that were answered since the start, and their tokens."""

    prompts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def add(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A prompt was answered."""
        self.prompts += 1
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens


@dataclasses.dataclass(slots=True)
class PlannedHits:
    """Prompts that nodes of one role computed after a plan by what is cached, and their tokens.

    Attributes:
        planned: tokens that the plans took to be cached.
        real: tokens that were.
        wrong: prompts for which the two differ by more than a block.
    """

    prompts: int = 0
    prompt_tokens: int = 0
    planned: int = 0
    real: int = 0
    wrong: int = 0

    def add(self, prompt_tokens: int, planned: int, real: int, outcome: Prediction) -> None:
        """Such a prompt was answered."""
        self.prompts += 1
        self.prompt_tokens += prompt_tokens
        self.planned += planned
        self.real += real
        self.wrong += outcome is not Prediction.RIGHT


def predicted(planned: int, real: int, block_size: int) -> Prediction:
    """Whether a plan knew what a node had cached; both in tokens. Less than a block, or one, is no difference."""
    if abs(planned - real) <= block_size:
        return Prediction.RIGHT
    return Prediction.LESS if real < planned else Prediction.MORE


class OutputLengths:
    """How long the answers of each model are, on the mean of the last ones: most end long before ``max_tokens``."""

    def __init__(self) -> None:
        self._means: dict[str, tuple[float, int]] = {}

    def seen(self, model: str, tokens: float) -> None:
        """An answer ended after so many tokens."""
        if model not in self._means and len(self._means) >= MOST_MODELS:
            model = ""
        mean, count = self._means.get(model, (float(FIRST_GUESS), GUESS_COUNTS))
        count = min(count + 1, REMEMBERED)
        self._means[model] = mean + (tokens - mean) / count, count

    def expected(self, model: str, most: int | None) -> int:
        """Tokens of the next one, which may have ``most``; None for any number."""
        mean, _ = self._means.get(model, (FIRST_GUESS, 0))
        return max(1, round(mean if most is None else min(mean, most)))


@dataclasses.dataclass(slots=True, eq=False)
class InFlightRequest:
    """What is shown of one client request; it has an `outcome` once it has ended.

    Not the request itself: failed legs name theirs for long after it ended, and its body is not to be kept for that.
    """

    name: str
    endpoint: Endpoint
    model: str
    timeline: Timeline
    outcome: Outcome | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class LegFailure:
    """A leg that failed, and the next step.

    Attributes:
        at: monotonic seconds.
        name: of the sub-request.
        request: the client's request, with its outcome once it has one; None where it was dropped (`MAX_SHOWN`).
    """

    at: float
    name: str
    leg: Leg
    node: str
    fault: Fault
    step: Step
    request: InFlightRequest | None = None


class LegFault(NamedTuple):
    """A leg failed on a node at this monotonic second."""

    at: float
    node: str
    fault: Fault


class BadEnd(NamedTuple):
    """A request got no complete answer, through no fault of its client's.

    ``endpoint`` and ``model`` are "" where that was not known yet; ``key`` is the name of its API key.
    """

    at: float
    outcome: Outcome
    endpoint: str
    model: str
    key: str


class RecentEnds:
    """How requests ended during the last minutes, and what went wrong on nodes meanwhile.

    Attributes:
        faults, bad: oldest first.
    """

    def __init__(self) -> None:
        self.faults: collections.deque[LegFault] = collections.deque(maxlen=MAX_BAD)
        self.bad: collections.deque[BadEnd] = collections.deque(maxlen=MAX_BAD)
        self._minutes: collections.deque[tuple[int, collections.Counter[Outcome]]] = collections.deque(
            maxlen=RECENT_MINUTES
        )

    def ended(self, request: ClientRequest, at: float, outcome: Outcome) -> None:
        """A request ended at this monotonic second."""
        self._count(at, outcome)
        if outcome in (Outcome.FAILED, Outcome.REJECTED):
            self.bad.append(BadEnd(at, outcome, request.endpoint, request.model[:LONGEST_NAME], request.api_key))

    def turned_away(self, at: float, endpoint: str, key: str) -> None:
        """A request was refused at this monotonic second, before its body was read or its tokens were left."""
        self._count(at, Outcome.REJECTED)
        self.bad.append(BadEnd(at, Outcome.REJECTED, endpoint, "", key))

    def _count(self, at: float, outcome: Outcome) -> None:
        minute = int(at // 60)
        if not self._minutes or self._minutes[-1][0] < minute:
            self._minutes.append((minute, collections.Counter()))
        self._minutes[-1][1][outcome] += 1

    def counts(self, since: float) -> collections.Counter[Outcome]:
        """How requests ended in the minutes from this monotonic second on, that minute included."""
        minutes = (counts for minute, counts in self._minutes if minute >= since // 60)
        return sum(minutes, collections.Counter())


class InFlightRequests:
    """All requests in flight; every change is O(1). Clients choose ids, so requests are known by their objects.

    Attributes:
        cache_stats: since the start, by which node computed.
        planned_hits: since the start, by the role of the node that computed.
        plans: since the start, plans by what is cached, by their reason.
        recent: how requests ended lately.
    """

    def __init__(self) -> None:
        self._requests: dict[int, InFlightRequest] = {}
        self._failures: collections.deque[LegFailure] = collections.deque(maxlen=MAX_FAILURES)
        self.cache_stats = {route: CacheStats() for route in Route}
        self.planned_hits = {role: PlannedHits() for role in Role}
        self.plans = dict.fromkeys(RouteReason, 0)
        self.output_lengths = OutputLengths()
        self.recent = RecentEnds()

    def __len__(self) -> int:
        return len(self._requests)

    def begin(self, request: ClientRequest, timeline: Timeline) -> None:
        """A request is in flight until `end`."""
        if len(self._requests) >= MAX_SHOWN:
            del self._requests[next(iter(self._requests))]
        shown = InFlightRequest(request.request_id, request.endpoint, request.model, timeline)
        self._requests[id(request)] = shown

    def end(self, request: ClientRequest, outcome: Outcome) -> None:
        """The request has ended."""
        ended = self._requests.pop(id(request), None)
        if ended is not None:
            ended.outcome = outcome
            self.recent.ended(request, ended.timeline.start + ended.timeline.took.get(Phase.TOTAL, 0.0), outcome)

    def answered(self, model: str, route: Route, usage: Usage, choices: int) -> None:
        """A prompt was answered: so many tokens, in so many choices."""
        if usage.completion:
            self.output_lengths.seen(model, usage.completion / choices)
        self.cache_stats[route].add(usage.prompt or 0, usage.cached or 0)

    def failed(self, request: ClientRequest, failure: LegFailure) -> None:
        """One of the request's legs failed. A client's own mistake is no failure of ours, and is not kept."""
        if failure.fault is not Fault.CLIENT_ERROR:
            self._failures.append(dataclasses.replace(failure, request=self._requests.get(id(request))))
            self.recent.faults.append(LegFault(failure.at, failure.node, failure.fault))

    def newest(self, most: int) -> list[InFlightRequest]:
        """The requests that began last, newest first."""
        return list(itertools.islice(reversed(self._requests.values()), most))

    def failures(self) -> list[LegFailure]:
        """The last failures, newest first."""
        return list(reversed(self._failures))
