"""Where a hand-over ends, so that the decode node can go on from it by itself later.

vLLM's prefix cache keeps a mamba state under the hash of the tokens before it, and has a hash at every
`--prefix-match-unit` tokens. Of a prompt it registers one state only: that at the last such boundary before the
prompt's end (`get_mamba_prefill_checkpoint_position`; one unit earlier with EAGLE and MTP). A hand-over of all but the
last token, as stock vLLM makes it, ends somewhere between two boundaries: the decode node then has attention blocks
and a state that it cannot name, and whatever comes next without a ticket (a chat's next turn, a request after
preemption) starts at token 0. Here a hand-over ends at the boundary, and vLLM itself registers the state that was read.
The decode node computes up to a unit of the prompt (two with EAGLE and MTP) instead of one token.

Both nodes must end it at the same token: the unit is a part of the fingerprint, which stands in the ticket, signed.
Nodes without a unit, or whose vLLM does not match at it, hand over all but the last tokens, as stock vLLM does.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from vllm.v1.core.kv_cache_utils import partial_hash_hits_enabled, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, get_mamba_prefill_checkpoint_position
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


log = logging.getLogger("vllm.pdproxy.scheduler")

_NO_EFFECT = (
    "--prefix-match-unit %d has no effect on hand-overs: %s. They end at a prompt's last token but one, and this node "
    "cannot resume after them without another ticket."
)


class HasMedia(Protocol):
    """The part of vLLM's `Request` that decides where its hand-over ends."""

    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def mm_features(self) -> Sequence[Any]: ...


@dataclass(frozen=True, slots=True)
class ResumeBoundary:
    """The rule of one engine. `unit`: tokens from one boundary to the next; None where states are not kept.

    `drops_unit`: vLLM's lookups give up one unit of a hit (EAGLE and MTP), and states are kept one unit earlier.
    """

    unit: int | None
    drops_unit: bool = False

    def tokens(self, request: HasMedia, backoff: int) -> int:
        """How many of the prompt's tokens are handed over; `backoff`: the last ones that vLLM leaves out in any case.

        A boundary inside of a media item is not used: a model may need to compute such an item as a whole.
        """
        longest = request.num_prompt_tokens - backoff
        if self.unit is None:
            return longest
        boundary = get_mamba_prefill_checkpoint_position(request.num_prompt_tokens, self.unit, self.drops_unit)
        return boundary if 0 < boundary <= longest and not _inside_media(request, boundary) else longest


