"""Metrics of each request as its client sees it: latency by model, and what each API key uses.

Latency has the names of OpenTelemetry's conventions for servers of models, ``gen_ai.server.*``: Prometheus writes dots
as underscores and adds the unit. Labels are the conventions' attributes, and ``endpoint``: three of the four endpoints
are one operation, ``chat``. Keys are told apart by their names, never by the keys themselves.
"""

import enum
from collections.abc import Callable
from functools import cached_property, partial
from typing import TypeVar

from prometheus_client import CollectorRegistry

from pdproxy.observe.families import Counter, CounterSeries, Gauge, Histogram, HistogramSeries
from pdproxy.observe.gen_ai import OPERATIONS, VLLM
from pdproxy.observe.labels import Outcome, Rejection, Tokens
from pdproxy.request import Endpoint
from pdproxy.usage import Usage

Word = TypeVar("Word")
Series = TypeVar("Series")

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.35, 0.5, 0.75,
    1, 1.5, 2.5, 5, 7.5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600,
)  # fmt: skip
"""Bounds for parts of a request's time: the conventions' for a first token, finer, and up to an hour."""
TOKEN_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1, 2.5, 5, 10,
)  # fmt: skip
"""Bounds for the time of one token: the conventions', and finer."""
LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "gen_ai_request_stream", "endpoint")
OTHER = "other"
"""The model label of names that no node serves: a client must not be able to make label values."""
MOST_MODELS = 256
"""Names that become label values, of models and adapters together: series are never dropped again."""


class ServedModels:
    """The names by which nodes serve models, since the start of the proxy; bounded."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def add(self, name: str) -> bool:
        """A node serves a model by this name; whether it is new, and there is room for it."""
        if not name or name in self._names or len(self._names) >= MOST_MODELS:
            return False
        self._names.add(name)
        return True

    def label(self, name: str) -> str:
        """The value of the model's label for what a client asked for."""
        return name if name in self._names else OTHER


class Made(dict[Word, Series]):
    """Series by one label's value, each of which is made when it is first asked for. ``make``: makes one."""

    def __init__(self, make: Callable[[Word], Series]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, word: Word) -> Series:
        made = self[word] = self._make(word)
        return made


IN_USAGE = (Tokens.PROMPT, Tokens.COMPLETION, Tokens.CACHED)
"""As `Usage` has them."""
MOST_KEYS = 1000
"""Names with series of their own; those that come later are counted together."""
OTHER_KEYS = "(other)"
"""Their label: no name in a file of keys can be so, for a client cannot choose names, and an operator will not."""


class KeySeries:
    """The series of one API key.

    Attributes:
        label: the key's name, or `OTHER_KEYS`.
        ended: its requests that ended, by outcome.
        tokens: in the order of `IN_USAGE`.
    """

    def __init__(self, label: str, requests: Counter, tokens: Counter) -> None:
        self.label = label
        self.ended: Made[Outcome, CounterSeries] = Made(lambda outcome: requests.labels(label, outcome))
        self.tokens = [tokens.labels(label, kind) for kind in IN_USAGE]


class RequestSeries:
    """The series of requests that have endpoint, model and kind of answer in common. Each is made when it first counts.

    Attributes:
        ended: requests that ended, by outcome.
        seconds: from their arrival to their end, by outcome.
    """

    def __init__(self, families: "RequestMetrics", endpoint: Endpoint | None, model: str, *, stream: bool) -> None:
        self._families = families
        self._model = model
        operation, kind = "" if endpoint is None else OPERATIONS[endpoint], "true" if stream else "false"
        self._labels = labels = (operation, VLLM, model, kind, endpoint or OTHER)
        self.ended: Made[Outcome, CounterSeries] = Made(
            lambda outcome: families.requests.labels(endpoint or OTHER, model, outcome)
        )
        self.seconds: Made[Outcome, HistogramSeries] = Made(
            lambda outcome: families.seconds.labels(*labels, "" if outcome is Outcome.OK else outcome)
        )

    @cached_property
    def first_token(self) -> HistogramSeries:
        """Seconds to the first event of a stream."""
        return self._families.first_token.labels(*self._labels)

    @cached_property
    def output_token(self) -> HistogramSeries:
        """Seconds between a stream's output tokens, on the mean."""
        return self._families.output_token.labels(*self._labels)

    @cached_property
    def _tokens(self) -> list[CounterSeries]:
        return [self._families.tokens.labels(kind, self._model) for kind in IN_USAGE]

    def add_tokens(self, usage: Usage, key: KeySeries) -> None:
        """Add the tokens of a leg, as its node reports them, to those of the model and of an API key; counts that are
        not positive add nothing."""
        counts = usage.prompt, usage.completion, usage.cached
        for count, of_model, of_key in zip(counts, self._tokens, key.tokens, strict=True):
            if count is not None and count > 0:  # which `inc` would look at again
                of_model.value += count
                of_key.value += count

    def streamed(self, tokens: float, seconds: float) -> None:
        """A stream ended well: so many tokens came to each of its choices, the first one so many seconds ago."""
        if tokens > 1:
            self.output_token.observe(seconds / (tokens - 1))


