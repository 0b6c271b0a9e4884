"""A node's fingerprint from vLLM's own configuration: which flags are in it, and which two nodes may differ in.

The configurations are what vLLM makes of command-line arguments; the groups' shapes and types are computed by vLLM's
own functions for the tiny model. Speculative tokens, layouts, FP8 caches and quantization are differences that a node
on a CPU cannot start with: they are held here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata, NixlHandshakePayload
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator, MambaStateShapeCalculator
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    get_kv_quant_mode,
)

from connector.fingerprint import ADVICE, NONE, Fingerprint
from connector.node_fingerprint import all_parts, cache_parts, lora_settings, node_fingerprint, rank_parts
from connector.resume_boundary import resume_boundary
from tests.connector.harness import MODEL

SPECULATING = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
OTHER_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 12000.0, "partial_rotary_factor": 0.25}}


@pytest.fixture(scope="module", autouse=True)
def states_first_dimension_first() -> Iterator[None]:
    """As `plugin` sets it on every node; vLLM's function remembers what it was first."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
        patched.setattr(mamba_utils, "get_conv_state_layout", lambda: "DS")
        yield


def config(**arguments: Any) -> VllmConfig:
    """vLLM's configuration for these arguments.

    The state's type is given: on a CPU with AVX-512 BF16 alone vLLM 0.32 makes float32 of "auto" (`platforms/cpu.py`).
    """
    given: dict[str, Any] = {"model": str(MODEL), "skip_tokenizer_init": True, "max_model_len": 4096}
    given |= {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32"}
    return EngineArgs(**{**given, **arguments}).create_engine_config()


def attention(of: VllmConfig, block: int, **other: Any) -> FullAttentionSpec:
    """The tiny model's attention group."""
    cached = of.cache_config.cache_dtype
    given: dict[str, Any] = {
        "block_size": block,
        "num_kv_heads": 1,
        "head_size": 64,
        "dtype": kv_cache_dtype_str_to_dtype(cached, of.model_config),
        "kv_quant_mode": get_kv_quant_mode(cached),
    }
    return FullAttentionSpec(**{**given, **other})


def state(of: VllmConfig, block: int) -> MambaSpec:
    """One of the tiny model's state groups, sharded as one rank has it."""
    model, cache = of.model_config.hf_config, of.cache_config
    return MambaSpec(
        block_size=block,
        shapes=MambaStateShapeCalculator.gated_delta_net_state_shape(
            of.parallel_config.tensor_parallel_size,
            model.linear_num_key_heads,
            model.linear_num_value_heads,
            model.linear_key_head_dim,
            model.linear_value_head_dim,
            model.linear_conv_kernel_dim,
            of.num_speculative_tokens,
        ),
        dtypes=MambaStateDtypeCalculator.gated_delta_net_state_dtype(
            of.model_config.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
        ),
        mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
        mamba_cache_mode="align" if cache.enable_prefix_caching else "none",
    )


def groups(of: VllmConfig, block: int = 256) -> KVCacheConfig:
    """The tiny model's cache."""
    longest = of.model_config.max_model_len
    kept = block if of.cache_config.enable_prefix_caching else longest
    return cache_of(state(of, kept), state(of, kept), state(of, kept), attention(of, block))


def cache_of(*specs: Any) -> KVCacheConfig:
    named = [KVCacheGroupSpec([f"layers.{index}"], spec) for index, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=named)


def payload(**other: Any) -> NixlHandshakePayload:
    """The payload that one rank's worker publishes."""
    given: dict[str, Any] = {
        "engine_id": "engine",
        "agent_metadata": b"",
        "kv_caches_base_addr": [0],
        "device_id": 0,
        "num_blocks": 64,
        "block_lens": [65536],
        "block_strides": [65536],
        "kv_cache_layout": "LBHNC",
        "block_size": 256,
        "ssm_sizes": (2304, 32768),
        "attn_backend_name": "CPU_ATTN",
        "physical_blocks_per_logical_kv_block": 1,
    }
    return NixlHandshakePayload("hash", msgspec.msgpack.encode(NixlAgentMetadata(**{**given, **other})))


def of(block: int = 256, ranks: tuple[NixlHandshakePayload, ...] = (), **arguments: Any) -> Fingerprint:
    """The fingerprint of a node that was started with these arguments."""
    made = config(**arguments)
    cache = groups(made, block)
    return node_fingerprint(made, cache, resume_boundary(made, cache)).extended(rank_parts(ranks or (payload(),)))


def test_the_operators_word_tells_weights_apart_that_samples_do_not(states_first_dimension_first: None) -> None:
    made = config()
    cache = groups(made, 256)
    old, new = (node_fingerprint(made, cache, resume_boundary(made, cache), word) for word in ("2026-11", "november!"))
    assert differing(old, new) == {"weights_label"}
    assert dict(old.parts)["weights_label"] == "2026-11"
    assert dict(new.parts)["weights_label"].startswith("november_:")


def differing(one: Fingerprint, other: Fingerprint) -> set[str]:
    ours, theirs = dict(one.parts), dict(other.parts)
    return {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}


@pytest.fixture(scope="module")
def usual(states_first_dimension_first: None) -> Fingerprint:
    return of()


def test_its_parts_are_what_the_node_runs(usual: Fingerprint) -> None:
    assert dict(usual.parts).keys() == ADVICE.keys()
    parts = dict(usual.parts)
    assert parts["architecture"] == "Qwen3NextForCausalLM"
    assert parts["checkpoint"].startswith("content:")
    assert parts["tokenizer"].startswith("hf:")
    assert len(parts["chat_template"]) == 16
    assert parts["block_sizes"] == "256*4"
    assert parts["cache_groups"] == "Mamba*3,FullAttention"
    assert parts["kv_dtype"] == "bfloat16"
    assert parts["kv_shape"] == "64+64=256B"
    assert parts["cache_mode"] == "align"
    assert parts["state_dtypes"] == "bfloat16+float32"
    assert (parts["kv_heads"], parts["state_groups"]) == ("divided", "2")
    assert parts["state_shapes"] == "(384,3)+(2,64,64)"
    assert parts["state_layout"] == "DS"
    assert parts["rope"].endswith("rope_theta=10000,rope_type=default")
    assert (parts["kv_layout"], parts["attention_backend"], parts["kernel_block_size"]) == ("LBHNC", "CPU_ATTN", "256")
    for part in (
        "context", "context_parallel", "draft_checkpoint", "kv_block_bytes", "media", "prefix_match_unit",
        "quantization", "speculative", "weights_label",
    ):  # fmt: skip
        assert parts[part] == NONE


def test_it_is_the_same_every_time(usual: Fingerprint) -> None:
    assert of() == usual


def test_the_metric_has_every_part_and_their_digest(usual: Fingerprint) -> None:
    assert all_parts(usual) == {**dict(usual.parts), "all": usual.digest}


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"mamba_ssm_cache_dtype": "bfloat16"}, {"state_dtypes"}),
        ({"mamba_cache_dtype": "float32"}, {"state_dtypes"}),
        ({"block": 512}, {"block_sizes"}),
        ({"prefix_match_unit": 16}, {"prefix_match_unit"}),
        ({"speculative_config": SPECULATING}, {"speculative", "state_shapes"}),
        ({"kv_cache_dtype": "fp8"}, {"kv_dtype", "kv_shape"}),
        ({"quantization": "fp8"}, {"quantization"}),
        ({"dtype": "float16"}, {"dtype", "kv_dtype", "state_dtypes"}),
        ({"hf_overrides": OTHER_ROPE}, {"rope"}),
        ({"hf_overrides": {"num_experts_per_tok": 2}}, {"model_config"}),
        ({"load_format": "dummy"}, {"checkpoint"}),
        ({"tokenizer_mode": "slow"}, {"tokenizer"}),
        ({"tokenizer": str(MODEL.parent)}, {"tokenizer", "chat_template"}),
        ({"enable_prefix_caching": False}, {"cache_mode", "block_sizes"}),
        ({"ranks": (payload(kv_cache_layout="BLHNC"),)}, {"kv_layout"}),
        ({"ranks": (payload(kv_cache_layout="LBNHC"),)}, {"kv_layout", "kv_block_bytes"}),
        ({"ranks": (payload(attn_backend_name="FLASH_ATTN"),)}, {"attention_backend"}),
        ({"ranks": (payload(block_size=64, physical_blocks_per_logical_kv_block=4),)}, {"kernel_block_size"}),
        ({"ranks": (payload(), payload(kv_cache_layout="BLHNC"))}, {"kv_layout"}),
        ({"ranks": (payload(attn_backend_name="CPU_ATTN+GDN_ATTN"),)}, {"attention_backend"}),
        ({"ranks": (payload(attn_backend_name="CPU_ATTN@2x1"),)}, {"context_parallel"}),
    ],
    ids=lambda value: str(sorted(value)) if isinstance(value, set) else str(value),
)
def test_what_changes_the_meaning_of_the_bytes_is_in_it(
    usual: Fingerprint, arguments: Mapping[str, Any], parts: set[str]
) -> None:
    assert differing(usual, of(**arguments)) == parts


