"""The bench's nodes (`deploy.bench.node`) that also publish KV events, as nodes under load do.

``python -m deploy.bench.event_node PORT STEP_MS COUNT BATCHES``: as many nodes, each with a publisher of its own that
sends so many batches a second, whatever the node is asked, from SIGUSR1 to SIGUSR2 none. A batch is what vLLM publishes
for a prompt of 2,048 tokens that a hybrid model computes: the blocks of an attention group and of three state groups.
A node's cache holds `HELD` prompts: for each further one the blocks of the oldest are told to be removed.
"""

import asyncio
import functools
import json
import random
import signal
import sys
from collections import deque
from typing import Any

import uvloop

from deploy.bench.hybrid_cache import CacheShape, Kind, Removed, Stored
from deploy.bench.kv_events import ROOT, Publisher, on_the_wire
from deploy.bench.node import BACKLOG, INFO, Book, Connection, Pacer, Played, addresses, at_once

PROMPT = 2048
HELD = 80
"""Prompts in a node's cache."""
REPLAYED = 20
"""Batches that a publisher keeps for replays: each has 13 KB."""


class EventBook(Book):
    """The answers of a node that says how it hashes prompts, and where it publishes events."""

    def __init__(self, publisher: Publisher, shape: CacheShape) -> None:
        super().__init__()
        hashing = f'algorithm="sha256_cbor",unit="{shape.step}",block_size="{shape.block_size}",drops_unit="false"'
        hashes = f'pdproxy_connector_hashing{{{hashing},root="{ROOT.hex()}"}} 1.0\n'
        self._about = {
            "/kv_event_sources": json.dumps({"0": publisher.source()}).encode(),
            "/metrics": INFO + hashes.encode(),
            "/tokenize": json.dumps({"count": PROMPT, "max_model_len": 2 * PROMPT, "tokens": [1] * PROMPT}).encode(),
        }

    def answer_to(self, path: str, raw: bytes) -> Played:
        told = self._about.get(path)
        return super().answer_to(path, raw) if told is None else at_once(200, told)


class FullCache:
    """Events of a cache that is full of other prompts: each batch stores one prompt's blocks and evicts another's."""

    def __init__(self, seed: int, shape: CacheShape) -> None:
        self._dice, self._shape = random.Random(seed), shape
        self._ids = [self._dice.randrange(150_000) for _ in range(PROMPT)]
        self._held: deque[tuple[Stored, ...]] = deque()

    def batch(self) -> list[dict[str, Any]]:
        """The events of the next prompt."""
        block = self._shape.block_size
        hashes = tuple(self._dice.getrandbits(64) for _ in range(PROMPT // block))
        state = Stored(Kind.STATE, hashes[-1:], hashes[-2], PROMPT - block, PROMPT)
        self._held.append((Stored(Kind.ATTENTION, hashes, None, 0, PROMPT), state))
        evicted = self._held.popleft() if len(self._held) > HELD else ()
        removed = [Removed(each.kind, name) for each in evicted for name in each.hashes]
        return on_the_wire([*self._held[-1], *removed], self._ids, self._shape)


async def publish(publisher: Publisher, cache: FullCache, seconds: float, going: asyncio.Event) -> None:
    """A batch each so many seconds while ``going`` is set, until it is cancelled."""
    while True:
        await asyncio.sleep(seconds)
        await going.wait()
        await publisher.publish(cache.batch())


async def serve(port: int, step: float, count: int, batches: float) -> None:
    """Until the process ends."""
    loop, pacer, shape, going = asyncio.get_running_loop(), Pacer(step), CacheShape(), asyncio.Event()
    going.set()
    loop.add_signal_handler(signal.SIGUSR1, going.clear)
    loop.add_signal_handler(signal.SIGUSR2, going.set)
    async with asyncio.TaskGroup() as tasks:
        for seed, address in enumerate(addresses(count)):
            publisher = Publisher(REPLAYED, f"tcp://{address}")
            accept = functools.partial(Connection, EventBook(publisher, shape), pacer)
            await loop.create_server(accept, address, port, backlog=BACKLOG)
            tasks.create_task(publish(publisher, FullCache(port + seed, shape), 1 / batches, going))


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), float(sys.argv[2]) / 1000, int(sys.argv[3]), float(sys.argv[4])))
