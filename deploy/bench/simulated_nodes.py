"""Simulated vLLM nodes: what they do, without HTTP; `simulated_http` serves them.

They answer as vLLM does, take the time that `Fleet` says, and publish KV events and metrics. A prefill node computes
one prompt after the other, in the order of arrival; a decode node reads tickets while it streams.
"""

import asyncio
import dataclasses
import functools
import itertools
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from deploy.bench.hybrid_cache import CacheShape, HashedPrompt
from deploy.bench.kv_events import ROOT, Publisher, hash_ids, on_the_wire
from deploy.bench.node import ROOM_FOR_ALL
from deploy.bench.node_keeps import NodeKeeps
from deploy.bench.simulate import MODEL, Fleet
from pdproxy.nodes.node import PREFILL
from tests.fakes.vllm_answers import ParsedRequest, answer, events

BURST = 10
"""Tokens in an event of a stream: one for each token would cost the two cores more than all else."""


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """The simulation: the nodes, where they listen (prefill nodes first), and how many times faster than life."""

    fleet: Fleet
    ports: tuple[int, ...]
    faster: float = 1.0

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Site":
        """Raises ValueError or TypeError where it is none."""
        read = json.loads(text)
        shape = CacheShape(**read["fleet"].pop("shape"))
        return cls(Fleet(shape=shape, **read["fleet"]), tuple(read["ports"]), read["faster"])

    def urls(self) -> Mapping[str, str]:
        """The nodes' addresses, by name."""
        names = self.fleet.roles()
        return {name: f"http://127.0.0.1:{port}" for name, port in zip(names, self.ports, strict=True)}


def text_of(ids: list[int]) -> str:
    """A prompt that these nodes tokenize to the ids."""
    return " ".join(f"w{each}" for each in ids)


def ids_of(prompt: object) -> list[int]:
    """The ids of a prompt: of text as `text_of` writes it, or what is given as ids."""
    if isinstance(prompt, list) and all(isinstance(each, int) for each in prompt):
        return prompt
    return list(_read(str(prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt)))


@functools.lru_cache(maxsize=64)
def _read(text: str) -> tuple[int, ...]:
    """Kept for a while: each prompt comes to be tokenized, to a prefill node and to a decode node."""
    words = text.split()
    ids = (int(word[1:]) if word[0] == "w" and word[1:].isdigit() else 1 + len(word) % 97 for word in words)
    return tuple(ids) or (1,)


@functools.lru_cache(maxsize=64)
def _hashed(ids: tuple[int, ...], step: int) -> HashedPrompt:
    return hash_ids(ids, step)


@dataclasses.dataclass
class Count:
    """Prompts that a node has computed or pulled since the count began, in tokens.

    Attributes:
        waits: times that it waited for simulated work to end; ``late``: seconds that it woke too late, all together.
            Many, and the machine is too busy for its times to mean anything.
    """

    prompts: int = 0
    computed: int = 0
    resumed: int = 0
    moved: int = 0
    waits: int = 0
    late: float = 0.0


