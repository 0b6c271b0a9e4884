"""vLLM's queue of free blocks, with some that are given out last. In the scheduler's process.

vLLM frees a block into a queue, where it stays in the prefix cache until it is given out again: the one that was used
longest ago goes first. `EvictionOrder` takes the place of that queue. A free block of a `Hold` is set aside, and goes
only when no other is left. It counts as free all the time, so that nothing which vLLM decides by the number of free
blocks (whether a request is admitted, whether one is preempted) depends on what is held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class Hold:
    """Blocks that are to be given out last, in the order of their tokens within each cache group."""

    __slots__ = ("blocks",)

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.blocks = tuple(blocks)

    def __len__(self) -> int:
        return len(self.blocks)


class EvictionOrder(FreeKVCacheBlockQueue):
    """The free blocks of one engine: in vLLM's order those that nothing holds, and aside the others."""

    _give_up: Callable[[], None]
    _holds: dict[int, set[Hold]]
    _aside: dict[int, KVCacheBlock]

    @classmethod
    def after(cls, free: FreeKVCacheBlockQueue, give_up: Callable[[], None]) -> EvictionOrder:
        """With the blocks of vLLM's own queue, which must not be used any more.

        `give_up`: has to release one hold at least, any; called when a block is needed and only held ones are free.
        """
        order = cls(free.get_all_free_blocks())
        order._give_up, order._holds, order._aside = give_up, {}, {}
        return order

    def hold(self, hold: Hold) -> None:
        """Give these blocks out last, from now on. Blocks in use are set aside once they are free."""
        for block in hold.blocks:
            self._holds.setdefault(block.block_id, set()).add(hold)
            if block.ref_cnt == 0 and block.block_id not in self._aside:
                super().remove(block)
                self._put_aside(block)

    def release(self, hold: Hold) -> None:
        """The blocks that no other hold has are as if they had just been freed, the last tokens' first."""
        freed = []
        for block in reversed(hold.blocks):
            holds = self._holds.get(block.block_id, set())
            holds.discard(hold)
            if not holds:
                self._holds.pop(block.block_id, None)
                if self._aside.pop(block.block_id, None) is not None:
                    freed.append(block)
        self.num_free_blocks -= len(freed)
        super().append_n(freed)

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """The next `n` blocks to be used anew."""
        while self._aside and self.num_free_blocks - len(self._aside) < n:
            self._give_up()
        blocks: list[KVCacheBlock] = super().popleft_n(n)
        if self._holds:
            # A block that lost its place in the prefix cache while it was in use is not set aside when it is freed.
            for block in blocks:
                self._holds.pop(block.block_id, None)
        return blocks

    def remove(self, block: KVCacheBlock) -> None:
        """The block is used by a request that has found it in the prefix cache."""
        if self._aside.pop(block.block_id, None) is None:
            super().remove(block)
        else:
            self.num_free_blocks -= 1

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        """The blocks are free again, and stay in the prefix cache."""
        super().append_n([block for block in blocks if block.block_id not in self._holds])
        for block in blocks:
            if block.block_id in self._holds:
                self._put_aside(block)

    def _put_aside(self, block: KVCacheBlock) -> None:
        self._aside[block.block_id] = block
        self.num_free_blocks += 1
