"""The cost to the proxy of reading a node's KV events: ``python -m deploy.bench.events_cost``.

Batches as a prefill node of a hybrid model publishes them: for a step of so many tokens the blocks of one attention
group and of three state groups, token ids and all; and evictions, which come one by one.
"""

import random
import time

import msgspec

from pdproxy.events.wire import BatchDecoder
from pdproxy.planning.block_hashes import HashAlgorithm, HashScheme, root_hash
from pdproxy.planning.cache_events import CacheCleared
from pdproxy.planning.prefix import Place
from pdproxy.planning.prefix_index import PrefixIndex
from tests.events.publisher import Event, removed, stored

BLOCK = 256
STATES = 3
BATCHES = 200
EVICTIONS = 1000
PLACE = Place("node")
SEED = 1


def step(source: random.Random, tokens: int) -> list[Event]:
    """The events of a step that computes so many tokens."""
    ids = [source.randrange(150_000) for _ in range(tokens)]
    hashes = [source.getrandbits(64) for _ in range(tokens // BLOCK)]
    states = [stored(hashes[-1], group=group, kind="mamba", size=BLOCK) for group in range(STATES)]
    return [{**event, "token_ids": ids} for event in (*states, stored(*hashes, group=STATES, size=BLOCK))]


def seconds(payloads: list[bytes]) -> float:
    """CPU seconds to decode and apply one of them."""
    scheme = HashScheme(HashAlgorithm.SHA256_CBOR, BLOCK, BLOCK, root_hash(HashAlgorithm.SHA256_CBOR))
    decode, index = BatchDecoder(), PrefixIndex(scheme)
    index.apply(PLACE, CacheCleared())
    began = time.process_time()
    for payload in payloads:
        for event in decode(payload).events:
            index.apply(PLACE, event)
    return (time.process_time() - began) / len(payloads)


def main() -> None:
    """Print a line for each kind of batch."""
    source = random.Random(SEED)
    for tokens in (2048, 8192):
        payloads = [msgspec.msgpack.encode([1.0, step(source, tokens), 0]) for _ in range(BATCHES)]
        took = seconds(payloads)
        print(f"a step of {tokens} tokens, {len(payloads[0]):,} bytes: {1e3 * took:.2f} ms")
    evictions = [removed(source.getrandbits(64), group=STATES) for _ in range(EVICTIONS)]
    print(f"an eviction: {1e6 * seconds([msgspec.msgpack.encode([1.0, evictions, 0])]) / EVICTIONS:.1f} us")


if __name__ == "__main__":
    main()
