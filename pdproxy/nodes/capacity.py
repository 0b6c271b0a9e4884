"""What a node's caches hold, and what requests take of it. Pure values."""

import dataclasses
import enum
from typing import NamedTuple


class Binding(enum.StrEnum):
    """What runs out first with sequences of the greatest length."""

    ATTENTION = "attention"
    STATE = "state"
    NOTHING = "nothing"


class Footprint(NamedTuple):
    """What requests take of a node's caches, as far as a proxy can tell.

    Attributes:
        tokens: of prompts and answers.
        sequences: each answer is one.
    """

    tokens: int = 0
    sequences: int = 0


NO_FOOTPRINT = Footprint()
"""Of a leg whose blocks are counted elsewhere, or that has none."""


FULL, OVERFLOW = 0.9, 3000.0
"""The part of a cache that may be held before more counts, and what a whole cache more weighs, in sequences."""


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

    def part_taken(self, tokens: int, sequences: int) -> float:
        """The part of it that such a load takes; above 1 where it does not fit."""
        return tokens / self.tokens + (sequences / self.sequences if self.sequences else 0.0)

    def crowd(self, held: Footprint, legs: int, ranks: int) -> float:
        """What the legs of one of its ranks weigh, in sequences: one each, and more where the cache is nearly full."""
        fill = self.part_taken(*held) * ranks
        return legs + max(0.0, fill - FULL) * OVERFLOW