def resume_boundary(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> ResumeBoundary:
    """The rule of this engine. Logs why where a configured unit has no effect."""
    unit = vllm_config.cache_config.prefix_match_unit
    if unit is None:
        return ResumeBoundary(None)
    obstacle = _obstacle(vllm_config, kv_cache_config)
    if obstacle is not None:
        log.warning(_NO_EFFECT, unit, obstacle)
        return ResumeBoundary(None)
    return ResumeBoundary(unit, drops_unit(vllm_config))


def drops_unit(vllm_config: VllmConfig) -> bool:
    """Whether vLLM's lookups give up the last unit of a hit; without a unit of their own, the last block."""
    speculative = vllm_config.speculative_config
    return speculative is not None and bool(speculative.use_eagle_block_drop())


def _obstacle(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """Why vLLM registers no state inside of a block, in the order in which its own cache asks; None where it does."""
    if not vllm_config.cache_config.enable_prefix_caching:
        return "prefix caching is off"
    groups = kv_cache_config.kv_cache_groups
    _, unit = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    ranks = vllm_config.parallel_config.decode_context_parallel_size
    if not partial_hash_hits_enabled(groups, unit, ranks):
        return "no state group of this model has blocks larger than it, in --mamba-cache-mode align"
    managers = [KVCacheSpecRegistry.get_manager_class(group.kv_cache_spec, group.role) for group in groups]
    if None in managers or not partial_hash_hits_enabled(groups, unit, ranks, [each for each in managers if each]):
        return "another cache group of this model (a sliding window, for example) is matched by whole blocks only"
    return None


def _inside_media(request: HasMedia, boundary: int) -> bool:
    """Whether tokens of one media item stand on both sides of the boundary."""
    spans = ((int(item.mm_position.offset), int(item.mm_position.length)) for item in request.mm_features)
    return any(offset < boundary < offset + length for offset, length in spans)


class PrefixCache(Protocol):
    """The part of vLLM's `BlockPool` that is its prefix cache. `hash_block_size`: tokens for each hash of a request."""

    hash_block_size: int

    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: list[int]) -> list[Any] | None: ...
    def evict_blocks(self, block_ids: set[int]) -> None: ...


class LocalHits:
    """A node's own prefix cache, where a hit in it is in the way. Whoever uses a block that is forgotten keeps it.

    A decode node may hold the attention of all that a ticket brings, but no state. vLLM then has nothing to read: a
    local hit as long as the ticket wins, and for want of a state it falls back to the boundary that all groups share,
    often token 0. So the hit is made shorter by its last attention block; the read brings it again, and the state.

    A hit that ends inside a block costs more blocks than none: vLLM copies the block before it writes to it, and needs
    both. A prompt nearly as large as the cache does not fit with such a hit (`admission`).
    """

    def __init__(self, kv_cache_config: KVCacheConfig) -> None:
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._attention = [at for at, spec in enumerate(specs) if isinstance(spec, FullAttentionSpec)]
        self._states = [at for at, spec in enumerate(specs) if isinstance(spec, MambaSpec)]
        self._block_sizes = [int(spec.block_size) for spec in specs]
        self._block_size = max((spec.block_size for spec in specs if isinstance(spec, FullAttentionSpec)), default=0)
        self._pool: PrefixCache | None = None

    def bind(self, pool: PrefixCache) -> None:
        """vLLM's block pool, before the first request."""
        self._pool = pool

    def forget_without_state(self, request: Request, tokens: int, hit: int) -> bool:
        """Whether the cache was changed, so that vLLM must look the request up again.

        `tokens`: that the ticket brings. `hit`: local ones as vLLM tells them, in whole blocks.
        """
        pool = self._pool
        if pool is None or not self._states or tokens - hit >= self._block_size or tokens % pool.hash_block_size:
            return False
        end = request.block_hashes[tokens // pool.hash_block_size - 1]
        if pool.get_cached_block(end, self._states) is not None:
            return False
        forgotten = self._forget_attention(pool, end)
        whole = min(hit, tokens // self._block_size * self._block_size)
        if whole not in (0, tokens) and any(block.ref_cnt for block in forgotten):
            # vLLM registers the block inside which a running request's prompt ends anew in each step.
            self._forget_attention(pool, request.block_hashes[whole // pool.hash_block_size - 1])
        return bool(forgotten)

    def _forget_attention(self, pool: PrefixCache, block_hash: Any) -> list[Any]:
        """Let no attention be found under this hash. The blocks that were."""
        forgotten: list[Any] = []
        while (cached := pool.get_cached_block(block_hash, self._attention)) is not None:
            pool.evict_blocks({block.block_id for block in cached})
            forgotten += cached
        return forgotten

    def forget_partial_hits(self, request: Request) -> bool:
        """Let no hit of this request end inside a block. Whether the cache was changed."""
        pool = self._pool
        if pool is None:
            return False
        forgotten: set[int] = set()
        for tokens, block_hash in zip(
            itertools.count(pool.hash_block_size, pool.hash_block_size), request.block_hashes, strict=False
        ):
            for group in (*self._attention, *self._states):
                if tokens % self._block_sizes[group] and (cached := pool.get_cached_block(block_hash, [group])):
                    forgotten |= {block.block_id for block in cached}
        pool.evict_blocks(forgotten)
        return bool(forgotten)