class RequestMetrics:
    """Requests, their tokens, and their latency, by endpoint and model.

    Attributes:
        models: the values of the label ``model``.
        requests, tokens, first_token, output_token, seconds: the families.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, histogram = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        self.models = ServedModels()
        self.requests = counter("pdproxy_requests_total", "Requests that ended.", ["endpoint", "model", "outcome"])
        self.tokens = counter("pdproxy_tokens_total", "Tokens, as nodes report them.", ["kind", "model"])
        self.first_token = histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "From a request's arrival to the first event of its stream.",
            LABELS,
            buckets=SECONDS,
        )
        self.output_token = histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean time of a stream's output tokens after the first one.",
            LABELS,
            buckets=TOKEN_SECONDS,
        )
        self.seconds = histogram(
            "gen_ai_server_request_duration_seconds",
            "From a request's arrival to the end of its answer.",
            (*LABELS, "error_type"),
            buckets=SECONDS,
        )
        self._alike: dict[tuple[Endpoint | None, str, bool], RequestSeries] = {}
        self.begin_model(OTHER)

    def begin_model(self, label: str) -> None:
        """The counters of a model are there from now on, at 0."""
        self.requests.export_zeros((*Endpoint, OTHER), (label,), Outcome)
        self.tokens.export_zeros(Tokens, (label,))

    def alike(self, endpoint: Endpoint | None, model: str, *, stream: bool) -> RequestSeries:
        """The series of requests like this one; ``endpoint``: None for one that was passed through."""
        asked = endpoint, self.models.label(model), stream
        found = self._alike.get(asked)
        if found is None:
            found = self._alike[asked] = RequestSeries(self, endpoint, asked[1], stream=stream)
        return found


class KeyMetrics:
    """Series by the names of API keys."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self._requests = counter("pdproxy_key_requests_total", "Requests of a key that ended.", ["key", "outcome"])
        self._tokens = counter("pdproxy_key_tokens_total", "Tokens of a key, as nodes report them.", ["key", "kind"])
        self._waited = counter("pdproxy_key_queue_seconds_total", "Time that prompts of a key waited.", ["key"])
        self._rejected = counter(
            "pdproxy_key_rejected_total", "Requests of a key that were refused.", ["key", "reason"]
        )
        self._active = gauge("pdproxy_key_requests_active", "Prompts of a key that run now.", ["key"])
        self._queued = gauge("pdproxy_key_requests_queued", "Prompts of a key that wait now.", ["key"])
        self._series: dict[str, KeySeries] = {}
        self._running: Callable[[str], int] = lambda _: 0
        self._waiting: Callable[[str], int] = lambda _: 0

    def watch_queue(self, running: Callable[[str], int], waiting: Callable[[str], int]) -> None:
        """Ask for the numbers of a key's running and waiting prompts whenever metrics are scraped."""
        self._running, self._waiting = running, waiting

    def series(self, key: str) -> KeySeries:
        """The series of a key, of which requests may come: they are there from now on, at 0."""
        found = self._series.get(key)
        return self._begin(key) if found is None else found

    def waited(self, key: str, seconds: float) -> None:
        """A prompt has left the queue, to run or refused."""
        self._waited.labels(self.series(key).label).inc(max(0.0, seconds))

    def rejected(self, key: str, reason: enum.StrEnum) -> None:
        """Count a request that was turned away."""
        self._rejected.labels(self.series(key).label, reason).inc()

    def _begin(self, key: str) -> KeySeries:
        if len(self._series) >= MOST_KEYS and key != OTHER_KEYS:
            return self.series(OTHER_KEYS)
        series = self._series[key] = KeySeries(key, self._requests, self._tokens)
        if key == OTHER_KEYS:
            return series
        for counter, words in ((self._requests, Outcome), (self._tokens, Tokens), (self._rejected, Rejection)):
            counter.export_zeros((key,), words)
        self._waited.export_zeros((key,))
        self._active.labels(key).set_function(lambda: self._running(key))
        self._queued.labels(key).set_function(lambda: self._waiting(key))
        return series
