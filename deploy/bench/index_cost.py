"""The cost of the prefix index at a million blocks on 100 places: ``python -m deploy.bench.index_cost``.

CPU time, the best of several runs. Blocks have 64 tokens, and hashes are as fine, but where a unit is named. The places
are nodes of a hybrid model: one attention group, three state groups with one state for 25 blocks.
"""

import functools
import gc
import hashlib
import itertools
import random
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterable

from pdproxy.planning.block_hashes import HashAlgorithm, HashScheme, PromptHasher, root_hash
from pdproxy.planning.cache_events import BlocksRemoved, BlocksStored, CacheEvent, GroupKind
from pdproxy.planning.prefix import Place
from pdproxy.planning.prefix_index import PrefixIndex
from pdproxy.planning.renderings import Rendering, Renderings
from pdproxy.planning.text_chain import CHUNK, chain_of_completion, chain_of_text
from pdproxy.planning.text_index import MOST_MARKS, TextIndex

PLACES, BLOCKS, BLOCK = 100, 10_000, 64
"""Places, attention blocks of each, tokens of a block."""
PROMPT = 10_000
"""Tokens of a prompt that is looked up: 156 blocks."""
SYSTEM = 32
"""Blocks of the system prompt that all places have: 2,048 tokens."""
CHAIN = 128
"""Blocks of one conversation."""
STATES = 25
"""Blocks for each state."""
RUNS = 20


def scheme(
    block_size: int = BLOCK, unit: int = BLOCK, algorithm: HashAlgorithm = HashAlgorithm.SHA256_CBOR
) -> HashScheme:
    return HashScheme(algorithm, unit, block_size, root_hash(algorithm))


