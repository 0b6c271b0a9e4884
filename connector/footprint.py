"""What one sequence takes of each cache group of a node, out of vLLM's own description of its cache."""

from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from connector.capacity import Bounded, Capacity, Growing, capacity

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def node_capacity(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> Capacity:
    """The capacity of one engine. Block 0 is vLLM's null block; groups that live in host memory have another pool."""
    groups = [
        footprint(group.kv_cache_spec, vllm_config)
        for group in kv_cache_config.kv_cache_groups
        if not group.host_resident
    ]
    return capacity(max(0, kv_cache_config.num_blocks - 1), vllm_config.model_config.max_model_len, groups)


def footprint(spec: Any, vllm_config: "VllmConfig") -> Growing | Bounded:
    """One group's, from its spec. A kind that is not known here counts as what vLLM reserves for it."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return footprint(next(iter(spec.kv_cache_specs.values())), vllm_config)
    if isinstance(spec, FullAttentionSpec):
        shards = vllm_config.parallel_config.decode_context_parallel_size if spec.dcp_sharded else 1
        return Growing(spec.block_size * shards)
    longest = vllm_config.model_config.max_model_len
    if isinstance(spec, MambaSpec):
        return _state(spec, longest)
    reserved = _blocks(spec.max_memory_usage_bytes(vllm_config), spec.page_size_bytes)
    return _bounded(_window(spec, longest), reserved, _blocks(longest, spec.block_size))


def _state(spec: MambaSpec, longest: int) -> Bounded:
    """The running state, whatever the mode; what lies before it is freed, and at most stays to be found again.

    `align` holds the state of the last block too while it crosses into the next, and a checkpoint while it prefills
    (`MambaManager.get_num_blocks_to_allocate`). `all` is admitted with a block for each block of its prompt, which go
    with the step after (`SingleTypeKVCacheManager.remove_skipped_blocks`); vLLM 0.32 no longer lets it be configured.
    """
    held = 1 + spec.num_speculative_blocks
    match spec.mamba_cache_mode:
        case "align":
            return Bounded(held, held + 1 + spec.num_prefill_checkpoint_blocks)
        case "all":
            return Bounded(held, max(held, _blocks(longest, spec.block_size) + spec.num_speculative_blocks))
        case _:
            return Bounded(held, held)


def _window(spec: Any, longest: int) -> int | None:
    """Blocks that hold what the next token sees, wherever the window begins in its first; None without a window."""
    if isinstance(spec, SlidingWindowSpec):
        return _blocks(min(spec.sliding_window - 1 + spec.extra_retained_tokens, longest), spec.block_size) + 1
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return _blocks(min(spec.attention_chunk_size, longest), spec.block_size)
    return None


def _bounded(held: int | None, reserved: int, all_of_it: int) -> Bounded:
    """A window never takes more than the whole sequence would."""
    if held is None:
        return Bounded(reserved, reserved)
    held = min(held, all_of_it)
    return Bounded(held, max(held, min(reserved, all_of_it)))


def _blocks(amount: int, size: int) -> int:
    return -(-amount // size)
