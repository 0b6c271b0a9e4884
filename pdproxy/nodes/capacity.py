"""What the caches of a node hold. Pure values."""

import dataclasses
import enum

FULL = 0.9
"""The part of a cache that may be held before more of it counts against a node."""
OVERFLOW = 3000.0
"""Sequences that a whole cache more would weigh: prompts wait there until answers end."""


class Binding(enum.StrEnum):
    """What runs out first with sequences of the greatest length."""

    ATTENTION = "attention"
    STATE = "state"
    NOTHING = "nothing"


@dataclasses.dataclass(frozen=True, slots=True)
class Capacity:
    """What the caches of all engines behind one address hold.

    A load of t tokens in n sequences fits while t / tokens + n / sequences <= 1, but for the last block of each.

    Attributes:
        tokens: of attention capacity.
        sequences: that the state groups allow; None where there are none.
        longest: sequences of the greatest length that run together.
        binding: what runs out first with these.
    """

    tokens: int
    sequences: int | None
    longest: int
    binding: Binding

    def overflow(self, tokens: int, sequences: int) -> float:
        """What more than `FULL` weighs, in sequences, where so many tokens are held in so many sequences."""
        fill = tokens / self.tokens + (sequences / self.sequences if self.sequences else 0.0)
        return max(0.0, fill - FULL) * OVERFLOW
