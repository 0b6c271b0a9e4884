"""The bench's nodes with KV events publish what a node publishes whose cache is full."""

from deploy.bench.event_node import HELD, PROMPT, FullCache
from deploy.bench.hybrid_cache import CacheShape

SHAPE = CacheShape()
BLOCKS = PROMPT // SHAPE.block_size


def test_a_full_cache_evicts_as_many_blocks_as_it_stores() -> None:
    cache = FullCache(1, SHAPE)
    first, *others = [cache.batch() for _ in range(HELD)]
    assert all(event["type"] == "BlockStored" for batch in (first, *others) for event in batch)
    assert [len(event["block_hashes"]) for event in first] == [BLOCKS, *[1] * SHAPE.state_groups]
    removed = [event for event in cache.batch() if event["type"] == "BlockRemoved"]
    assert {(each["group_idx"], *each["block_hashes"]) for each in removed} == {
        (event["group_idx"], name) for event in first for name in event["block_hashes"]
    }
