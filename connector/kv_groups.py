"""A model's KV-cache groups, from vLLM's `KVCacheConfig`: what a cache holds, and what a read moves. Pure.

    require_movable_states        both: whether vLLM's worker can move the model's states at all
    group_shapes, count_blocks    scheduler: how many blocks of each group a ticket must name, and what a read fills
    node_capacity                 scheduler: how many tokens and sequences the cache holds
    sequence_blocks               scheduler: how many blocks one sequence takes
    attention_block_size          scheduler: what the metrics say of how prompts are hashed
    group_sizes, read_size        worker: how many bytes a read brings, and how many a local hit spared; per rank

All groups take blocks from one pool. A *growing* group takes blocks in proportion to a sequence's length; a *bounded*
one takes a fixed number per sequence, however long (mamba states; sliding and chunked windows). Counting bounded groups
as if they grew made a hybrid node's capacity look 2 to 4 times too small (vllm#40384).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from .config import ConfigError
from .ticket import GroupKind, GroupShape

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


Group = Literal["attention", "state"]
"""Kinds of KV-cache groups: attention grows with the sequence, state (Mamba, GDN) is O(1) per request."""


class LimitedBy(enum.StrEnum):
    """The resource that sequences of `max_model_len` use up first; the value is a label of a metric."""

    ATTENTION = "attention"
    STATE = "state"
    NOTHING = "nothing"
    """The model keeps no cache."""


@dataclass(frozen=True, slots=True)
class GrowingGroup:
    """A group that keeps every token: full attention. `block_size`: tokens in a block."""

    block_size: int

    def __post_init__(self) -> None:
        _require(self.block_size > 0, f"a block of {self.block_size} tokens")

    def blocks(self, tokens: int) -> int:
        """How many blocks a sequence of this many tokens takes."""
        return -(-tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class BoundedGroup:
    """A group that keeps the end of a sequence, or its state.

    `held`: blocks of one long sequence while it decodes. `peak`: its most, while it enters or crosses into another
    block. vLLM reserves each sequence its peak, which sequences reach at different times.
    """

    held: int
    peak: int

    def __post_init__(self) -> None:
        _require(0 <= self.held <= self.peak, f"{self.held} blocks held of {self.peak} at most")


@dataclass(frozen=True, slots=True)
class Capacity:
    """A node's capacity. A load of `t` tokens in `n` sequences fits while `t / tokens + n / sequences <= 1`, but for
    the last block of each sequence.

    `tokens`: of attention capacity, were every block given to the growing groups; without any, what `sequences` of
    `max_model_len` hold. `sequences`: that the bounded groups alone would allow at the same time; None where no group
    is bounded. `admitted`: sequences of `max_model_len` that run together, all groups counted, while one of them is at
    its peak.
    """

    tokens: int
    sequences: int | None
    admitted: int
    binding: LimitedBy


NO_CAPACITY = Capacity(0, None, 0, LimitedBy.NOTHING)
"""The capacity of a model that keeps no cache."""


def capacity(blocks: int, max_model_len: int, groups: Sequence[GrowingGroup | BoundedGroup]) -> Capacity:
    """The capacity of `blocks` usable blocks (without vLLM's null block), with sequences of at most `max_model_len`.

    Raises ValueError for a negative number of blocks or a length below one.
    """
    _require(blocks >= 0 and max_model_len > 0, f"{blocks} blocks for sequences of {max_model_len} tokens")
    growing = [group for group in groups if isinstance(group, GrowingGroup)]
    bounded = [group for group in groups if isinstance(group, BoundedGroup)]
    attention = sum(group.blocks(max_model_len) for group in growing)
    state = sum(group.held for group in bounded)
    if attention + state == 0:
        return NO_CAPACITY
    sequences = blocks // state if state else None
    spare = sum(group.peak - group.held for group in bounded)
    return Capacity(
        tokens=_tokens(blocks, growing) if growing else (sequences or 0) * max_model_len,
        sequences=sequences,
        admitted=max(0, blocks - spare) // (attention + state),
        binding=LimitedBy.ATTENTION if attention >= state else LimitedBy.STATE,
    )


def _tokens(blocks: int, growing: Sequence[GrowingGroup]) -> int:
    """Groups with different block sizes fill together, in steps of the tokens that complete a block in each."""
    step = math.lcm(*(group.block_size for group in growing))
    return blocks // sum(step // group.block_size for group in growing) * step


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"there can be no {what}")


def node_capacity(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Capacity:
    """The capacity of one engine. Block 0 is vLLM's null block; groups in host memory have another pool."""
    groups = [
        footprint(group.kv_cache_spec, vllm_config)
        for group in kv_cache_config.kv_cache_groups
        if not group.host_resident
    ]
    return capacity(max(0, kv_cache_config.num_blocks - 1), vllm_config.model_config.max_model_len, groups)


@dataclass(frozen=True, slots=True)
class SequenceBlocks:
    """How many blocks vLLM asks for before it admits a sequence that has no hit in the prefix cache.

    `bounded`: each bounded group, and how its blocks would grow if it were not.
    """

    growing: tuple[GrowingGroup, ...]
    bounded: tuple[tuple[GrowingGroup, BoundedGroup], ...]

    def least(self, tokens: int) -> int:
        """Not more than vLLM asks for."""
        ends = sum(min(growth.blocks(tokens), group.held) for growth, group in self.bounded)
        return sum(group.blocks(tokens) for group in self.growing) + ends

    def most(self, tokens: int) -> int:
        """Not less than vLLM asks for."""
        return sum(group.blocks(tokens) for group in self.growing) + sum(group.peak for _, group in self.bounded)

    def with_copies(self, tokens: int) -> int:
        """Not less than vLLM asks for where a local hit ends inside a block, of which each group needs a copy."""
        return self.most(tokens) + len(self.growing) + len(self.bounded)


def sequence_blocks(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> SequenceBlocks:
    """For one engine; groups in host memory have another pool."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups if not group.host_resident]
    pairs = [(spec, footprint(spec, vllm_config)) for spec in specs]
    return SequenceBlocks(
        tuple(group for _, group in pairs if isinstance(group, GrowingGroup)),
        tuple((GrowingGroup(spec.block_size), group) for spec, group in pairs if isinstance(group, BoundedGroup)),
    )


def attention_block_size(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Tokens in a block of the groups that grow, over all context-parallel ranks; the largest, 0 without any."""
    groups = (footprint(group.kv_cache_spec, vllm_config) for group in kv_cache_config.kv_cache_groups)
    return max((group.block_size for group in groups if isinstance(group, GrowingGroup)), default=0)


def footprint(spec: Any, vllm_config: VllmConfig) -> GrowingGroup | BoundedGroup:
    """Blocks that one sequence takes of a group. An unknown kind of group counts as what vLLM reserves for it."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return footprint(next(iter(spec.kv_cache_specs.values())), vllm_config)
    if isinstance(spec, FullAttentionSpec):
        shards = vllm_config.parallel_config.decode_context_parallel_size if spec.dcp_sharded else 1
        return GrowingGroup(spec.block_size * shards)
    longest = vllm_config.model_config.max_model_len
    if isinstance(spec, MambaSpec):
        return _state(spec, longest)
    reserved = _blocks(spec.max_memory_usage_bytes(vllm_config), spec.page_size_bytes)
    return _bounded(_window(spec, longest), reserved, _blocks(longest, spec.block_size))


def _state(spec: MambaSpec, longest: int) -> BoundedGroup:
    """The running state, in every mode; earlier states are freed, or stay only for the prefix cache.

    `align` holds the state of the last block too while it crosses into the next, and a checkpoint while it prefills
    (`MambaManager.get_num_blocks_to_allocate`). `all` is admitted with a block for each block of its prompt, which go
    with the step after (`SingleTypeKVCacheManager.remove_skipped_blocks`); vLLM 0.32 no longer lets it be configured.
    """
    held = 1 + spec.num_speculative_blocks
    match spec.mamba_cache_mode:
        case "align":
            return BoundedGroup(held, held + 1 + spec.num_prefill_checkpoint_blocks)
        case "all":
            return BoundedGroup(held, max(held, _blocks(longest, spec.block_size) + spec.num_speculative_blocks))
        case _:
            return BoundedGroup(held, held)


def _window(spec: Any, longest: int) -> int | None:
    """Blocks that hold what the next token sees, wherever in its first block the window begins; None without a
    window."""
    if isinstance(spec, SlidingWindowSpec):
        return _blocks(min(spec.sliding_window - 1 + spec.extra_retained_tokens, longest), spec.block_size) + 1
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return _blocks(min(spec.attention_chunk_size, longest), spec.block_size)
    return None


def _bounded(held: int | None, reserved: int, whole_sequence: int) -> BoundedGroup:
    """A window never takes more than the whole sequence would."""
    if held is None:
        return BoundedGroup(reserved, reserved)
    held = min(held, whole_sequence)
    return BoundedGroup(held, max(held, min(reserved, whole_sequence)))


def _blocks(amount: int, size: int) -> int:
    return -(-amount // size)


MOVABLE = frozenset({"MAMBA1", "MAMBA2", "GDN_ATTN"})
"""Kinds of states whose parts vLLM's NIXL worker knows (`derive_mamba_conv_split`, 0.32 and 0.33)."""


def require_movable_states(kv_cache_config: KVCacheConfig) -> None:
    """Raise ConfigError for a model whose states vLLM's NIXL worker cannot move: it would end the node's start without
    a word of why, or, where layers keep states of several sizes, move every layer's as if it were the first one's, and
    parts of the others would stay behind unnoticed."""
    members = (spec for group in kv_cache_config.transfer_groups for spec in _members(group.kv_cache_spec))
    specs = [spec for spec in members if isinstance(spec, MambaSpec)]
    foreign = sorted({spec.mamba_type.name for spec in specs} - MOVABLE)
    if foreign:
        raise ConfigError(
            f"the layers of this model keep states of the kind {', '.join(foreign)}, and vLLM's NIXL connector moves "
            "those of Mamba-1, Mamba-2 and gated delta nets alone: the model cannot be served on prefill and decode "
            "nodes with NIXL."
        )
    sizes = {(spec.shapes, spec.dtypes) for spec in specs if not spec.tp_replicated}
    if len(sizes) > 1:
        raise ConfigError(
            f"the layers of this model keep states of {len(sizes)} sizes, of which vLLM's NIXL connector moves all as "
            "if they were of the first one: the model cannot be served on prefill and decode nodes with NIXL."
        )


def _members(spec: Any) -> Iterable[Any]:
    return spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else (spec,)


def group_shapes(kv_cache_config: KVCacheConfig) -> tuple[GroupShape, ...]:
    """The transferred groups, in the order in which tickets name their blocks."""
    return tuple(_shape(group.kv_cache_spec) for group in kv_cache_config.transfer_groups)


def count_blocks(
    shapes: Sequence[GroupShape], allocated: Sequence[Sequence[Any]], to_pull: Sequence[Sequence[int]]
) -> dict[Group, tuple[int, int]]:
    """Blocks (hit, pulled) by kind of group: those in the prefix cache already, and those that a read fills.

    `allocated`: vLLM's blocks, and `to_pull`: block ids, for each of `shapes`.
    """
    counts: dict[Group, tuple[int, int]] = {"attention": (0, 0), "state": (0, 0)}
    for shape, blocks, ids in zip(shapes, allocated, to_pull, strict=True):
        kind: Group = "state" if shape.kind is GroupKind.STATE else "attention"
        hit, pulled = counts[kind]
        cached = sum(block.block_hash is not None and not block.is_null for block in blocks)
        counts[kind] = (hit + cached, pulled + len(ids))
    return counts


def _shape(spec: Any) -> GroupShape:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return _shape(next(iter(spec.kv_cache_specs.values())))
    if isinstance(spec, MambaSpec):
        return GroupShape(GroupKind.STATE, spec.block_size)
    kind = GroupKind.ATTENTION if isinstance(spec, FullAttentionSpec) else GroupKind.WINDOW
    return GroupShape(kind, spec.block_size)


@dataclass(frozen=True, slots=True)
class GroupSize:
    """One transferred group: whether it holds state, and one block's tokens, and bytes over all its layers."""

    state: bool
    block_tokens: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class ReadSize:
    """Bytes that a read brings, by kind of group, and attention bytes that a local hit spared it."""

    attention: int = 0
    state: int = 0
    spared: int = 0


def group_sizes(kv_cache_config: KVCacheConfig) -> tuple[GroupSize, ...]:
    """The transferred groups, in the order in which tickets name their blocks."""
    return tuple(_group_size(group.kv_cache_spec, len(group.layer_names)) for group in kv_cache_config.transfer_groups)


def read_size(
    sizes: Sequence[GroupSize], local: Sequence[Sequence[int]], remote: Sequence[Sequence[int]], hit_tokens: int
) -> ReadSize:
    """The size of a read of logical blocks. vLLM pairs each group's lists and drops blocks that the other side lacks;
    only whole blocks are hit."""
    attention = state = 0
    for size, mine, theirs in zip(sizes, local, remote, strict=False):
        moved = min(len(mine), len(theirs)) * size.block_bytes
        attention, state = attention + (0 if size.state else moved), state + (moved if size.state else 0)
    spared = sum(hit_tokens // size.block_tokens * size.block_bytes for size in sizes if not size.state)
    return ReadSize(attention, state, spared)


def _group_size(spec: Any, layers: int) -> GroupSize:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        parts = [_group_size(part, 1) for part in spec.kv_cache_specs.values()]
        return GroupSize(parts[0].state, parts[0].block_tokens, sum(part.block_bytes for part in parts))
    if isinstance(spec, MambaSpec):
        # Only the state itself travels, not the padding that makes its page as large as attention's.
        return GroupSize(True, spec.block_size, spec.real_page_size_bytes * layers)
    return GroupSize(False, spec.block_size, spec.page_size_bytes * layers)
