"""Bytes by kind of group, from vLLM's own cache specs."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)

from connector.kv_groups import GroupSize, ReadSize, group_sizes, read_size


def attention(**more: Any) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=256, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, **more)


def config(*groups: KVCacheGroupSpec) -> KVCacheConfig:
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=list(groups))


def test_a_hybrid_models_groups_have_their_own_sizes() -> None:
    state = MambaSpec(
        block_size=256, shapes=((3, 10), (2, 5)), dtypes=(torch.bfloat16, torch.float32), page_size_padded=65536
    )
    made = group_sizes(config(KVCacheGroupSpec(["g0", "g1"], state), KVCacheGroupSpec(["a0"], attention())))
    assert made == (GroupSize(True, 256, 2 * (3 * 10 * 2 + 2 * 5 * 4)), GroupSize(False, 256, 256 * 64 * 2 * 2))


def test_a_group_of_layers_with_different_specs_adds_them_up() -> None:
    specs = {"a": attention(), "b": attention()}
    uniform = UniformTypeKVCacheSpecs(block_size=256, kv_cache_specs=specs)
    (made,) = group_sizes(config(KVCacheGroupSpec(["a", "b"], uniform)))
    assert made == GroupSize(False, 256, 2 * 256 * 64 * 2 * 2)


def test_the_size_of_a_read_is_what_both_sides_have() -> None:
    groups = [GroupSize(True, 256, 7), GroupSize(False, 256, 100)]
    assert read_size(groups, [[3], [1, 2]], [[9], [4, 5, 6, 7]], hit_tokens=600) == ReadSize(200, 7, 200)
    assert read_size(groups, [], [[9], [4]], hit_tokens=0) == ReadSize(0, 0, 0)
