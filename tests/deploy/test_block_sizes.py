"""Block sizes of hybrid models, computed as vLLM computes them."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from deploy.block_sizes import (  # fmt: skip
    Dtypes,
    Hybrid,
    UnknownModelError,
    block_size,
    block_sizes,
    common,
    exchanging,
    main,
    pairs,
    read,
    report,
)

FLOAT32 = Dtypes(mamba_ssm_cache="float32")
QWEN = {"architectures": ["Qwen3NextForCausalLM"], "dtype": "bfloat16", "num_hidden_layers": 4}
"""The rest is Qwen3-Next-80B-A3B's: 2 KV heads of 256, 16 and 32 linear heads of 128."""


def qwen(**more: Any) -> dict[str, Any]:
    """Its configuration."""
    config: dict[str, Any] = transformers.Qwen3NextConfig(**{**QWEN, **more}).to_dict()
    return config


def sizes(config: dict[str, Any], *tp: int, dtypes: Dtypes = FLOAT32, multiple: int = 16) -> dict[int, int]:
    return block_sizes(read(config, dtypes), tp, multiple)


def test_a_block_is_a_multiple_that_holds_the_state() -> None:
    assert block_size(token_bytes=1024, state_bytes=16 * 1024) == 16
    assert block_size(token_bytes=1024, state_bytes=16 * 1024 + 1) == 32
    assert block_size(token_bytes=1024, state_bytes=16 * 1024 + 1, multiple=256) == 256


def test_two_kv_heads_are_shared_by_two_gpus_and_repeated_beyond() -> None:
    """The facts that vLLM showed: 1,056 tokens at TP 2, 272 at TP 8."""
    found = sizes(qwen(), 1, 2, 4, 8)
    assert found == {1: 1056, 2: 1056, 4: 528, 8: 272}
    model = read(qwen(), FLOAT32)
    assert pairs(model, found) == [(1, 2)]
    assert exchanging(model, found) == [(1, 2, 4, 8)]
    assert common(found, [1, 8]) == 1056
    assert sizes(qwen(), 1, 2, 4, 8, multiple=1056) == dict.fromkeys((1, 2, 4, 8), 1056)


def test_speculative_tokens_lengthen_the_convolution() -> None:
    with_five = read(qwen(), FLOAT32, speculative_tokens=5)
    assert with_five.state_bytes(1) - read(qwen(), FLOAT32).state_bytes(1) == 5 * 8192 * 2
    assert block_sizes(with_five, [8]) == {8: 272}


def test_a_size_that_does_not_divide_the_heads_is_left_out() -> None:
    assert sizes(qwen(), 3, 32) == {}
    assert "3   impossible" in report(read(qwen(), FLOAT32), {}, [3])


def test_types_are_those_of_vllm_on_a_gpu() -> None:
    plain = read(qwen(), Dtypes())
    own = read({**qwen(), "model_type": "qwen3_5_moe", "mamba_ssm_dtype": "float32"}, Dtypes())
    assert own.recurrent_bytes == 2 * plain.recurrent_bytes == read(qwen(), FLOAT32).recurrent_bytes
    assert read(transformers.NemotronHConfig().to_dict(), Dtypes()).recurrent_bytes == 128 * 64 * 128 * 4
    assert read(qwen(), Dtypes(kv_cache="fp8")).head_bytes * 2 == plain.head_bytes
    assert read({"text_config": qwen(), "model_type": "outer"}, Dtypes()).recurrent_bytes == plain.recurrent_bytes
    assert read(qwen(dtype="float32"), Dtypes()).head_bytes == plain.head_bytes


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"model_type": "llama"}, "model_type 'llama' is not one of qwen3_next, qwen3_5"),
        ({"model_type": "jamba"}, "there is no 'mamba_expand' in it, which jamba models have"),
        ({"model_type": "qwen3_next", "dtype": "int4"}, "unknown types: int4; known are float32"),
    ],
)
def test_what_cannot_be_read_is_refused(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UnknownModelError) as unknown:
        read(config, Dtypes())
    assert sentence in str(unknown.value)


