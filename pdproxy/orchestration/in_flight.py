"""Requests that are being answered, the last failures, how much caches saved, how long answers are."""

import collections
import dataclasses
import itertools
from typing import NamedTuple

from pdproxy.errors import Fault
from pdproxy.failures import Step
from pdproxy.nodes.node import Role
from pdproxy.observe.labels import Leg, Outcome, Prediction, Rejection
from pdproxy.orchestration.request_record import AnswerRecord, FailureRecord, RequestRecord, Route
from pdproxy.reasons import RouteReason
from pdproxy.usage import Usage

MAX_SHOWN = 65536
"""Requests in flight that are kept; the oldest are dropped first. The queue keeps their number far below."""
MAX_FAILURES = 20
"""Failed legs that the operator's page lists."""
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
_BAD = frozenset({Outcome.FAILED, Outcome.REJECTED})


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
        """A prompt with such numbers of tokens was answered."""
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


class LegFailure(NamedTuple):
    """A leg that failed, and the next step.

    Attributes:
        at: monotonic seconds.
        name: of the sub-request.
        request: how its request fared; it has an outcome once that has ended.
    """

    at: float
    name: str
    leg: Leg
    node: str
    fault: Fault
    step: Step
    request: FailureRecord


class BadEnd(NamedTuple):
    """A request got no complete answer, through no fault of its client's.

    ``endpoint`` and ``model`` are "" where that was not known yet; ``key`` is the name of its API key. ``limit``: by
    which it was turned away.
    """

    at: float
    outcome: Outcome
    endpoint: str
    model: str
    key: str
    limit: Rejection | None


class RecentEnds:
    """How requests ended during the last minutes, and what went wrong on nodes meanwhile.

    Attributes:
        faults, bad: legs that failed, and requests that ended badly; oldest first.
    """

    def __init__(self) -> None:
        self.faults: collections.deque[LegFailure] = collections.deque(maxlen=MAX_BAD)
        self.bad: collections.deque[BadEnd] = collections.deque(maxlen=MAX_BAD)
        self._minutes: collections.deque[tuple[int, collections.Counter[Outcome]]] = collections.deque(
            maxlen=RECENT_MINUTES
        )

    def ended(self, request: RequestRecord, at: float, outcome: Outcome) -> None:
        """A request ended at this monotonic second."""
        if outcome in _BAD:
            error, model = request.failure.error, request.model[:LONGEST_NAME]
            limit = None if error is None else error.limit
            self.bad.append(BadEnd(at, outcome, request.endpoint or "", model, request.key, limit))
        minute = int(at // 60)
        if not self._minutes or self._minutes[-1][0] < minute:
            self._minutes.append((minute, collections.Counter()))
        self._minutes[-1][1][outcome] += 1

    def counts(self, since: float) -> collections.Counter[Outcome]:
        """How requests ended in the minutes from this monotonic second on, that minute included."""
        minutes = (counts for minute, counts in self._minutes if minute >= since // 60)
        return sum(minutes, collections.Counter())


class InFlightRequests:
    """All requests in flight; every change is O(1). Clients choose ids, so requests are known by their records.

    Attributes:
        cache_stats: since the start, by which node computed.
        planned_hits: since the start, by the role of the node that computed.
        plans: since the start, plans by what is cached, by their reason.
        recent: how requests ended lately.
    """

    def __init__(self) -> None:
        self._requests: dict[AnswerRecord, None] = {}
        self.cache_stats = {route: CacheStats() for route in Route}
        self.planned_hits = {role: PlannedHits() for role in Role}
        self.plans = dict.fromkeys(RouteReason, 0)
        self.output_lengths = OutputLengths()
        self.recent = RecentEnds()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: AnswerRecord) -> None:
        """A request is in flight until `end`."""
        if len(self._requests) >= MAX_SHOWN:
            del self._requests[next(iter(self._requests))]
        self._requests[request] = None

    def end(self, request: AnswerRecord, at: float, outcome: Outcome) -> None:
        """The request ended at this monotonic second."""
        self._requests.pop(request, None)
        self.recent.ended(request, at, outcome)

    def count_usage(self, model: str, route: Route, usage: Usage, choices: int) -> None:
        """A prompt was answered: so many tokens, in so many choices."""
        if usage.completion:
            self.output_lengths.seen(model, usage.completion / choices)
        self.cache_stats[route].add(usage.prompt or 0, usage.cached or 0)

    def failed(self, failure: LegFailure) -> None:
        """A leg failed. A client's own mistake is no failure of ours, and is not kept."""
        if failure.fault is not Fault.CLIENT_ERROR:
            self.recent.faults.append(failure)

    def newest(self, most: int) -> list[AnswerRecord]:
        """The requests that began last, newest first."""
        return list(itertools.islice(reversed(self._requests), most))

    def failures(self) -> list[LegFailure]:
        """The last failures, newest first."""
        return list(itertools.islice(reversed(self.recent.faults), MAX_FAILURES))
