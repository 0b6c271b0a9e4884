"""The fields that the proxy looks at, read as nodes read them: by pydantic's lax rules, which take `16.0`, `"16"` and
`true` for numbers, and `1`, `"true"` and `"no"` for booleans. Pure.

Each field has the type that vLLM's model of the endpoint gives it (0.32: `entrypoints/openai/*/protocol.py`,
`entrypoints/anthropic/protocol.py`); token limits and ``n`` have a least value, below which no node serves a request. A
field that an endpoint does not have is not read there: vLLM ignores it too. The body is left as it is, so that nodes
read what the client wrote.

Beside those that the proxy needs there are numbers and booleans that the prefill leg leaves out: else the decode node
would refuse them once the prompt has been computed.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeAlias

import msgspec
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from pdproxy.errors import ClientError, PdproxyError
from pdproxy.raw_json import LIST, first_byte, value_of
from pdproxy.request import Endpoint, Json

LONGEST = 1024 * 1024
"""Bytes of a value. Longer ones are not passed on to be refused: a node might take one, such as `"1"` and many blanks,
and what it did then would count in no limit."""
_LARGEST = 2**63 - 1


class UnreadableField(PdproxyError):
    """A field that the proxy needs cannot be read: nodes refuse it, each in its own words."""

    def __init__(self, name: str) -> None:
        super().__init__(f"`{name}` cannot be read")
        self.name = name


class StreamOptions(BaseModel):
    """``stream_options``, as far as they are looked at."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class _FieldType:
    """How the values of a field are read.

    Values of the types in ``plain`` need no conversion; of whole numbers, those from ``least`` to ``most``.
    """

    __slots__ = ("convert", "least", "most", "plain")

    def __init__(self, annotation: Any, *plain: type, least: float = -math.inf, most: float = math.inf) -> None:
        self.convert: Callable[[object], object] = TypeAdapter(annotation).validate_python
        self.plain = frozenset(plain)
        self.least = least
        self.most = most


def _at_least(least: int) -> tuple[_FieldType, _FieldType]:
    """A whole number; and one that may be null."""
    number = Annotated[int, Field(ge=least)]
    return _FieldType(number, int, least=least), _FieldType(number | None, int, type(None), least=least)


_Int64: TypeAlias = Annotated[int, Field(ge=-_LARGEST - 1, le=_LARGEST)]
_NUMBER = _FieldType(int, int)
_NUMBER_OR_NONE = _FieldType(int | None, int, type(None))
_INT64 = _FieldType(_Int64, int, least=-_LARGEST - 1, most=_LARGEST)
_INT64_OR_NONE = _FieldType(_Int64 | None, int, type(None), least=-_LARGEST - 1, most=_LARGEST)
_LIMIT, _LIMIT_OR_NONE = _at_least(0)
_CHOICES, _CHOICES_OR_NONE = _at_least(1)
_FLAG = _FieldType(bool, bool)
_FLAG_OR_NONE = _FieldType(bool | None, bool, type(None))
_FLOAT_OR_NONE = _FieldType(float | None, float, int, type(None))
_ANSWER = {"stream": _FLAG_OR_NONE}
_SAMPLED = {
    **_ANSWER,
    "max_tokens": _LIMIT_OR_NONE,
    "min_tokens": _NUMBER,
    "stream_options": _FieldType(StreamOptions | None, type(None)),
    "priority": _INT64,
    "seed": _INT64_OR_NONE,
    "truncate_prompt_tokens": _INT64_OR_NONE,
    "presence_penalty": _FLOAT_OR_NONE,
    "frequency_penalty": _FLOAT_OR_NONE,
    "prompt_logprobs": _NUMBER_OR_NONE,
    "use_beam_search": _FLAG,
    "include_stop_str_in_output": _FLAG,
    "watermarking": _FLAG_OR_NONE,
    "return_token_ids": _FLAG_OR_NONE,
}
FIELDS: Mapping[Endpoint, Mapping[str, _FieldType]] = {
    Endpoint.COMPLETIONS: {**_SAMPLED, "n": _CHOICES, "echo": _FLAG_OR_NONE},
    Endpoint.CHAT: {**_SAMPLED, "n": _CHOICES_OR_NONE, "echo": _FLAG, "max_completion_tokens": _LIMIT_OR_NONE},
    Endpoint.MESSAGES: {**_ANSWER, "max_tokens": _LIMIT},
    Endpoint.RESPONSES: {
        **_ANSWER,
        "max_output_tokens": _LIMIT_OR_NONE,
        "priority": _INT64,
        "background": _FLAG_OR_NONE,
        "include_stop_str_in_output": _FLAG,
    },
}


def read_fields(endpoint: Endpoint, body: Json) -> dict[str, Any]:
    """All of these that a body has, by name.

    Raises:
        UnreadableField: for a node to refuse.
        ClientError: 400: a value is longer than `LONGEST`.
    """
    kinds = FIELDS[endpoint]
    return {name: _read(kinds[name], name, body[name]) for name in filter(kinds.__contains__, body)}


def _read(kind: _FieldType, name: str, value: object) -> object:
    read = value_of(value)
    of = type(read)  # most values are what they should be: no conversion for these, on the way of every request
    plain = of in kind.plain and (of is not int or kind.least <= read <= kind.most)  # type: ignore[operator]
    return read if plain else _converted(kind, name, read)


def _converted(kind: _FieldType, name: str, value: object) -> object:
    try:
        return kind.convert(_decoded(name, value) if isinstance(value, msgspec.Raw) else value)
    except (ValidationError, ValueError, RecursionError) as error:
        raise UnreadableField(name) from error


def _decoded(name: str, raw: msgspec.Raw) -> object:
    """A long value, or a number beyond a float's range, by the standard library: nodes read JSON by it."""
    if len(raw) > LONGEST:
        raise ClientError(400, f"`{name}` is longer than {LONGEST} bytes: send less.", param=name, code="invalid_value")
    if first_byte(raw) == LIST:
        raise ValueError("no field of these takes a list")
    return json.loads(bytes(raw))