def test_the_two_kinds_of_fp8_differ() -> None:
    assert differing(of(kv_cache_dtype="fp8"), of(kv_cache_dtype="fp8_e5m2")) == {"kv_dtype"}
    assert of(kv_cache_dtype="fp8") == of(kv_cache_dtype="fp8_e4m3")


def test_the_number_of_speculative_tokens_is_rows_of_the_convolution() -> None:
    two, three = (of(speculative_config={**SPECULATING, "num_speculative_tokens": number}) for number in (2, 3))
    assert (dict(two.parts)["state_shapes"], dict(three.parts)["state_shapes"]) == (
        "(384,5)+(2,64,64)",
        "(384,6)+(2,64,64)",
    )
    assert dict(three.parts)["speculative"] == "ngram:3"


MAY_DIFFER: Mapping[str, Mapping[str, Any]] = {
    "tensor-parallel size": {
        "tensor_parallel_size": 2,
        "ranks": (payload(ssm_sizes=(1152, 16384)), payload(ssm_sizes=(1152, 16384))),
    },
    "data-parallel size": {"data_parallel_size": 2},
    "memory": {"gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": 1 << 30},
    "number of blocks": {"num_gpu_blocks_override": 77, "ranks": (payload(num_blocks=77),)},
    "role": {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}},
    "lease": {
        "kv_transfer_config": {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"kv_lease_duration": 60},
        }
    },
    "engine and addresses": {"ranks": (payload(engine_id="another", kv_caches_base_addr=[4096], device_id=3),)},
    "served name": {"served_model_name": "another-name"},
    "sequences at once": {"max_num_seqs": 3},
    "chunk of a prefill": {"max_num_batched_tokens": 512, "enable_chunked_prefill": True},
    "longest sequence": {"max_model_len": 2048},
    "scheduler": {"scheduling_policy": "priority"},
    "eager": {"enforce_eager": True},
    "seed": {"seed": 7},
    "LoRA": {"enable_lora": True, "max_lora_rank": 64},
    "prefixes' hash": {"prefix_caching_hash_algo": "sha256_cbor"},
    "generation": {"generation_config": "vllm", "override_generation_config": {"temperature": 0.1}},
    "log-probabilities": {"max_logprobs": 3},
    "auto for a type that is the same": {"kv_cache_dtype": "bfloat16"},
    "an override that changes nothing": {"hf_overrides": {"num_experts_per_tok": 4}},
}