def test_what_an_operator_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(qwen()))
    assert main(["--model", str(tmp_path), "--tp", "2,1,8", "--mamba-ssm-cache-dtype", "float32"]) == 0
    assert capsys.readouterr().out == (
        "TP size   block size\n"
        "      1         1056\n"
        "      2         1056\n"
        "      8          272\n"
        "Different TP sizes that go together as they are: 1 and 2.\n"
        "All of these go together with --block-size 1056 on every node.\n"
    )
    assert main(["--model", str(tmp_path / "config.json"), "--tp", "1,8", "--block-size", "2112"]) == 0
    assert "--block-size" not in capsys.readouterr().out
    assert main(["--model", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


MAMBA2 = {
    "one group": (1, (1, 2, 4), [[1], [2], [4]]),
    "two groups": (2, (1, 2, 4, 8), [[1, 2], [4], [8]]),
    "eight groups": (8, (1, 2, 4, 8, 16), [[1, 2, 4, 8], [16]]),
}


def mamba2(groups: int) -> Hybrid:
    config = transformers.GraniteMoeHybridConfig(
        hidden_size=1024, mamba_n_heads=32, mamba_n_groups=groups, num_attention_heads=32, num_key_value_heads=16,
        intermediate_size=2048,
    )  # fmt: skip
    return read({**config.to_dict(), "dtype": "bfloat16"}, FLOAT32)


@pytest.mark.parametrize(("groups", "asked", "together"), MAMBA2.values(), ids=MAMBA2)
def test_sizes_for_which_groups_are_repeated_go_with_no_other(
    groups: int, asked: tuple[int, ...], together: list[list[int]]
) -> None:
    """As NIXL reads them (`tests/connector/test_peer_layouts.py`)."""
    model = mamba2(groups)
    found = block_sizes(model, asked, 4096)
    assert len(set(found.values())) == 1
    assert [list(tps) for tps in exchanging(model, found)] == together
    assert pairs(model, found) == [(one, other) for tps in together for one in tps for other in tps if one < other]


def test_no_block_size_is_advised_where_none_helps() -> None:
    one = report(mamba2(1), {1: 16, 2: 32}, [1, 2])
    alone = "goes with no other, whatever the block size"
    assert one.splitlines()[3:] == [
        "Different TP sizes that go together as they are: none.",
        f"TP size 1 {alone}: the others have more GPUs than the model has mamba groups (1).",
        f"TP size 2 {alone}: vLLM repeats the model's 1 mamba group for 2 GPUs.",
    ]
    eight = report(mamba2(8), {4: 16, 8: 32, 16: 48}, [4, 8, 16])
    assert "TP sizes 4 and 8 go together with --block-size 32 on every node.\n" in eight
    assert "TP size 16 goes with no other, whatever the block size: vLLM repeats the model's 8 mamba groups" in eight


# The same by vLLM's own code.


class Kernel:
    """The part of an attention backend that vLLM asks for this; FlashAttention's answers."""

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        from vllm.v1.attention.backend import MultipleOf

        return [MultipleOf(16)]

    @staticmethod
    def customize_spec(spec: Any) -> Any:
        return spec


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize(("ssm", "given"), [("float32", 0), ("bfloat16", 0), ("float32", 1056), ("float32", 512)])
def test_vllm_makes_the_same_blocks(tmp_path: Path, tp: int, ssm: str, given: int) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    (tmp_path / "config.json").write_text(json.dumps(qwen()))
    flags: dict[str, Any] = {"tensor_parallel_size": tp, "mamba_ssm_cache_dtype": ssm, "skip_tokenizer_init": True}
    config = EngineArgs(str(tmp_path), enable_prefix_caching=True, enforce_eager=True, **flags).create_engine_config()
    config.cache_config.block_size = given or 16  # a CPU's own default is another
    current_platform._align_hybrid_block_size(config, Kernel)
    assert sizes(qwen(), tp, dtypes=Dtypes(mamba_ssm_cache=ssm), multiple=max(16, given)) == {
        tp: config.cache_config.block_size
    }


def granite(hidden: int, heads: int) -> Any:
    """A Granite 4 of other sizes, its state of 128."""
    return transformers.GraniteMoeHybridConfig(hidden_size=hidden, mamba_n_heads=heads, mamba_d_state=128)


FAMILIES: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "qwen3_next": ("qwen3_next", "Qwen3NextForCausalLM", transformers.Qwen3NextConfig),
    "nemotron_h": ("nemotron_h", "NemotronHForCausalLM", transformers.NemotronHConfig),
    "granite": ("granitemoehybrid", "GraniteMoeHybridForCausalLM", transformers.GraniteMoeHybridConfig),
    "a small granite": ("granitemoehybrid", "GraniteMoeHybridForCausalLM", lambda: granite(1536, 48)),
    "falcon_h1": ("falcon_h1", "FalconH1ForCausalLM", transformers.FalconH1Config),
    "a falcon_h1 of expanded width": (
        "falcon_h1",
        "FalconH1ForCausalLM",
        lambda: transformers.FalconH1Config(mamba_d_ssm=None, hidden_size=4096),
    ),
    "jamba": ("jamba", "JambaForCausalLM", transformers.JambaConfig),
}
CASES = [(name, spec) for name in FAMILIES for spec in (0, 2) if not (name == "jamba" and spec)]
"""vLLM has no speculative tokens for Mamba-1."""


@pytest.mark.parametrize(("family", "spec"), CASES)
def test_vllm_keeps_the_same_state(family: str, spec: int) -> None:
    """`MambaSpec` over the shapes of the model's class; that code reads no more of vLLM's configuration than this."""
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    module, name, make = FAMILIES[family]
    hf = make()
    theirs = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name)
    mine = read({**hf.to_dict(), "dtype": "bfloat16"}, FLOAT32, spec)
    for tp in (1, 2, 4, 8):
        speculative = SimpleNamespace(num_speculative_tokens=spec) if spec else None
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(tensor_parallel_size=tp), speculative_config=speculative,
            num_speculative_tokens=spec, model_config=SimpleNamespace(hf_config=hf, hf_text_config=hf),
            cache_config=SimpleNamespace(use_replayssm=False), mamba_config=SimpleNamespace(use_replayssm=False),
        )  # fmt: skip
        shapes = theirs.get_mamba_state_shape_from_config(config)[:2]
        page = MambaSpec(shapes=shapes, dtypes=(torch.bfloat16, torch.float32), block_size=-1).page_size_bytes
        assert mine.state_bytes(tp) == page, tp


def test_kv_heads_are_divided_as_vllm_does() -> None:
    model = Hybrid(2, 1024, lambda _tp: 0, 0, 0, ())
    assert [model.token_bytes(tp) for tp in (1, 2, 4, 8)] == [2048, 1024, 1024, 1024]
