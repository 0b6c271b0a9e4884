"""Whether a decode node used its ticket, as far as its usage tells. Pure.

A decode node that pulled has all prompt tokens but the last one (the last few, with multi-token prediction) from the
ticket and its own cache, and says so in ``cached_tokens``; one that did not has only its own cache. It says so only
with ``--enable-prompt-tokens-details``: without it nobody can tell.
"""

import dataclasses
import re

SLACK_TOKENS = 8
"""Prompt tokens that a decode node computes itself even with a good ticket: the last one, more with MTP."""
_PROMPT = re.compile(rb'"prompt_tokens":\s*(\d+)')
_COMPLETION = re.compile(rb'"completion_tokens":\s*(\d+)')
_CACHED = re.compile(rb'"cached_tokens":\s*(\d+)')


@dataclasses.dataclass(frozen=True, slots=True)
class Tally:
    """Usage as the decode node gave it, in tokens; None where it did not say."""

    prompt: int | None
    completion: int | None
    cached: int | None

    @property
    def recomputed(self) -> bool:
        """Whether the prompt was computed again. Only asked where a ticket was given."""
        return self.prompt is not None and self.cached is not None and self.cached < self.prompt - SLACK_TOKENS


def tally(data: bytes) -> Tally | None:
    """The usage in an answer or event, None without. JSON strings cannot match: their quotes are escaped."""
    if b'"prompt_tokens":' not in data:
        return None
    return Tally(_last(_PROMPT, data), _last(_COMPLETION, data), _last(_CACHED, data))


def _last(pattern: re.Pattern[bytes], data: bytes) -> int | None:
    found = pattern.findall(data)
    return int(found[-1]) if found else None
