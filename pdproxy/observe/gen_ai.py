"""Names of OpenTelemetry's semantic conventions for generative AI, and what of a request and its usage they tell.

The conventions are in development. These are the names of opentelemetry-semantic-conventions 0.66b2, which the project
``open-telemetry/semantic-conventions-genai`` has taken over since; `tests/observe/test_gen_ai.py` compares them with
the installed package. They stand here because the proxy runs without that package where tracing is off.
"""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from pdproxy.raw_json import value_of
from pdproxy.request import Endpoint, Json
from pdproxy.usage import Usage

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
STREAM = "gen_ai.request.stream"
CHOICE_COUNT = "gen_ai.request.choice.count"
MAX_TOKENS = "gen_ai.request.max_tokens"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_ID = "gen_ai.response.id"
FINISH_REASONS = "gen_ai.response.finish_reasons"
TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
ERROR_TYPE = "error.type"

VLLM = "vllm"
"""The provider: no well-known value fits, and the conventions allow others."""
OPERATIONS: Mapping[Endpoint, str] = MappingProxyType(
    {
        Endpoint.COMPLETIONS: "text_completion",
        Endpoint.CHAT: "chat",
        Endpoint.MESSAGES: "chat",
        Endpoint.RESPONSES: "chat",
    }
)
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
SAMPLING: Mapping[str, tuple[str, type[int] | type[float]]] = MappingProxyType(
    {
        "temperature": ("gen_ai.request.temperature", float),
        "top_p": ("gen_ai.request.top_p", float),
        "top_k": ("gen_ai.request.top_k", float),
        "frequency_penalty": ("gen_ai.request.frequency_penalty", float),
        "presence_penalty": ("gen_ai.request.presence_penalty", float),
        "seed": ("gen_ai.request.seed", int),
    }
)
"""Fields of a body with their attributes. Stop sequences are left out: they are a client's text, as its prompt is."""
_LARGEST = 2**63
"""OTLP's integers have 64 bits: a larger one would keep its whole batch of spans from being exported."""
LONGEST_MODEL = 200
"""Characters of a model's name that spans, log lines and the page show: a client can send any."""
_ID = re.compile(rb'"id":\s*"([^"\\]{1,200})"')
_MODEL = re.compile(rb'"model":\s*"([^"\\]{1,200})"')

Attributes = dict[str, str | bool | int | float | Sequence[str]]


def span_name(endpoint: Endpoint, model: str) -> str:
    """Operation and model; ``model`` is one that nodes serve, "" for any other, so that clients make no span names."""
    return f"{OPERATIONS[endpoint]} {model}" if model else OPERATIONS[endpoint]


def operation_attributes(endpoint: Endpoint, model: str) -> Attributes:
    """Attributes that the spans of a request and of its legs have in common; ``model`` as the client named it."""
    return {OPERATION: OPERATIONS[endpoint], PROVIDER: VLLM, REQUEST_MODEL: model[:LONGEST_MODEL]}


def request_attributes(body: Json, choices: int, *, stream: bool) -> Attributes:
    """Attributes of what a body asks for, as far as it is well-formed: a node has not seen it yet."""
    found: Attributes = {STREAM: stream}
    if choices != 1:
        found[CHOICE_COUNT] = choices
    limit = next((value for field in _LIMITS if (value := _number(value_of(body.get(field)))) is not None), None)
    if limit is not None:
        found[MAX_TOKENS] = int(limit)
    for field, (name, kind) in SAMPLING.items():
        if field in body:
            number = _number(value_of(body[field]))
            if number is not None and (kind is float or isinstance(number, int)):
                found[name] = kind(number)
    return found


def usage_attributes(usage: Usage) -> Attributes:
    """The tokens of a leg, or of an answer, as far as they are known."""
    counts = {INPUT_TOKENS: usage.prompt, OUTPUT_TOKENS: usage.completion, CACHED_TOKENS: usage.cached}
    return {name: count for name, count in counts.items() if count is not None}


def id_and_model(first_events: bytes) -> tuple[str, str]:
    """The id and the model that a stream's first events name; "" for what they do not. The model's name is not parsed
    out of JSON: one with escaped characters is not found."""
    return _first(_ID, first_events), _first(_MODEL, first_events)


def _number(value: object) -> int | float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if -_LARGEST <= value < _LARGEST else None


def _first(pattern: re.Pattern[bytes], data: bytes) -> str:
    found = pattern.search(data)
    return found.group(1).decode("utf-8", "replace") if found else ""
