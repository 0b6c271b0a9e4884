"""A node whose real vLLM scheduler publishes its KV events into a prefix index, and answers random conversations."""

import dataclasses
import itertools
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.request import Request, RequestStatus

from pdproxy.planning.block_hashes import DEFAULT_SEED, HashAlgorithm, HashScheme, event_hashes, root_hash
from pdproxy.planning.cache_events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent, group_kind
from pdproxy.planning.prefix import Hit, Place
from pdproxy.planning.prefix_index import PrefixIndex
from tests.connector.harness import BLOCK, DENSE, HYBRID, attention, make_node, received, state

ROOT = root_hash(HashAlgorithm.SHA256, os.environ.get("PYTHONHASHSEED", DEFAULT_SEED))
Prompt = tuple[str | None, list[int]]
"""A cache salt, and token ids."""


def read_event(event: Any) -> CacheEvent:
    """As the proxy reads it."""
    match event:
        case BlockStored():
            hashes = event_hashes(event.block_hashes)
            return BlocksStored(event.group_idx or 0, group_kind(event.kv_cache_spec_kind), hashes, event.block_size)
        case BlockRemoved():
            return BlocksRemoved(event.group_idx, event_hashes(event.block_hashes))
        case AllBlocksCleared():
            return CacheCleared()
    raise AssertionError(event)


class Subscriber:
    """Stands where an engine publishes its events, and gives them to an index.

    Attributes:
        copies: of each block in each group, by the events so far; never less than none.
    """

    def __init__(self, index: PrefixIndex, place: Place) -> None:
        self.index, self.place = index, place
        self.seen = Counter[str]()
        self.copies = Counter[tuple[int | None, int]]()
        index.apply(place, CacheCleared())

    def publish(self, batch: KVEventBatch) -> None:
        for event in batch.events:
            self.seen[type(event).__name__] += 1
            self._count(read_event(event))
            self.index.apply(self.place, read_event(event))

    def _count(self, event: CacheEvent) -> None:
        match event:
            case BlocksStored():
                self.copies.update((event.group, each) for each in event.hashes)
            case BlocksRemoved():
                self.copies.subtract((event.group, each) for each in event.hashes)
                assert min(self.copies.values(), default=0) >= 0, "the engine removes a block that it has not stored"
            case CacheCleared():
                self.copies.clear()


@dataclasses.dataclass(frozen=True)
class Model:
    """Cache groups, and how the node is set."""

    groups: Sequence[KVCacheSpec]
    unit: int = BLOCK
    retention: int | None = 0
    eagle: bool = False

    @property
    def scheme(self) -> HashScheme:
        return HashScheme(HashAlgorithm.SHA256, self.unit, BLOCK, ROOT, self.eagle, len(self.groups) > 1)