@pytest.mark.parametrize("arguments", MAY_DIFFER.values(), ids=MAY_DIFFER)
def test_what_two_nodes_may_differ_in_is_not_in_it(usual: Fingerprint, arguments: Mapping[str, Any]) -> None:
    assert differing(usual, of(**arguments)) == set()


def test_prefix_caching_may_differ_where_there_is_no_state() -> None:
    with_it, without = config(), config(enable_prefix_caching=False)
    dense = [cache_parts(one, cache_of(attention(one, 16))) for one in (with_it, without)]
    assert dense[0] == dense[1]
    assert dense[0]["cache_mode"] == dense[0]["state_layout"] == dense[0]["state_dtypes"] == NONE


def test_the_longest_sequence_is_no_block_size() -> None:
    """Without prefix caching a state group's block is as long as the longest sequence, in name only."""
    longer, shorter = (config(enable_prefix_caching=False, max_model_len=length) for length in (4096, 2048))
    assert cache_parts(longer, groups(longer)) == cache_parts(shorter, groups(shorter))


def test_heads_of_one_rank_do_not_count_and_dimensions_do() -> None:
    made = config()

    def parts(**other: Any) -> dict[str, str]:
        return cache_parts(made, cache_of(attention(made, 16, **other)))

    eight = {"hf_overrides": {"num_key_value_heads": 8, "num_attention_heads": 8}}
    ranks = [(config(tensor_parallel_size=ranks, **eight), 8 // ranks) for ranks in (1, 2, 8)]
    divided = [cache_parts(one, cache_of(attention(one, 16, num_kv_heads=heads))) for one, heads in ranks]
    assert divided == [divided[0]] * 3
    assert parts(head_size=128)["kv_shape"] != parts()["kv_shape"]
    assert parts(head_size_v=32)["kv_shape"] != parts()["kv_shape"]
    assert parts(sliding_window=512)["cache_groups"] == "FullAttention(512)"
    per_token = parts(kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD, dtype=torch.uint8, state_content_bytes=136)
    assert (per_token["kv_dtype"], per_token["kv_shape"]) == ("uint8:auto", "64+64=136B")


def test_the_order_of_groups_and_their_windows_count() -> None:
    made = config()
    full = attention(made, 16)
    window = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, sliding_window=1024)
    wider = replace(window, sliding_window=2048)
    kinds = [cache_parts(made, cache_of(*specs))["cache_groups"] for specs in ((full, window), (window, full))]
    assert kinds == ["FullAttention,SlidingWindow(1024)", "SlidingWindow(1024),FullAttention"]
    assert cache_parts(made, cache_of(full, wider))["cache_groups"] == "FullAttention,SlidingWindow(2048)"


def test_layers_of_several_shapes_in_one_group_all_count() -> None:
    made = config()
    one = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    other = replace(one, head_size=128)
    both = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": one, "b": other})
    parts = cache_parts(made, cache_of(both))
    assert (parts["kv_shape"], parts["cache_groups"]) == ("576+0=1152B/128+0=256B", "MLAAttention")


def test_a_model_of_many_groups_still_fits() -> None:
    made = config()
    window = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, sliding_window=1024)
    many = [replace(window, sliding_window=1024 + at) for at in range(40)]
    parts = cache_parts(made, cache_of(*many))
    assert Fingerprint.of(parts).parts
    assert parts["cache_groups"] != cache_parts(made, cache_of(*many[::-1]))["cache_groups"]


def test_lora_settings_that_change_an_adapter_s_work_differ() -> None:
    assert lora_settings(config()) == {}
    some = [lora_settings(config(enable_lora=True, **other)) for other in ({}, {"lora_target_modules": ["q_proj"]})]
    assert some[0] != some[1]
    assert some[0] == lora_settings(config(enable_lora=True, max_lora_rank=64, max_loras=2))
