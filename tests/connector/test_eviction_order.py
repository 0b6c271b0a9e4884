"""Blocks that are given out last, in vLLM's real block pool."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id

from connector.eviction_order import EvictionOrder, Hold

BLOCKS = 12


@dataclass
class Cache:
    """A pool of which every block that is given out gets a hash, so that it stays in the prefix cache when it is free.

    `holds`: in the order in which they are given up.
    """

    pool: BlockPool = field(default_factory=lambda: BlockPool(BLOCKS + 1, True, 16))
    holds: list[Hold] = field(default_factory=list)
    given_up: int = 0

    def __post_init__(self) -> None:
        self.order = EvictionOrder.after(self.pool.free_block_queue, self.give_up)
        self.pool.free_block_queue = self.order

    def take(self, number: int) -> list[KVCacheBlock]:
        blocks: list[KVCacheBlock] = self.pool.get_new_blocks(number)
        for block in blocks:
            block.set_block_hash(make_block_hash_with_group_id(BlockHash(str(block.block_id).encode()), 0))
        return blocks

    def hold(self, blocks: Sequence[KVCacheBlock]) -> Hold:
        hold = Hold(blocks)
        self.holds.append(hold)
        self.order.hold(hold)
        return hold

    def release(self, hold: Hold) -> None:
        self.holds.remove(hold)
        self.order.release(hold)

    def give_up(self) -> None:
        self.given_up += 1
        self.release(self.holds[0])


@pytest.fixture
def cache() -> Cache:
    return Cache()


def test_held_blocks_are_free_and_go_last(cache: Cache) -> None:
    held = cache.take(4)
    cache.hold(held)
    cache.pool.free_blocks(held)
    assert cache.pool.get_num_free_blocks() == BLOCKS
    others = cache.take(BLOCKS - 4)
    assert not {block.block_id for block in held} & {block.block_id for block in others}
    assert (cache.given_up, cache.pool.get_num_free_blocks()) == (0, 4)
    assert [block.block_id for block in cache.take(1)] == [held[3].block_id]  # the last tokens' goes first
    assert cache.given_up == 1


def test_free_blocks_can_be_held_and_used_and_released(cache: Cache) -> None:
    blocks = cache.take(3)
    cache.pool.free_blocks(blocks)
    hold = cache.hold(blocks)
    cache.pool.touch(blocks)
    assert cache.pool.get_num_free_blocks() == BLOCKS - 3
    cache.release(hold)
    cache.pool.free_blocks(blocks)
    assert len(cache.take(BLOCKS)) == BLOCKS
    assert cache.given_up == 0


def test_a_block_of_two_holds_stays_until_both_are_released(cache: Cache) -> None:
    blocks = cache.take(2)
    first, second = cache.hold(blocks), cache.hold(blocks[:1])
    cache.pool.free_blocks(blocks)
    cache.release(first)
    assert blocks[0].block_id not in {block.block_id for block in cache.take(BLOCKS - 1)}
    cache.release(second)
    assert cache.take(1) == [blocks[0]]
    assert cache.given_up == 0


def test_released_blocks_are_as_if_just_freed(cache: Cache) -> None:
    held = cache.take(2)
    hold = cache.hold(held)
    cache.pool.free_blocks(held)
    cache.pool.free_blocks(cache.take(BLOCKS - 2))
    cache.release(hold)
    assert {block.block_id for block in cache.take(BLOCKS)[-2:]} == {block.block_id for block in held}


def test_a_block_that_left_the_prefix_cache_is_not_set_aside(cache: Cache) -> None:
    """Its next user's tokens are none that anybody holds."""
    blocks = cache.take(2)
    hold = cache.hold(blocks)
    cache.pool.evict_blocks({blocks[0].block_id})
    cache.pool.free_blocks(blocks)
    assert cache.take(1) == [blocks[0]]
    cache.pool.free_blocks(blocks[:1])
    assert len(cache.take(BLOCKS - 1)) == BLOCKS - 1
    assert cache.given_up == 0
    cache.release(hold)
    assert cache.pool.get_num_free_blocks() == 1


@pytest.mark.parametrize("seed", range(200))
def test_no_more_is_given_up_than_is_needed(seed: int) -> None:
    """And the pool has as many free blocks as one without holds, whatever is done to it."""
    rng, cache, used = Random(seed), Cache(), list[list[KVCacheBlock]]()
    for _ in range(80):
        free = cache.pool.get_num_free_blocks()
        what = rng.random()
        if what < 0.35 and free:
            number = rng.randint(1, min(4, free))
            held = {block.block_id for hold in cache.holds for block in hold.blocks if not block.ref_cnt}
            spare = free - len(held)
            before = cache.given_up
            used.append(cache.take(number))
            assert (cache.given_up > before) is (number > spare)
        elif what < 0.6 and used:
            cache.pool.free_blocks(used.pop(rng.randrange(len(used))))
        elif what < 0.75:
            found = [block for block in cache.pool.blocks[1:] if block.block_hash is not None]
            cache.hold(rng.sample(found, min(len(found), rng.randint(1, 4))))
        elif what < 0.85 and cache.holds:
            cache.release(rng.choice(cache.holds))
        elif cached := [block for block in cache.pool.blocks[1:] if block.block_hash is not None and not block.ref_cnt]:
            hit = rng.sample(cached, min(len(cached), 2))
            cache.pool.touch(hit)
            used.append(hit)
        busy = {block.block_id for blocks in used for block in blocks}
        assert cache.pool.get_num_free_blocks() == BLOCKS - len(busy)
    for blocks in used:
        cache.pool.free_blocks(blocks)
    assert len({block.block_id for block in cache.take(BLOCKS)}) == BLOCKS
