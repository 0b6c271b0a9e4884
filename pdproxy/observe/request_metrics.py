"""Metrics of each request as its client sees it: latency by model, and what each API key uses.

Latency has the names of OpenTelemetry's conventions for servers of models, ``gen_ai.server.*``: Prometheus writes dots
as underscores and adds the unit. Labels are the conventions' attributes, and ``endpoint``: three of the four endpoints
are one operation, ``chat``. Keys are told apart by their names, never by the keys themselves.
"""

import enum
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from pdproxy.observe.families import Counter, CounterSeries, Gauge, Histogram
from pdproxy.observe.gen_ai import OPERATIONS, VLLM
from pdproxy.observe.labels import Outcome, Rejection, Tokens
from pdproxy.request import Endpoint

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


class RequestLabels(NamedTuple):
    """Labels that all series of one request have in common; ``model`` as `ServedModels.label` gives it."""

    endpoint: Endpoint
    model: str
    stream: bool


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


class ServerMetrics:
    """Time to the first token, time per output token, and duration."""

    def __init__(self, registry: CollectorRegistry) -> None:
        first_token = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "From a request's arrival to the first event of its stream.",
            LABELS,
            buckets=SECONDS,
            registry=registry,
        )
        output_token = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean time of a stream's output tokens after the first one.",
            LABELS,
            buckets=TOKEN_SECONDS,
            registry=registry,
        )
        duration = Histogram(
            "gen_ai_server_request_duration_seconds",
            "From a request's arrival to the end of its answer.",
            (*LABELS, "error_type"),
            buckets=SECONDS,
            registry=registry,
        )
        self._first_token = cache(lambda of: first_token.labels(*_values(of)))
        self._output_token = cache(lambda of: output_token.labels(*_values(of)))
        self._duration = cache(lambda of, error: duration.labels(*_values(of), error))

    def first_token(self, of: RequestLabels, seconds: float) -> None:
        """The first event of a stream is here, so long after the request came."""
        self._first_token(of).observe(seconds)

    def output_tokens(self, of: RequestLabels, tokens: float, seconds: float) -> None:
        """A stream ended well: so many tokens came to each of its choices, the first one so many seconds ago."""
        if tokens > 1:
            self._output_token(of).observe(seconds / (tokens - 1))

    def ended(self, of: RequestLabels, outcome: Outcome, seconds: float) -> None:
        """A request ended."""
        self._duration(of, "" if outcome is Outcome.OK else outcome.value).observe(seconds)


def _values(of: RequestLabels) -> tuple[str, ...]:
    return OPERATIONS[of.endpoint], VLLM, of.model, "true" if of.stream else "false", of.endpoint


IN_USAGE = (Tokens.PROMPT, Tokens.COMPLETION, Tokens.CACHED)
"""As `Usage` has them."""
MOST_KEYS = 1000
"""Names with series of their own; those that come later are counted together."""
OTHER_KEYS = "(other)"
"""Their label: no name in a file of keys can be so, for a client cannot choose names, and an operator will not."""


class KeyMetrics:
    """Series by the names of API keys."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self._requests = counter("pdproxy_key_requests_total", "Requests of a key that ended.", ["key", "outcome"])
        self._tokens = counter("pdproxy_key_tokens_total", "Tokens of a key, as nodes report them.", ["key", "kind"])
        self._tokens_of = cache(lambda key: [self._tokens.labels(key, kind) for kind in IN_USAGE])
        self._waited = counter("pdproxy_key_queue_seconds_total", "Time that prompts of a key waited.", ["key"])
        self._rejected = counter(
            "pdproxy_key_rejected_total", "Requests of a key that were refused.", ["key", "reason"]
        )
        self._active = gauge("pdproxy_key_requests_active", "Prompts of a key that run now.", ["key"])
        self._queued = gauge("pdproxy_key_requests_queued", "Prompts of a key that wait now.", ["key"])
        self._labels: dict[str, str] = {}
        self._running: Callable[[str], int] = lambda _: 0
        self._waiting: Callable[[str], int] = lambda _: 0

    def watch(self, running: Callable[[str], int], waiting: Callable[[str], int]) -> None:
        """Ask for the numbers of a key's running and waiting prompts whenever metrics are scraped."""
        self._running, self._waiting = running, waiting

    def known(self, key: str) -> None:
        """Requests of a key may come: its series are there from now on, at 0."""
        self._label(key)

    def request_ended(self, key: str, outcome: Outcome) -> None:
        """Count a request that ended."""
        self._requests.labels(self._label(key), outcome).inc()

    def tokens_of(self, key: str) -> Sequence[CounterSeries]:
        """The counters of a key's tokens, by `IN_USAGE`."""
        return self._tokens_of(self._label(key))

    def waited(self, key: str, seconds: float) -> None:
        """A prompt has left the queue, to run or refused."""
        self._waited.labels(self._label(key)).inc(max(0.0, seconds))

    def rejected(self, key: str, reason: enum.StrEnum) -> None:
        """Count a request that was turned away."""
        self._rejected.labels(self._label(key), reason).inc()

    def _label(self, key: str) -> str:
        label = self._labels.get(key)
        return self._begin(key) if label is None else label

    def _begin(self, key: str) -> str:
        if len(self._labels) >= MOST_KEYS:
            return OTHER_KEYS
        self._labels[key] = key
        for counter, words in ((self._requests, Outcome), (self._tokens, Tokens), (self._rejected, Rejection)):
            counter.begin((key,), words)
        self._waited.begin((key,))
        self._active.labels(key).set_function(lambda: self._running(key))
        self._queued.labels(key).set_function(lambda: self._waiting(key))
        return key
