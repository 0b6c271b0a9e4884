"""Token usage in the shapes of the four endpoints: read, summed over prompts, corrected for the hand-over. Pure.

As vLLM 0.32 writes them: completions and chat have ``prompt_tokens_details.cached_tokens``, messages
``cache_read_input_tokens`` (not counted in ``input_tokens``), both only with ``--enable-prompt-tokens-details``;
responses always have ``input_tokens_details.cached_tokens``.

Tokens that a request left in the prefix cache are ``created_cache_tokens`` of chat, ``cache_creation_input_tokens`` of
messages (not counted in ``input_tokens`` either), and ``cache_write_tokens`` of responses.

``cached_tokens`` of a decode node shows whether it used its ticket: if it did, all prompt tokens but those after the
hand-over's end count as cached; if not, only what its own cache held.
"""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec

from pdproxy.request import Endpoint, Json, read_json

_PROMPT_TOKENS = re.compile(rb'"prompt_tokens":\s*(\d+)')
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
_CACHED_TOKENS = re.compile(rb'"cached_tokens":\s*(\d+)')
_MESSAGES_INPUT = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
_WRITTEN: Mapping[Endpoint, tuple[str, str]] = MappingProxyType(
    {
        Endpoint.COMPLETIONS: ("prompt_tokens_details", "created_cache_tokens"),
        Endpoint.CHAT: ("prompt_tokens_details", "created_cache_tokens"),
        Endpoint.RESPONSES: ("input_tokens_details", "cache_write_tokens"),
        Endpoint.MESSAGES: ("", "cache_creation_input_tokens"),
    }
)
"""Where an endpoint's usage tells what was left in the cache: the field that holds it, and its name."""


class Usage(msgspec.Struct, frozen=True):
    """Usage as a node reported it, in tokens; None for what it left out."""

    prompt: int | None
    completion: int | None
    cached: int | None

    def recomputed(self, tail_tokens: int) -> bool:
        """Whether a decode node with a ticket computed the prompt all the same.

        ``tail_tokens``: the most that it computes with a good ticket (`Node.tail_tokens`).
        """
        return self.prompt is not None and self.cached is not None and self.cached < self.prompt - tail_tokens


class CacheUse(msgspec.Struct, frozen=True):
    """The use of the prefix cache by the node that computed a prompt, in tokens.

    Attributes:
        read: the prompt's first tokens, which it had cached.
        written: tokens that it computed and left in its cache; None where it did not say.
    """

    read: int
    written: int | None = None


def read_usage(usage: object) -> Usage | None:
    """The ``usage`` of an answer; None where it is missing or has no known shape."""
    if not isinstance(usage, dict):
        return None
    if "prompt_tokens" in usage:
        prompt, completion = _int(usage["prompt_tokens"]), _int(usage.get("completion_tokens"))
        return Usage(prompt, completion, _cached(usage.get("prompt_tokens_details")))
    if "input_tokens" not in usage:
        return None
    prompt, completion = _int(usage["input_tokens"]), _int(usage.get("output_tokens"))
    if "input_tokens_details" in usage:
        return Usage(prompt, completion, _cached(usage["input_tokens_details"]))
    read, written = _int(usage.get("cache_read_input_tokens")), _int(usage.get("cache_creation_input_tokens"))
    return Usage(None if prompt is None else prompt + (read or 0) + (written or 0), completion, read)


def read_usage_event(data: bytes) -> Usage | None:
    """The usage in a stream's event; None without one.

    Completions and chat may report it with every event, so these are not parsed for it. The patterns cannot match
    inside a JSON string, for its quotes are escaped.
    """
    if data.find(b'"prompt_tokens":') >= 0:
        told = data[max(0, data.find(b'"usage":')) :]  # the patterns are slower than this
        return Usage(_last(_PROMPT_TOKENS, told), _last(_COMPLETION_TOKENS, told), _last(_CACHED_TOKENS, told))
    if data.find(b'"output_tokens":') < 0:
        return None
    try:
        event = read_json(data)
    except ValueError:
        return None
    response = event.get("response")  # in the last event of responses; messages have usage at the top level
    return read_usage(response.get("usage") if isinstance(response, dict) else event.get("usage"))


def written_tokens(endpoint: Endpoint, usage: object) -> int | None:
    """The tokens that the request left in the prefix cache; None where the ``usage`` of an answer does not say."""
    holder, name = _WRITTEN[endpoint]
    details = usage.get(holder) if holder and isinstance(usage, dict) else usage
    return _int(details.get(name)) if isinstance(details, dict) else None


def with_cache_use(endpoint: Endpoint, usage: Json, use: CacheUse) -> dict[str, object]:
    """A usage object that tells the cache of the prefill node, not what the decode node pulled."""
    if endpoint is Endpoint.MESSAGES:
        return _messages_usage(usage, use)
    key = "input_tokens_details" if endpoint is Endpoint.RESPONSES else "prompt_tokens_details"
    details = usage.get(key)
    told = {**(details if isinstance(details, dict) else {}), "cached_tokens": use.read}
    name = _WRITTEN[endpoint][1]
    if use.written is not None:
        told[name] = use.written
    elif endpoint is Endpoint.CHAT and name in told:  # the decode node's own
        told[name] = None
    return {**usage, key: told}


def _messages_usage(usage: Json, use: CacheUse) -> dict[str, object]:
    """The three parts of a prompt, which together are all of its tokens."""
    parts = [_int(usage.get(name)) for name in _MESSAGES_INPUT]
    if parts[0] is None:
        return dict(usage)
    fresh = max(0, sum(part or 0 for part in parts) - use.read)
    told = {**usage, "input_tokens": fresh, "cache_read_input_tokens": use.read}
    told.pop("cache_creation_input_tokens", None)  # the decode node's own
    if use.written is not None:
        written = min(use.written, fresh)
        told |= {"input_tokens": fresh - written, "cache_creation_input_tokens": written}
    return told


def sum_usage(usages: Sequence[Json]) -> dict[str, object]:
    """Usage over all prompts; details are summed number by number."""
    total: dict[str, object] = {}
    for usage in usages:
        for key, value in usage.items():
            total[key] = _add(total.get(key), value)
    return total


def _add(left: object, right: object) -> object:
    if isinstance(right, dict):
        return sum_usage([left if isinstance(left, dict) else {}, right])
    if isinstance(left, int) and isinstance(right, int):
        return left + right
    return left if right is None else right


def _cached(details: object) -> int | None:
    return _int(details.get("cached_tokens")) if isinstance(details, dict) else None


def _int(value: object) -> int | None:
    return value if type(value) is int else None  # no bool


def _last(pattern: re.Pattern[bytes], data: bytes) -> int | None:
    found = pattern.findall(data)
    return int(found[-1]) if found else None
