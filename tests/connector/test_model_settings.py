"""Which settings in a model's configuration are in its fingerprint, and which are not."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest

from connector.fingerprint import (
    LONGEST_VALUE,
    NONE,
    Fingerprint,
    context_text,
    model_digest,
    quantization_text,
    rope_text,
    settings_text,
    short,
)

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_next",
    "hidden_size": 128,
    "layer_types": ["linear_attention", "full_attention"],
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.25},
    "transformers_version": "5.19.0",
    "_name_or_path": "/models/one",
    "dtype": "bfloat16",
    "sliding_window": None,
    "vision_config": {"depth": 27, "rope_theta": 10000},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "partial_rotary_factor": 0.25}


def changed(**other: Any) -> dict[str, Any]:
    return {**CONFIG, **other}


def of(config: dict[str, Any]) -> str:
    return model_digest(config, {})


@pytest.mark.parametrize(
    "other",
    [
        {"hidden_size": 256},
        {"layer_types": ["full_attention", "linear_attention"]},
        {"sliding_window": 1024},
        {"vision_config": {"depth": 28, "rope_theta": 10000}},
        {"new": False},
    ],
)
def test_what_shapes_a_computation_counts(other: dict[str, Any]) -> None:
    assert of(changed(**other)) != of(CONFIG)


@pytest.mark.parametrize(
    "other",
    [
        {"_name_or_path": "/models/two"},
        {"transformers_version": "5.20.0"},
        {"dtype": "float16"},
        {"torch_dtype": "float16"},
        {"hidden_size": 128.0},
        {"sliding_window_2": None},
        {"max_model_len": 8192},
        {"quantization_config": {"quant_method": "fp8"}},
        {"rope_parameters": YARN},
        {"max_position_embeddings": 8192},
        {"layer_types": ("linear_attention", "full_attention")},
    ],
)
def test_where_it_came_from_and_what_has_a_part_of_its_own_does_not(other: dict[str, Any]) -> None:
    assert of(changed(**other)) == of(CONFIG)


def test_settings_beside_the_configuration_count() -> None:
    assert model_digest(CONFIG, {"disable_sliding_window": True}) != model_digest(
        CONFIG, {"disable_sliding_window": False}
    )


def test_rope_is_legible() -> None:
    assert rope_text({**CONFIG, "vision_config": {}}) == (
        "max_position_embeddings=4096,partial_rotary_factor=0.25,rope_theta=10000,rope_type=default"
    )
    assert rope_text({"hidden_size": 1}) == NONE


@pytest.mark.parametrize(
    "other",
    [
        {"rope_parameters": YARN},
        {"rope_parameters": {"rope_theta": 10001.0}},
        {"rope_scaling": {"type": "linear", "factor": 2}},
        {"rope_theta": 5},
        {"max_position_embeddings": 8192},
        {"rope_parameters": {"full": {"rope_theta": 10000.0}, "sliding": {"rope_theta": 500000.0}}},
        {"vision_config": {"depth": 27, "rope_theta": 20000}},
        {"rope_parameters": {**YARN, "short_factor": [1.0, 2.0]}},
    ],
)
def test_every_rope_setting_counts_wherever_it_stands(other: dict[str, Any]) -> None:
    assert rope_text(changed(**other)) != rope_text(CONFIG)


def test_windows_of_two_layers_keep_their_ropes_apart() -> None:
    one = {"full": {"rope_theta": 1e4}, "sliding": {"rope_theta": 5e5}}
    other = {"full": {"rope_theta": 5e5}, "sliding": {"rope_theta": 1e4}}
    assert rope_text(changed(rope_parameters=one)) != rope_text(changed(rope_parameters=other))


def test_the_longest_context_counts_only_where_a_model_computes_by_it() -> None:
    assert context_text(CONFIG, 1024) == context_text(CONFIG, 1 << 20) == NONE
    longrope = changed(rope_parameters={"rope_type": "longrope", "original_max_position_embeddings": 4096})
    assert [context_text(longrope, length) for length in (4096, 4097, 131072)] == ["short", "long", "long"]
    older = {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096}
    assert [context_text(older, length) for length in (4096, 4097)] == ["short", "long"]
    llama = changed(model_type="llama4_text")
    assert [context_text(llama, length) for length in (32768, 32769)] == ["short", "long"]


class Scheme(Enum):
    STATIC = 1
    DYNAMIC = 2


@dataclass(frozen=True)
class QuantizationConfig:
    linear: str
    scheme: Scheme


def test_quantization_counts_with_its_settings() -> None:
    fp8 = {"quant_method": "fp8", "activation_scheme": "static"}
    values = [
        quantization_text(None, None, None),
        quantization_text("fp8", None, None),
        quantization_text("fp8", None, fp8),
        quantization_text("fp8", fp8, None),
        quantization_text("fp8", None, {**fp8, "activation_scheme": "dynamic"}),
        quantization_text("awq", None, fp8),
        quantization_text("fp8", QuantizationConfig("fp8", Scheme.STATIC), fp8),
        quantization_text("fp8", QuantizationConfig("int8", Scheme.STATIC), fp8),
        quantization_text("fp8", QuantizationConfig("int8", Scheme.DYNAMIC), fp8),
    ]
    assert len(set(values)) == len(values)
    assert values[0] == NONE
    assert values[1] == "fp8"
    assert quantization_text("fp8", {}, dict(reversed(fp8.items()))) == values[2]


def test_what_vllm_adds_to_the_quantization_while_it_loads_does_not_count() -> None:
    """The setting is in the scheduler's configuration only where the worker shares its process."""
    saved = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["Linear"]}}}
    added = {**saved, "total_num_heads": 16, "total_num_kv_heads": 2}
    assert quantization_text("compressed-tensors", None, saved) == quantization_text("compressed-tensors", None, added)


def test_settings_that_are_left_alone_are_none() -> None:
    assert settings_text({"a": None, "b": {}, "c": 0}) == NONE
    assert settings_text({"a": {"b": 1}}) != settings_text({"a": {"b": 2}})


@pytest.mark.parametrize("text", ["", "x" * 200, "a b", "ü", "x" * 127 + "ü", "line\nend"])
def test_whatever_a_value_is_another_node_reads_it(text: str) -> None:
    assert len(short(text)) <= LONGEST_VALUE
    assert Fingerprint.of({"part": short(text)}).parts


def test_values_that_are_made_legible_stay_different() -> None:
    assert len({short(text) for text in ("a b", "a_b", "a\tb", "x" * 200, "x" * 201)}) == 5
