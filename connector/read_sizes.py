"""How many bytes a read brings, and how many a local hit spared, by kind of group. Per rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True, slots=True)
class GroupSize:
    """One group that travels: whether it holds state, its block's tokens, and its block's bytes over all its layers."""

    state: bool
    block_tokens: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class ReadSize:
    """Bytes that a read brings, by kind of group, and attention bytes that a local hit spared."""

    attention: int = 0
    state: int = 0
    spared: int = 0


def group_sizes(kv_cache_config: KVCacheConfig) -> tuple[GroupSize, ...]:
    """The groups that travel, in the order in which tickets name their blocks."""
    return tuple(_size(group.kv_cache_spec, len(group.layer_names)) for group in kv_cache_config.transfer_groups)


def read_size(
    sizes: Sequence[GroupSize], local: Sequence[Sequence[int]], remote: Sequence[Sequence[int]], hit_tokens: int
) -> ReadSize:
    """The size of a read of logical blocks. vLLM pairs each group's lists and drops what the other side lacks; only
    whole blocks are ever hit."""
    attention = state = 0
    for size, mine, theirs in zip(sizes, local, remote, strict=False):
        moved = min(len(mine), len(theirs)) * size.block_bytes
        attention, state = attention + (0 if size.state else moved), state + (moved if size.state else 0)
    spared = sum(hit_tokens // size.block_tokens * size.block_bytes for size in sizes if not size.state)
    return ReadSize(attention, state, spared)


def _size(spec: Any, layers: int) -> GroupSize:
    from vllm.v1.kv_cache_interface import MambaSpec, UniformTypeKVCacheSpecs

    if isinstance(spec, UniformTypeKVCacheSpecs):
        parts = [_size(part, 1) for part in spec.kv_cache_specs.values()]
        return GroupSize(parts[0].state, parts[0].block_tokens, sum(part.block_bytes for part in parts))
    if isinstance(spec, MambaSpec):
        # Only the state itself travels, not the padding that makes its page as large as attention's.
        return GroupSize(True, spec.block_size, spec.real_page_size_bytes * layers)
    return GroupSize(False, spec.block_size, spec.page_size_bytes * layers)
