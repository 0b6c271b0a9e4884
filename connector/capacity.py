"""How many tokens and sequences a KV cache holds, told by kind of group: pure.

All groups draw blocks from one pool. A *growing* group takes blocks in proportion to a sequence's length; a *bounded*
one takes a fixed number per sequence, however long (mamba states; sliding and chunked windows). Counting bounded groups
as if they grew made a hybrid node's capacity look 2 to 4 times too small (vllm#40384).
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass


class Binding(enum.StrEnum):
    """What runs out first with sequences of `max_model_len`; the value is a label of a metric."""

    ATTENTION = "attention"
    STATE = "state"
    NOTHING = "nothing"
    """There is no cache to fill."""


@dataclass(frozen=True, slots=True)
class Growing:
    """A group that keeps every token: full attention. `block_size`: tokens in a block."""

    block_size: int

    def __post_init__(self) -> None:
        _require(self.block_size > 0, f"a block of {self.block_size} tokens")

    def blocks(self, tokens: int) -> int:
        """What a sequence of so many tokens holds."""
        return -(-tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class Bounded:
    """A group that keeps the end of a sequence, or its state. Both in blocks.

    `held`: by one long sequence while it decodes; `peak`: at most, for the moment in which it enters or crosses into
    another block. vLLM promises each sequence its peak; they are at it in turn.
    """

    held: int
    peak: int

    def __post_init__(self) -> None:
        _require(0 <= self.held <= self.peak, f"{self.held} blocks held of {self.peak} at most")


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a node holds. A load of `t` tokens in `n` sequences fits while `t / tokens + n / sequences <= 1`, but for
    the last block of each sequence.

    `tokens`: of attention capacity, were every block given to the growing groups; without any, what `sequences` of
    `max_model_len` hold. `sequences`: that the bounded groups alone would allow at the same time; None where no group
    is bounded. `admitted`: sequences of `max_model_len` that run together, all groups counted, while one of them is at
    its peak.
    """

    tokens: int
    sequences: int | None
    admitted: int
    binding: Binding


NO_CAPACITY = Capacity(0, None, 0, Binding.NOTHING)
"""Of a model that keeps no cache."""


def capacity(blocks: int, max_model_len: int, groups: Sequence[Growing | Bounded]) -> Capacity:
    """Tell what `blocks` usable blocks hold (vLLM's null block is none), with sequences of at most `max_model_len`.

    Raises ValueError for a negative number of blocks or a length below one.
    """
    _require(blocks >= 0 and max_model_len > 0, f"{blocks} blocks for sequences of {max_model_len} tokens")
    growing = [group for group in groups if isinstance(group, Growing)]
    bounded = [group for group in groups if isinstance(group, Bounded)]
    attention = sum(group.blocks(max_model_len) for group in growing)
    state = sum(group.held for group in bounded)
    if attention + state == 0:
        return NO_CAPACITY
    sequences = blocks // state if state else None
    spare = sum(group.peak - group.held for group in bounded)
    return Capacity(
        tokens=_tokens(blocks, growing) if growing else (sequences or 0) * max_model_len,
        sequences=sequences,
        admitted=max(0, blocks - spare) // (attention + state),
        binding=Binding.ATTENTION if attention >= state else Binding.STATE,
    )


def _tokens(blocks: int, growing: Sequence[Growing]) -> int:
    """Groups with blocks of several sizes fill up together, in steps of the tokens that end a block in each."""
    step = math.lcm(*(group.block_size for group in growing))
    return blocks // sum(step // group.block_size for group in growing) * step


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"there can be no {what}")