class SimulatedServer:
    """One node: what it does, without HTTP.

    Args:
        tickets: of all nodes: the prompt that each covers.
    """

    def __init__(self, name: str, site: Site, tickets: dict[str, int]) -> None:
        self.name, self.count = name, Count()
        self.keeps = NodeKeeps(site.fleet.shape, site.fleet.keep_share, time.monotonic)
        self.cache, self.publisher = self.keeps.cache, Publisher()
        self.running = self.waiting = 0
        self.queried = self.hit = 0
        self._fleet, self._faster, self._tickets = site.fleet, site.faster, tickets
        self._engine = asyncio.Lock()
        self._numbers = itertools.count()
        self._stalled = 0.0

    async def answer(self, question: ParsedRequest, params: Mapping[str, Any]) -> AsyncIterator[bytes]:
        """The pieces of an answer in their time; of one that is not streamed there is one."""
        prompt = _hashed(tuple(question.prompt), self._fleet.shape.step)
        if params.get("do_remote_prefill") and self._tickets.pop(str(params["remote_request_id"]), 0) == prompt.tokens:
            cached, kept = await self._pull(prompt, question.prompt), dict[str, Any]()
        else:
            cached, kept = await self._compute(prompt, question.prompt, params)
        told: dict[str, Any] = {"pdproxy_kept": kept} if kept else {}
        if params.get("do_remote_decode"):
            yield answer(question, cached, {**self._ticket(prompt, cached), **told})
            return
        pieces = events(question, cached) if question.stream else (answer(question, cached, told or None),)
        self.running += 1
        try:
            async for piece in self._paced(pieces, question):
                yield piece
        finally:
            self.running -= 1

    async def _compute(
        self, prompt: HashedPrompt, ids: list[int], params: Mapping[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        """In turn with other prompts; the tokens that were cached, and what is told of a keep."""
        prompt = dataclasses.replace(prompt)  # equal ones wait each for itself
        self.keeps.forget(params.get("pdproxy_forget", ()))
        self.keeps.wait(prompt)
        self.waiting += 1
        try:
            await self._engine.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            computed, kept = self.keeps.compute(prompt, params.get("pdproxy_keep"))
            seconds = self._fleet.overhead + computed / self._fleet.prefill_rate
            self._stalled += seconds
            await self._sleep(seconds)
            await self._publish(ids)
        finally:
            self.running -= 1
            self._engine.release()
        self.queried, self.hit = self.queried + prompt.tokens, self.hit + prompt.tokens - computed
        self.count.prompts += 1
        self.count.computed += computed
        self.count.resumed += prompt.tokens - computed
        return prompt.tokens - computed, kept

    async def _pull(self, prompt: HashedPrompt, ids: list[int]) -> int:
        pulled = self.cache.pull(prompt)
        self.count.moved += pulled.moved
        self.count.computed += pulled.computed
        rest = pulled.computed / self._fleet.prefill_rate
        await self._sleep(self._fleet.hand_over + pulled.moved / self._fleet.transfer_rate + rest)
        await self._publish(ids)
        return prompt.tokens - 1

    async def _publish(self, ids: list[int]) -> None:
        await self.publisher.publish(on_the_wire(self.cache.take_events(), ids, self._fleet.shape))

    def _ticket(self, prompt: HashedPrompt, cached: int) -> dict[str, Any]:
        name = f"cmpl-{self.name}-{next(self._numbers)}"
        self._tickets[name] = prompt.tokens
        groups = self._fleet.shape.state_groups
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[11 + group] for group in range(groups)] + [[20]],
            "remote_engine_id": self.name,
            "remote_request_id": name,
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "remote_num_tokens": prompt.tokens,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": cached,
        }

    async def _paced(self, pieces: Any, question: ParsedRequest) -> AsyncIterator[bytes]:
        """A first piece after a step, the others so that all tokens are there in their time."""
        stalled = self._stalled
        step = self._fleet.step * (question.count if not question.stream else 1)
        for number, piece in enumerate(pieces):
            await self._sleep(step + self._stalled - stalled)
            stalled = self._stalled
            step = self._fleet.step * BURST if number + 1 < question.count / BURST else 0.0
            yield piece

    async def _sleep(self, seconds: float) -> None:
        due = time.monotonic() + seconds / self._faster
        await asyncio.sleep(seconds / self._faster)
        self.count.waits += 1
        self.count.late += (time.monotonic() - due) * self._faster

    def metrics(self) -> str:
        """The metrics that proxies read, of vLLM and of this project's connector."""
        label = f'{{model_name="{MODEL}",engine="0"}}'
        shape = self._fleet.shape
        hashing = f'algorithm="sha256_cbor",unit="{shape.step}",block_size="{shape.block_size}",drops_unit="false"'
        values = {
            "vllm:num_requests_running": self.running,
            "vllm:num_requests_waiting": self.waiting,
            "vllm:kv_cache_usage_perc": self.cache.used / shape.blocks,
            "vllm:prefix_cache_queries_total": self.queried,
            "vllm:prefix_cache_hits_total": self.hit,
            "vllm:prompt_tokens_total": self.queried,
            "vllm:generation_tokens_total": self.queried,
            "vllm:iteration_tokens_total_count": self.queried,
        }
        lines = [f"{name}{label} {float(value)}" for name, value in values.items()]
        keeps = f',keep_share="{self._fleet.keep_share}"' if self._fleet.keep_share else ""
        lines.append(f'pdproxy_connector_info{{block_size="{shape.block_size}"{keeps}}} 1.0')
        lines.append(f'pdproxy_connector_hashing{{{hashing},root="{ROOT.hex()}"}} 1.0')
        room = _capacity(shape) if self._fleet.roles()[self.name] == PREFILL else _room_for_all(shape)
        return "\n".join((*lines, *room, *_unit(shape), ""))


def _capacity(shape: CacheShape) -> Iterator[str]:
    """The connector's metrics of a prefill node: what its caches hold. Nothing that runs there has to fit."""
    capacity = shape.capacity
    yield f"pdproxy_connector_capacity_tokens {capacity.tokens}.0"
    yield f'pdproxy_connector_capacity_sequences{{limit="max_model_len"}} {capacity.longest}.0'
    yield f'pdproxy_connector_capacity_binding{{group="{capacity.binding}"}} 1.0'
    if capacity.sequences is not None:
        yield f'pdproxy_connector_capacity_sequences{{limit="state"}} {capacity.sequences}.0'


def _room_for_all(shape: CacheShape) -> Iterator[str]:
    """Those of a node that streams: room for all that comes, for these nodes let no request wait for it."""
    yield from ROOM_FOR_ALL.decode().splitlines()
    if shape.state_groups:
        yield 'pdproxy_connector_capacity_sequences{limit="state"} 1000000000.0'


def _unit(shape: CacheShape) -> Iterator[str]:
    """The unit at which hand-overs end."""
    if shape.unit:
        yield f'pdproxy_connector_fingerprint{{part="prefix_match_unit",value="{shape.unit}"}} 1.0'