class Engine:
    """A node with a small cache that answers conversations, several at once, and publishes its events to an index."""

    def __init__(self, model: Model, index: PrefixIndex, seed: int, role: str = "kv_producer") -> None:
        unit = model.unit if model.unit != BLOCK else None
        self.node = make_node(role, model.groups, unit=unit, num_blocks=70, engine_id=f"{role}-{seed}")
        self.manager = self.node.scheduler.kv_cache_manager
        self.manager.block_pool.enable_kv_cache_events = True
        self.manager.coordinator.retention_interval = model.retention if len(model.groups) > 1 else None
        if model.eagle:
            use_eagle(self.node.scheduler)
        self.place = Place(f"node-{seed}", seed)
        self.events = self.node.scheduler.kv_event_publisher = Subscriber(index, self.place)
        self._random = random.Random(seed)
        self._systems = [self.text(length) for length in (0, 37, 64, 90)]
        self._said: list[Prompt] = [(None, [1, 2, 3])]
        self._names = itertools.count()

    def run(self, prompt: list[int]) -> None:
        """Compute a prompt."""
        name = str(next(self._names))
        self.node.add(name, prompt, max_tokens=1)
        self.node.run_out(name)

    def live(self) -> None:
        """A request comes in; some steps; now and then a client leaves, or blocks leave the cache out of turn."""
        salt, prompt = self.next_prompt()
        answer = self._random.randrange(1, 30)
        self.node.add(str(next(self._names)), prompt, max_tokens=answer, cache_salt=salt)
        self._said.append((salt, [*prompt, *[7] * answer]))
        for _ in range(self._random.randrange(1, 12)):
            self.node.step()
        running, pool, chance = list(self.node.scheduler.requests), self.manager.block_pool, self._random.random()
        if running and chance < 0.1:
            self.node.abort(self._random.choice(running))
        elif chance < 0.3:
            cached = [block.block_id for block in pool.blocks if block.block_hash]
            self.manager.evict_blocks(set(self._random.sample(cached, min(4, len(cached)))))
        elif chance < 0.35:
            for name in running:
                self.node.abort(name)
            self.manager.reset_prefix_cache()
        self.node.step()

    def pull(self, prompt: list[int], ticket: dict[str, Any]) -> None:
        """Answer a prompt with what another node computed of it."""
        name = str(next(self._names))
        request = self.node.add(name, prompt, ticket)
        for _ in range(2):  # the first step may only take a block out of the prefix cache
            self.node.step()
            if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                self.node.step(received(self.node, name))
                break
        while name in self.node.scheduler.requests:
            self.node.step()
        self._said.append((None, [*prompt, *request.output_token_ids]))

    def next_prompt(self) -> Prompt:
        """A prompt of a new conversation, or the next turn of an old one."""
        salt, so_far = self._random.choice(self._said[-6:])
        if self._random.random() < 0.4:
            salt, so_far = self._random.choice((None, None, None, "a", "b")), self._random.choice(self._systems)
        return salt, [*so_far, *self.text(self._random.randrange(1, 60))][:400]

    def text(self, length: int) -> list[int]:
        """Tokens that no prompt had before."""
        return [self._random.randrange(10, 900) for _ in range(length)]

    def prompts(self) -> Iterator[Prompt]:
        """Prompts as they may come next: longer, shorter, ending at a block's end, or never seen."""
        for salt, tokens in self._random.sample(self._said, min(3, len(self._said))):
            cut = self._random.randrange(1, len(tokens) + 1)
            yield salt, [*tokens, *self.text(20)]
            yield salt, tokens[:cut]
            yield salt, tokens[: max(1, cut // BLOCK * BLOCK)]
            yield salt, [*tokens[: cut // BLOCK * BLOCK], 5]
        yield "other", tokens

    def finds(self, salt: str | None, prompt: list[int]) -> Hit:
        """Tokens that vLLM counts as its own: for a request with a ticket, and for one without."""
        request = self._request(salt, prompt)
        return Hit(
            attention=self.manager.get_computed_blocks_for_connector(request)[1],
            resume=self.manager.get_computed_blocks(request)[1],
        )

    def attention(self, salt: str | None, prompt: list[int]) -> int:
        """The same of attention alone, wherever there are states; for hybrid models."""
        coordinator, request = self.manager.coordinator, self._request(salt, prompt)
        _, hits = coordinator.find_longest_cache_hit_per_group(request.block_hashes, len(prompt) - 1)
        return int(hits[coordinator.full_attention_group_id])

    def _request(self, salt: str | None, prompt: list[int]) -> Request:
        sampling = SamplingParams(max_tokens=1)
        return Request("look", prompt, sampling, None, cache_salt=salt, block_hasher=self.node.hasher)


def use_eagle(scheduler: Any) -> None:
    """Have a scheduler draft with EAGLE or MTP as vLLM has, where no cache group is marked as the draft's."""
    coordinator = scheduler.kv_cache_manager.coordinator
    managers = coordinator.single_type_managers
    coordinator.eagle_group_ids = set(range(len(managers)))
    for manager in managers:
        if isinstance(manager, MambaManager):
            manager.drop_eagle_checkpoint_block = True
    if len(managers) > 1:
        coordinator.verify_and_split_kv_cache_groups()
    else:
        managers[0].use_eagle = True
    scheduler.use_eagle_block_drop = True


MANY = (state("align"), state("align"), attention(), attention())
MODELS = {
    "attention": Model(DENSE),
    "attention, EAGLE": Model(DENSE, eagle=True),
    "hybrid": Model(HYBRID),
    "hybrid, many groups": Model(MANY),
    "hybrid, states at every block": Model(HYBRID, retention=None),
    "hybrid, states at every other block": Model(HYBRID, retention=2 * BLOCK),
    "hybrid, EAGLE": Model(HYBRID, eagle=True),
    "hybrid, unit": Model(HYBRID, unit=4),
    "hybrid, unit, many groups": Model(MANY, unit=4, retention=None),
    "hybrid, unit, EAGLE": Model(HYBRID, unit=4, eagle=True),
}
