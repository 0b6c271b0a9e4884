"""The subscription against vLLM's own publisher, with its own events."""

import dataclasses
import json

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVEventBatch,
    ZmqEventPublisher,
)

from pdproxy.events.sources import read_sources
from pdproxy.observe.labels import Known
from tests.events.feeds import PLACE, Caches, subscribed
from tests.events.publisher import until
from tests.events.test_subscription import PATIENT


def stored(*hashes: int) -> BlockStored:
    return BlockStored(
        block_hashes=list(hashes),
        parent_block_hash=None,
        token_ids=[1] * 16 * len(hashes),
        block_size=16,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        group_idx=0,
        kv_cache_spec_kind="full_attention",
        session_id="s",
    )


def batch(time: float, *events: BlockStored | BlockRemoved | AllBlocksCleared) -> EventBatch:
    return KVEventBatch(ts=time, events=list(events))


async def test_what_vllm_publishes_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """Port 0, which takes a port of the system's, and one publisher with another rank and a topic."""
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    publisher = ZmqEventPublisher(3, "tcp://*:0", "tcp://*:0", topic="kv")
    try:
        told = json.dumps({"3": dataclasses.asdict(publisher.get_publisher_config())}).encode()
        [source] = read_sources(told, "http://127.0.0.1:8000").usable
        assert (source.rank, source.publisher, source.topic) == (0, 3, b"kv")
        publisher.publish(batch(1.0, stored(1, 2)))
        caches = Caches()
        await until(lambda: not publisher._event_queue.unfinished_tasks)
        async with subscribed(caches, source, PATIENT):
            assert (caches.blocks(), caches.of_node(PLACE.node)[0].known) == (2, Known.ALL)
            publisher.publish(batch(2.0, BlockRemoved(block_hashes=[2], medium="GPU", group_idx=0), stored(3, 4)))
            await until(lambda: caches.blocks() == 3)
            publisher.publish(batch(3.0, AllBlocksCleared()))
            publisher.publish(batch(4.0, stored(9)))
            await until(lambda: caches.blocks() == 1)
        assert caches.count("kv_event_batches_total", outcome="applied") == 4
        assert caches.count("kv_events_total", kind="ignored") == 0
    finally:
        publisher.shutdown()
