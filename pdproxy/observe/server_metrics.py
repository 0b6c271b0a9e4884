"""Latency as clients see it, in the names of OpenTelemetry's conventions for servers of models, ``gen_ai.server.*``.

Prometheus writes dots as underscores and adds the unit. Labels are the conventions' attributes, and ``endpoint``: three
of the four endpoints are one operation, ``chat``.
"""

from functools import cache
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Histogram

from pdproxy.observe.gen_ai import OPERATIONS, VLLM
from pdproxy.observe.labels import Outcome
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
    """What all series of one request have in common; ``model`` as `ServedModels.label` gives it."""

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