def filled(index: PrefixIndex, rng: random.Random, *, shared: tuple[int, ...] = ()) -> None:
    """Fill the places, each with blocks of its own but for the shared ones."""
    for number in range(PLACES):
        place = Place(f"node-{number}")
        index.apply(place, BlocksStored(3, GroupKind.ATTENTION, shared, BLOCK))
        for _ in range((BLOCKS - len(shared)) // CHAIN):
            chain = tuple(rng.getrandbits(64) for _ in range(CHAIN))
            index.apply(place, BlocksStored(3, GroupKind.ATTENTION, chain, BLOCK))
            for group in range(3):
                index.apply(place, BlocksStored(group, GroupKind.STATE, chain[STATES - 1 :: STATES], BLOCK))


def best(step: Callable[[], object], runs: int = RUNS) -> float:
    """CPU time of a step in microseconds."""
    shortest = float("inf")
    for _ in range(runs):
        began = time.process_time_ns()
        step()
        shortest = min(shortest, time.process_time_ns() - began)
    return shortest / 1e3


def report_hashing(rng: random.Random) -> None:
    ids = [rng.randrange(150_000) for _ in range(PROMPT)]
    for algorithm, unit in itertools.product(HashAlgorithm, (16, BLOCK, 256)):
        cost = best(functools.partial(PromptHasher(scheme(256, unit, algorithm)).hashes, ids))
        print(f"{algorithm}, {PROMPT} tokens, {unit} a hash: {cost / 1e3:.2f} ms")
    print(f"the same by cbor2, {BLOCK} a hash: {best(lambda: by_cbor2(ids)) / 1e3:.2f} ms")


def by_cbor2(ids: list[int]) -> bytes:
    """The prompt's last hash, as vLLM computes it."""
    import cbor2  # comes with vLLM

    digest = bytes(32)
    for start in range(0, len(ids) - BLOCK + 1, BLOCK):
        block = (digest, tuple(ids[start : start + BLOCK]), None)
        digest = hashlib.sha256(cbor2.dumps(block, canonical=True)).digest()
    return digest


def report_memory(rng: random.Random) -> PrefixIndex:
    gc.collect()
    tracemalloc.start()
    index = PrefixIndex(scheme())
    filled(index, rng)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(f"{len(index)} blocks on {PLACES} places: {size / 1e6:.0f} MB, {size / len(index):.0f} bytes a block")
    return index


def take_in(index: PrefixIndex, place: Place, events: Iterable[CacheEvent]) -> None:
    for event in events:
        index.apply(place, event)


def report_events(index: PrefixIndex, rng: random.Random) -> None:
    place = Place("node-1")
    hashes = tuple(rng.getrandbits(64) for _ in range(1000))
    store = BlocksStored(3, GroupKind.ATTENTION, hashes, BLOCK)
    single = [BlocksRemoved(3, (each,)) for each in hashes]
    stores, removes = [], []
    for _ in range(RUNS):
        stores.append(best(lambda: index.apply(place, store), runs=1))
        removes.append(best(lambda: take_in(index, place, single), runs=1))
    print(f"events: {min(stores) / 1e3:.2f} us a stored hash, {min(removes) / 1e3:.2f} us an event that removes one")
    index.apply(place, BlocksStored(3, GroupKind.ATTENTION, tuple(rng.getrandbits(64) for _ in range(BLOCKS)), BLOCK))
    print(f"forget a place of {2 * BLOCKS} blocks: {best(lambda: index.drop_place(place), runs=1) / 1e3:.1f} ms")


def report_look_ups(index: PrefixIndex, rng: random.Random, title: str) -> None:
    """Prompts of 10,000 tokens: of which places have nothing, the system prompt, all, and one place the rest."""
    unit, scale = index.scheme.unit, index.scheme.block_size // index.scheme.unit
    hashes = tuple(rng.getrandbits(64) for _ in range(PROMPT // unit))
    whole = hashes[scale - 1 :: scale]
    places = [Place(f"node-{number}") for number in range(PLACES)]

    def report(what: str) -> None:
        print(f"{title}, {what}: {best(lambda: index.hits(hashes, PROMPT, 0.0)):.1f} us")

    report("nobody has any of it")
    shared = whole[: SYSTEM * BLOCK // index.scheme.block_size]
    for place in places:
        index.apply(place, BlocksStored(3, GroupKind.ATTENTION, shared, BLOCK))
        for group in range(3):
            index.apply(place, BlocksStored(group, GroupKind.STATE, shared[-1:], BLOCK))
    report("all have the system prompt")
    for place in places[:2]:
        index.apply(place, BlocksStored(3, GroupKind.ATTENTION, whole, BLOCK))
        for group in range(3):
            index.apply(place, BlocksStored(group, GroupKind.STATE, (hashes[-2],), BLOCK))
    report("all have the system prompt, two the conversation")
    for place in places:
        index.apply(place, BlocksStored(3, GroupKind.ATTENTION, whole, BLOCK))
    report("all have all")


def report_texts(rng: random.Random) -> None:
    """Conversations of ten turns, of which the last prompt has 10,000 tokens of four bytes."""
    uniform = scheme(256, 16)
    parts = [rng.randbytes(4 * PROMPT // 10) for _ in range(10)]
    hashes = array("Q", (rng.getrandbits(64) for _ in range(PROMPT // 16)))
    index = TextIndex()
    for turn in range(1, 10):
        tokens = turn * PROMPT // 10
        chain = chain_of_text("m", "", parts[:turn])
        index.tokenized(chain, Rendering(tokens, chain.ends[-1], {uniform: hashes[: tokens // 16]}))
    chain = chain_of_text("m", "", parts)
    cut, known = best(lambda: chain_of_text("m", "", parts)), best(lambda: index.known_prefix(chain))
    whole = Rendering(PROMPT, chain.ends[-1], {uniform: hashes})
    kept = best(lambda: index.tokenized(chain, whole), runs=1)
    print(f"by its text, {PROMPT} tokens: {cut:.1f} us to cut it, {known:.1f} us to find, {kept:.1f} us to remember")


def report_memory_of_texts(rng: random.Random) -> None:
    """Print the memory of texts that share nothing, 10,000 tokens each, until the oldest are forgotten."""
    gc.collect()
    tracemalloc.start()
    uniform, renderings = scheme(256, 16), Renderings()
    index = TextIndex(renderings=renderings)
    for _ in range(MOST_MARKS * CHUNK // (4 * PROMPT) * 2):
        chain = chain_of_completion("m", "", rng.randbytes(4 * PROMPT))
        hashes = array("Q", (rng.getrandbits(64) for _ in range(PROMPT // 16)))
        index.tokenized(chain, Rendering(PROMPT, chain.ends[-1], {uniform: hashes}))
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(f"{len(index)} marks of texts, {len(renderings)} prompts of {PROMPT} tokens, 16 a hash: {size / 1e6:.0f} MB")


def main() -> None:
    rng = random.Random(1)
    report_texts(rng)
    report_memory_of_texts(rng)
    report_hashing(rng)
    index = report_memory(rng)
    report_events(index, rng)
    report_look_ups(index, rng, "64 tokens a block")
    for block_size, unit in ((256, 256), (1024, 1024), (256, 16)):
        index = PrefixIndex(scheme(block_size, unit))
        filled(index, rng)
        report_look_ups(index, rng, f"{block_size} tokens a block, unit {unit}")


if __name__ == "__main__":
    main()
