"""The shapes of a model's KV-cache groups, out of vLLM's `KVCacheConfig`."""

from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, UniformTypeKVCacheSpecs

from connector.ticket import GroupKind, GroupShape

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


def group_shapes(kv_cache_config: "KVCacheConfig") -> tuple[GroupShape, ...]:
    """The groups that travel, in the order in which tickets name their blocks."""
    return tuple(_shape(group.kv_cache_spec) for group in kv_cache_config.transfer_groups)


def _shape(spec: Any) -> GroupShape:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return _shape(next(iter(spec.kv_cache_specs.values())))
    if isinstance(spec, MambaSpec):
        return GroupShape(GroupKind.STATE, spec.block_size)
    kind = GroupKind.ATTENTION if isinstance(spec, FullAttentionSpec) else GroupKind.WINDOW
    return GroupShape(kind, spec.block_size)
