"""What caches were worth, as far as the nodes' usage tells the proxy."""

import dataclasses
import enum


class Way(enum.StrEnum):
    """How a prompt was computed, and so whose cache its hits were in."""

    DISAGGREGATED = "disaggregated"
    """By a prefill node: hits are those of its cache."""
    LOCAL = "local"
    """By the decode node alone."""
    RECOMPUTED = "recomputed"
    """By the decode node, though it had a ticket."""


@dataclasses.dataclass(slots=True)
class Sum:
    """Prompts that were answered, and their tokens."""

    prompts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Hits:
    """Sums since the start."""

    def __init__(self) -> None:
        self.by_way = {way: Sum() for way in Way}

    def count(self, way: Way, prompt_tokens: int, cached_tokens: int) -> None:
        """A prompt was answered."""
        of = self.by_way[way]
        of.prompts += 1
        of.prompt_tokens += prompt_tokens
        of.cached_tokens += cached_tokens
