"""How long a client wants its conversation kept, in the fields that OpenAI's and Anthropic's clients send. Pure.

vLLM 0.32 ignores all of them, so they go on to nodes as they came:

- ``prompt_cache_retention`` (completions, chat, responses): ``in_memory`` or ``24h``.
- ``prompt_cache_options`` (the same endpoints): its ``ttl``. Mode ``explicit`` without a breakpoint asks for no cache.
- ``cache_control`` (messages): of the body, or of the last block that has one: tools come before the system prompt, and
  that before the messages. Its ``ttl`` is 5m unless it says 1h.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import msgspec
from msgspec import Raw

from pdproxy.errors import ClientError
from pdproxy.raw_json import LIST, OBJECT, PIECE, Steps, first_byte, first_items, value_of
from pdproxy.reasons import KeepReason
from pdproxy.request import Endpoint, Json, KeepAsk

_CONTROL = b'"cache_control"'
_BREAKPOINT = b'"prompt_cache_breakpoint"'
"""Names as they stand in a body. They cannot match inside a JSON string, where quotes are escaped."""
_RETENTIONS: Mapping[str, float] = MappingProxyType({"in_memory": 3600.0, "in-memory": 3600.0, "24h": 86400.0})
"""Seconds. ``in-memory`` is what OpenAI's first clients wrote; it says "up to an hour" of that."""
_OPTIONS: Mapping[str, float] = MappingProxyType({"5m": 300.0, "30m": 1800.0, "1h": 3600.0, "24h": 86400.0})
_CONTROLS: Mapping[str, float] = MappingProxyType({"5m": 300.0, "1h": 3600.0})


def keep_asked(endpoint: Endpoint, body: Json, raw: bytes) -> Steps[KeepAsk | None]:
    """The wish of a scrubbed body; None without one. ``raw``: the bytes that it was read from.

    Raises:
        ClientError: 400: a value that none of these fields has.
    """
    if endpoint is Endpoint.MESSAGES:
        if not (yield from _is_in(raw, _CONTROL)):
            return None
        control = yield from _last_control(body)
        return None if control is None else _of_control(control)
    retention = _of_retention(body["prompt_cache_retention"]) if "prompt_cache_retention" in body else None
    if "prompt_cache_options" not in body:
        return retention
    options = _object("prompt_cache_options", body["prompt_cache_options"])
    if options.get("mode") == "explicit" and not (yield from _is_in(raw, _BREAKPOINT)):
        return KeepAsk(0.0, KeepReason.PROMPT_CACHE_OPTIONS)
    seconds = _seconds("prompt_cache_options.ttl", options.get("ttl"), _OPTIONS)
    if seconds is None or (retention is not None and retention.seconds >= seconds):
        return retention
    return KeepAsk(seconds, KeepReason.PROMPT_CACHE_OPTIONS)


def _is_in(raw: bytes, name: bytes) -> Steps[bool]:
    for begin in range(0, len(raw), PIECE):
        if raw.find(name, begin, begin + PIECE + len(name)) >= 0:
            return True
        yield
    return False


def _of_retention(value: object) -> KeepAsk | None:
    seconds = _seconds("prompt_cache_retention", value_of(value), _RETENTIONS)
    return None if seconds is None else KeepAsk(seconds, KeepReason.PROMPT_CACHE_RETENTION)


def _of_control(value: Raw) -> KeepAsk:
    control = _object("cache_control", value)
    if control.get("type") != "ephemeral":
        raise _bad("cache_control.type", "`ephemeral`")
    seconds = _seconds("cache_control.ttl", control.get("ttl"), _CONTROLS)
    return KeepAsk(_CONTROLS["5m"] if seconds is None else seconds, KeepReason.CACHE_CONTROL)


def _object(name: str, value: object) -> Json:
    found = value_of(value)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise _bad(name, "an object")
    return found


def _seconds(name: str, value: object, words: Mapping[str, float]) -> float | None:
    """The time that a word stands for; None for null."""
    if value is None:
        return None
    seconds = words.get(value) if isinstance(value, str) else None
    if seconds is None:
        raise _bad(name, " or ".join(f"`{word}`" for word in words if word != "in-memory"))
    return seconds


def _bad(name: str, takes: str) -> ClientError:
    return ClientError(400, f"`{name}` must be {takes}.", param=name.partition(".")[0], code="invalid_value")


class _Block(msgspec.Struct):
    """A tool, a message, or a part of one, as far as it is looked at."""

    cache_control: Raw = Raw()
    content: Raw = Raw()


_BLOCK = msgspec.json.Decoder(_Block).decode


def _last_control(body: Json) -> Steps[Raw | None]:
    """The body's own, or that of the last block that has one."""
    own = body.get("cache_control")
    if isinstance(own, Raw) and value_of(own) is not None:
        return own
    for name in ("messages", "system", "tools"):
        for block in _blocks_from_the_end(body.get(name)):
            yield
            control = _control_in(block)
            if control is not None:
                return control
    return None


def _control_in(block: _Block) -> Raw | None:
    """The last one of a block, or of the parts of its content, or of theirs (results of tools)."""
    if block.cache_control and value_of(block.cache_control) is not None:
        return block.cache_control
    for part in _blocks_from_the_end(block.content or None):
        control = part.cache_control
        if control and value_of(control) is not None:
            return control
        for inner in _blocks_from_the_end(part.content or None):
            if inner.cache_control and value_of(inner.cache_control) is not None:
                return inner.cache_control
    return None


def _blocks_from_the_end(value: object) -> Iterator[_Block]:
    """The objects of a list. A node says what is wrong with other values."""
    if not isinstance(value, Raw) or first_byte(value) != LIST:
        return
    for item in reversed(first_items(value)):
        if first_byte(item) == OBJECT:
            yield _BLOCK(item)
