"""Choosing a child: what must hold of the children before an engine may start, and asking them for a request's prefix.
In the scheduler's process.

The children see two kinds of local hits. A child that brings the state too (it has a ticket) is given the hit of
attention alone; every other child is given the *shared* hit, where all groups agree. vLLM looks a request up once, in
one way, before it asks; so when a child of the second kind wins and the two hits differ, the request is deferred for
one step, and in that step (`_shared_step`) every request is looked up in the shared way. Two such steps never follow
each other, so that requests with tickets, which are deferred in them, wait for one step at most.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING, Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_cache_interface import MambaSpec

from ..config import ConfigError
from .children import Child, ChildSettings, hands_over
from .pending_loads import AskAgain, ComputeHere, LoadFrom, Offer, PendingLoads, bounded_offer, choose

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


log = logging.getLogger("vllm.pdproxy.multi")


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """`sizes`: tokens per block of each KV-cache group that grows with the sequence, by the group's number.

    `hash_block`: the granularity, in tokens, at which cached blocks are hashed. `max_model_len`: in tokens.
    """

    sizes: Mapping[int, int]
    hash_block: int
    max_model_len: int


def require_hybrid_support(children: Sequence[ChildSettings], supporting: Iterable[bool]) -> None:
    """Every child must support vLLM's hybrid memory allocator. Raises ConfigError with the child's name."""
    for child, supports in zip(children, supporting, strict=True):
        if not supports:
            raise ConfigError(
                f"connector {child.name!r} ({child.connector}) does not support the hybrid memory allocator, which "
                "models with state groups need: take it out of kv_connector_extra_config.connectors, or put one in "
                "its place whose class derives from vLLM's SupportsHMA."
            )


def require_one_side_channel(children: Sequence[ChildSettings], handing_over: Iterable[bool]) -> None:
    """vLLM serves one handshake a node, and one ticket a request. Raises ConfigError with the names."""
    several = [child.name for child, hands_over in zip(children, handing_over, strict=True) if hands_over]
    if len(several) > 1:
        raise ConfigError(
            f"connectors {' and '.join(map(repr, several))} both hand requests over between nodes: keep one of them."
        )


def require_children(children: Sequence[ChildSettings], listed: Sequence[dict[str, Any]]) -> None:
    """The listed children must work on one node. Raises ConfigError with the name of one that does not."""
    configs = [KVTransferConfig(**entry) for entry in listed]
    require_hybrid_support(children, map(KVConnectorFactory.supports_hma_config, configs))
    require_one_side_channel(children, map(hands_over, map(KVConnectorFactory.get_connector_class, configs)))


def require_units(children: Sequence[ChildSettings], blocks: GroupBlocks) -> None:
    """A child's offload unit must fit the groups' blocks. Raises ConfigError with a unit that would."""
    for child in children:
        if child.unit is not None:
            _require_unit(child.name, child.unit, blocks)


def _require_unit(name: str, unit: int, blocks: GroupBlocks) -> None:
    if unit < blocks.hash_block:
        raise ConfigError(
            f"connector {name!r} offloads units of {unit} tokens, less than the {blocks.hash_block} that cached blocks "
            f"are named by: use {fitting(unit, blocks)}."
        )
    for group, size in blocks.sizes.items():
        if unit % size:
            raise ConfigError(
                f"connector {name!r} offloads units of {unit} tokens, but a block of cache group {group} has {size}: "
                f"use {fitting(unit, blocks)}, or a multiple of it."
            )
    if unit > blocks.max_model_len:
        raise ConfigError(
            f"connector {name!r} offloads units of {unit} tokens and would never store one, since max_model_len is "
            f"{blocks.max_model_len}: set max_model_len to {unit} or more."
        )


def fitting(unit: int, blocks: GroupBlocks) -> int:
    """The smallest unit, at least `unit`, that is a multiple of every group's block."""
    whole = lcm(blocks.hash_block, *blocks.sizes.values())
    return -(-unit // whole) * whole


def stored_blocks(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", hash_block: int) -> GroupBlocks:
    """The groups that children store; a state of which only the running one exists is not stored."""
    specs = {number: group.kv_cache_spec for number, group in enumerate(kv_cache_config.kv_cache_groups)}
    whole = {
        number for number, spec in specs.items() if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "none"
    }
    if whole:
        log.warning(
            "Cache groups %s hold one running state a request (mamba_cache_mode none): tiers cannot keep prefixes of "
            "this model; --enable-prefix-caching lets them.",
            sorted(whole),
        )
    sizes = {number: spec.block_size for number, spec in specs.items() if number not in whole}
    return GroupBlocks(sizes, hash_block, vllm_config.model_config.max_model_len)


Answer = tuple[int | None, bool]
"""To vLLM: tokens to load beyond the local hit, None to be asked again; whether they are loaded between steps."""


class ChildSelector:
    """Asks every child about a request, and picks the best offer.

    `groups`: how many KV-cache groups the model has. `shared_hit` looks up, in tokens, where all of them agree.
    """

    def __init__(
        self,
        children: Sequence[Child],
        loads: PendingLoads,
        *,
        groups: int,
        decide_within: float,
        shared_hit: Callable[["Request"], int],
        now: Callable[[], float],
    ) -> None:
        self._children = tuple(children)
        self._loads = loads
        self._groups = groups
        self._decide_within = decide_within
        self._shared_hit = shared_hit
        self._now = now
        self._shared_step = False
        self._deferred: set[str] = set()
        self._warned: set[int] = set()

    @property
    def offers_divergent_hits(self) -> bool:
        """Whether vLLM shall look requests up by attention alone, now."""
        return not self._shared_step and any(child.completes_hybrid_hits for child in self._children)

    def select(self, request: "Request", hit: int) -> tuple[Answer, Offer | None]:
        """The answer to vLLM, and the offer that it comes from. `hit`: the local one, in tokens, as vLLM looked it
        up."""
        request_id = request.request_id
        late = self._loads.waited(request_id, self._now()) >= self._decide_within
        shared = self._shared_hit(request) if hit and self.offers_divergent_hits else hit
        offers, asynchronous = self._offers(request, hit, shared)
        match choose(offers, shared=shared, prompt=request.num_tokens, late=late):
            case AskAgain():
                return (None, False), None
            case LoadFrom(offer) if self._must_look_up_again(request_id, offer, hit):
                return (None, False), None
            case LoadFrom(offer):
                loads_between_steps = offer.child in asynchronous
                self._loads.record_choice(request_id, offers, offer, asynchronous=loads_between_steps)
                return (offer.tokens, loads_between_steps), offer
            case ComputeHere():
                self._loads.record_choice(request_id, offers, None, asynchronous=False)
                return (0, False), None

    def on_step_planned(self) -> None:
        """The scheduler has planned a step."""
        self._shared_step = bool(self._deferred) and not self._shared_step

    def forget(self, request_id: str) -> None:
        """The request was admitted, or has ended."""
        self._deferred.discard(request_id)

    def _must_look_up_again(self, request_id: str, offer: Offer, hit: int) -> bool:
        if offer.base != hit:
            self._deferred.add(request_id)
            return True
        if self._shared_step and self._children[offer.child].completes_hybrid_hits:
            self._deferred.discard(request_id)
            return True
        return False

    def _offers(self, request: "Request", hit: int, shared: int) -> tuple[list[Offer], set[int]]:
        """Every child's offer, and which children load between steps."""
        offers: list[Offer] = []
        asynchronous: set[int] = set()
        barred = self._loads.barred(request.request_id)
        for child in self._children:
            if child.number in barred:
                continue
            base = hit if child.completes_hybrid_hits else shared
            tokens, between_steps = child.connector.get_num_new_matched_tokens(request, base)
            tokens = self._usable(child, bounded_offer(tokens, base=base, prompt=request.num_tokens), between_steps)
            offers.append(Offer(child.number, base, tokens, child.settings.weight))
            asynchronous |= {child.number} if between_steps else set()
        return offers, asynchronous

    def _usable(self, child: Child, tokens: int | None, between_steps: bool) -> int | None:
        """With several groups vLLM cannot undo a load that runs within a step, so none is begun."""
        if not tokens or between_steps or self._groups == 1:
            return tokens
        if child.number not in self._warned:
            self._warned.add(child.number)
            log.warning(
                "Connector %r loads within a step, and a failure of that could not be repaired on a model with several "
                "cache groups: what it offers is not used.",
                child.settings.name,
            )
        return 0
