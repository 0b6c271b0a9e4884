"""Events of a simulated node, in the wire form of vLLM 0.32: block hashes by sha256_cbor, events over ZMQ.

A batch is sent as three frames (topic, sequence number, msgpack of ``[seconds, events, rank]``); a second socket sends
past batches again to whoever names the first number it wants.
"""

import asyncio
import hashlib
import itertools
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import cbor2
import msgspec
import zmq
import zmq.asyncio

from deploy.bench.hybrid_cache import CacheEvent, CacheShape, HashedPrompt, Kind, Removed, Stored

HOST = "tcp://127.0.0.1"
ROOT = hashlib.sha256(cbor2.dumps("vllm-none-hash", canonical=True)).digest()
"""Stands before a prompt's first block: vLLM's NONE_HASH with its default seed."""
KEPT = 10_000
_LOW = (1 << 64) - 1
_NO_NUMBER = (-1).to_bytes(8, "big", signed=True)


def hash_ids(ids: Sequence[int], step: int) -> HashedPrompt:
    """A prompt's hashes as vLLM's events tell them: the low 64 bits of each."""
    parent, found = ROOT, list[int]()
    for begin in range(0, len(ids) - step + 1, step):
        parent = hashlib.sha256(cbor2.dumps((parent, tuple(ids[begin : begin + step]), None), canonical=True)).digest()
        found.append(int.from_bytes(parent, "big") & _LOW)
    return HashedPrompt(len(ids), found)


def on_the_wire(events: Iterable[CacheEvent], ids: Sequence[int], shape: CacheShape) -> list[dict[str, Any]]:
    """vLLM's events; those of a state once for each state group. The attention group is the last one."""
    sent = list[dict[str, Any]]()
    for event in events:
        groups = range(shape.state_groups) if event.kind is Kind.STATE else (shape.state_groups,)
        sent += [_stored(event, ids, shape, group) if isinstance(event, Stored) else _removed(event, group)
                 for group in groups]  # fmt: skip
    return sent


def _stored(event: Stored, ids: Sequence[int], shape: CacheShape, group: int) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": list(event.hashes),
        "parent_block_hash": event.parent,
        "token_ids": list(ids[event.begins : event.ends]),
        "block_size": (event.ends - event.begins) if event.ends % shape.block_size else shape.block_size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(event.hashes),
        "group_idx": group,
        "kv_cache_spec_kind": event.kind.value,
    }


def _removed(event: Removed, group: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [event.hash], "medium": "GPU", "group_idx": group}


class Publisher:
    """One rank's publisher. Must be made within an event loop; `close` it.

    Args:
        most_kept: batches for replays.
        host: of both sockets; a proxy looks for them at the address of their node.
    """

    def __init__(self, most_kept: int = KEPT, host: str = HOST) -> None:
        self._context = zmq.asyncio.Context()
        self._events, self._replay = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        self._endpoints = [f"{host}:{socket.bind_to_random_port(host)}" for socket in (self._events, self._replay)]
        self._numbers = itertools.count()
        self._past: deque[tuple[bytes, bytes]] = deque(maxlen=most_kept)
        self._replaying = asyncio.get_running_loop().create_task(self._serve_replays())

    def source(self) -> dict[str, Any]:
        """The answer of ``GET /kv_event_sources``."""
        endpoint, replay = self._endpoints
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": endpoint,
            "replay_endpoint": replay,
            "buffer_steps": self._past.maxlen,
            "hwm": 100_000,
            "max_queue_size": 100_000,
            "topic": "",
        }

    async def publish(self, events: Sequence[dict[str, Any]]) -> None:
        """Send a batch; nothing where there are no events."""
        if not events:
            return
        number = next(self._numbers).to_bytes(8, "big")
        batch = msgspec.msgpack.encode([time.time(), list(events), 0])
        self._past.append((number, batch))
        await self._events.send_multipart((b"", number, batch))

    async def close(self) -> None:
        """Take the sockets down."""
        self._replaying.cancel()
        await asyncio.gather(self._replaying, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _serve_replays(self) -> None:
        while True:
            client, _, first = await self._replay.recv_multipart()
            for number, batch in list(self._past):
                if number >= first:
                    await self._replay.send_multipart((client, b"", b"", number, batch))
            await self._replay.send_multipart((client, b"", b"", _NO_NUMBER, b""))
