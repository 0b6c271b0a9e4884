"""What a node's usage says, in the shape of each endpoint. Pure.

``cached_tokens`` tells whether a decode node used its ticket: one that pulled has all prompt tokens but the last one
(the last few, with multi-token prediction) from the ticket and its own cache; one that did not has only its own cache.
As vLLM 0.32 writes it: completions and chat have ``prompt_tokens_details``, messages ``cache_read_input_tokens`` (apart
from ``input_tokens``), all three only with ``--enable-prompt-tokens-details``: without it nobody can tell. Responses
always have ``input_tokens_details``.
"""

import dataclasses
import json
import re
from collections.abc import Mapping

SLACK_TOKENS = 8
"""Prompt tokens that a decode node computes itself even with a good ticket: the last one, more with MTP."""
_PROMPT = re.compile(rb'"prompt_tokens":\s*(\d+)')
_COMPLETION = re.compile(rb'"completion_tokens":\s*(\d+)')
_CACHED = re.compile(rb'"cached_tokens":\s*(\d+)')


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """Usage as a node gave it, in tokens; None where it did not say."""

    prompt: int | None
    completion: int | None
    cached: int | None

    @property
    def recomputed(self) -> bool:
        """Whether the prompt was computed again. Only asked where a ticket was given."""
        return self.prompt is not None and self.cached is not None and self.cached < self.prompt - SLACK_TOKENS


def read_usage(usage: object) -> Usage | None:
    """What an answer's ``usage`` says; None where it is none."""
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

    Completions and chat may tell it with every event: they are not parsed for it. JSON strings cannot match, for their
    quotes are escaped.
    """
    if b'"prompt_tokens":' in data:
        return Usage(_last(_PROMPT, data), _last(_COMPLETION, data), _last(_CACHED, data))
    if b'"output_tokens":' not in data:
        return None
    try:
        event = json.loads(data)
    except ValueError:
        return None
    response = event.get("response")  # of responses' last event; messages tell it at the top of theirs
    return read_usage(response.get("usage") if isinstance(response, dict) else event.get("usage"))


def _cached(details: object) -> int | None:
    return _int(details.get("cached_tokens")) if isinstance(details, Mapping) else None


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _last(pattern: re.Pattern[bytes], data: bytes) -> int | None:
    found = pattern.findall(data)
    return int(found[-1]) if found else None
