"""The fields that the proxy looks at, read as nodes read them: by pydantic's lax rules, which take `16.0`, `"16"` and
`true` for numbers, and `1`, `"true"` and `"no"` for booleans. Pure.

Each field has the type that vLLM's model of the endpoint gives it (0.32: `entrypoints/openai/*/protocol.py`,
`entrypoints/anthropic/protocol.py`), within bounds beyond which no node serves a request. A field that an endpoint does
not have is not read there: vLLM ignores it too. The body is left as it is, so that nodes read what the client wrote.
"""

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from pdproxy.errors import PdproxyError
from pdproxy.raw_json import SMALL, value_of
from pdproxy.request import Endpoint, Json

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


class _Kind:
    """How the values of a field are read.

    Values of the types in ``plain`` need no conversion; of whole numbers, those from ``least`` to `_LARGEST`.
    """

    __slots__ = ("convert", "least", "plain")

    def __init__(self, annotation: Any, *plain: type, least: int = -_LARGEST - 1) -> None:
        self.convert: Callable[[object], object] = TypeAdapter(annotation).validate_python
        self.plain = frozenset(plain)
        self.least = least


def _decoded(raw: msgspec.Raw) -> object:
    """What the standard library, by which nodes read JSON, makes of a number beyond a float's range."""
    if len(raw) > SMALL:
        raise ValueError("too long to be a value of these fields")
    return json.loads(bytes(raw))


def _number(least: int = -_LARGEST - 1) -> _Kind:
    return _Kind(Annotated[int, Field(ge=least, le=_LARGEST)], int, least=least)


def _number_or_none(least: int = -_LARGEST - 1) -> _Kind:
    return _Kind(Annotated[int, Field(ge=least, le=_LARGEST)] | None, int, type(None), least=least)


_FLAG = _Kind(bool, bool)
_FLAG_OR_NONE = _Kind(bool | None, bool, type(None))
_FLOAT_OR_NONE = _Kind(float | None, float, int, type(None))
_ANSWER = {"stream": _FLAG_OR_NONE, "temperature": _FLOAT_OR_NONE}
_SAMPLED = {
    **_ANSWER,
    "max_tokens": _number_or_none(0),
    "min_tokens": _number(),
    "stream_options": _Kind(StreamOptions | None, type(None)),
    "priority": _number(),
    "seed": _number_or_none(),
    "truncate_prompt_tokens": _number_or_none(),
    "presence_penalty": _FLOAT_OR_NONE,
    "frequency_penalty": _FLOAT_OR_NONE,
    "prompt_logprobs": _number_or_none(),
    "use_beam_search": _FLAG,
    "include_stop_str_in_output": _FLAG,
    "watermarking": _FLAG_OR_NONE,
    "return_token_ids": _FLAG_OR_NONE,
}
FIELDS: Mapping[Endpoint, Mapping[str, _Kind]] = {
    Endpoint.COMPLETIONS: {**_SAMPLED, "n": _number(1), "echo": _FLAG_OR_NONE},
    Endpoint.CHAT: {**_SAMPLED, "n": _number_or_none(1), "echo": _FLAG, "max_completion_tokens": _number_or_none(0)},
    Endpoint.MESSAGES: {**_ANSWER, "max_tokens": _number(0)},
    Endpoint.RESPONSES: {
        **_ANSWER,
        "max_output_tokens": _number_or_none(0),
        "priority": _number(),
        "background": _FLAG_OR_NONE,
        "include_stop_str_in_output": _FLAG,
    },
}


def read_fields(endpoint: Endpoint, body: Json) -> dict[str, Any]:
    """All of these that a body has, by name. Raises UnreadableField."""
    kinds, found = FIELDS[endpoint], dict[str, Any]()
    for name, value in body.items():
        if name in kinds:
            kind, read = kinds[name], value_of(value)
            of = type(read)  # most values are what they should be: no call for these, on the way of every request
            plain = of in kind.plain and (of is not int or kind.least <= read <= _LARGEST)  # type: ignore[operator]
            found[name] = read if plain else _converted(kind, name, read)
    return found


def read_field(endpoint: Endpoint, body: Json, name: str) -> Any:
    """One of these; None where a body, or the endpoint, does not have it. Raises UnreadableField."""
    return read_fields(endpoint, {name: body[name]}).get(name) if name in body else None


def _converted(kind: _Kind, name: str, value: object) -> object:
    try:
        return kind.convert(_decoded(value) if isinstance(value, msgspec.Raw) else value)
    except (ValidationError, ValueError, RecursionError) as error:
        raise UnreadableField(name) from error
