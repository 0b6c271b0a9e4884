"""Models that fit on a GPU, held to published start-up logs and to vLLM's own arithmetic."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from deploy.block_sizes import Dtypes, UnknownModelError
from deploy.local.paths import MODEL
from deploy.memory import GIB, Fit, Flags, Layers, Model, fit, gpu_gib, known, layers, load, main, with_room

MOE, MOE_FP8 = "Qwen/Qwen3.6-35B-A3B", "Qwen/Qwen3.6-35B-A3B-FP8"
FP8_CACHE = Dtypes(kv_cache="fp8")


def with_cache(name: str, gib: float, flags: Flags) -> Fit:
    """A node whose log says "Available KV cache memory: … GiB"."""
    found = fit(load(name), 1000, flags)
    return replace(found, total=found.weights + found.reserved + round(gib * GIB))


# Published start-up logs: available GiB, then what vLLM made of it.

BLOCKS = {
    # Qwen3.5-9B on an L40S, vLLM 0.19: 165,792 tokens, which that version counted as a quarter of the blocks (one group
    # in four is attention).
    "9B on an L40S": ("Qwen/Qwen3.5-9B", 20.27, Flags(), 528, 4 * 165_792 // 528),
    # Qwen3.5-35B-A3B of one's own, bfloat16, on a GB10: 203,808 tokens, counted in the same way.
    "35B on a GB10": (MOE, 15.58, Flags(), 1056, 4 * 203_808 // 1056),
    # Qwen3.5-35B-A3B-FP8, --gpu-memory-utilization 0.9: 451,968 tokens, counted in the same way.
    "35B in FP8": (MOE_FP8, 34.56, Flags(), 1056, 4 * 451_968 // 1056),
}


@pytest.mark.parametrize(("name", "gib", "flags", "block", "blocks"), BLOCKS.values(), ids=BLOCKS)
def test_blocks_are_those_of_published_logs(name: str, gib: float, flags: Flags, block: int, blocks: int) -> None:
    found = with_cache(name, gib, flags)
    assert found.block_size == block
    assert blocks <= found.blocks <= blocks + 3, "the log rounds down to four blocks"


AT_ONCE = {
    # Qwen3.6-35B-A3B on a GH200: "GPU KV cache size: 560,505 tokens", "17.11x" for 32,768 tokens.
    "GH200": (MOE, 13.1, Flags(max_model_len=32768), "17.11", 560_505),
    # noonghunna/club-3090#652, #612: 35B-A3B in NVFP4 with an FP8 cache on a 5090, vLLM 0.24, 131,072 tokens.
    "5090": (MOE, 6.01, Flags(max_model_len=131_072, dtypes=FP8_CACHE), "4.35", 569_878),
    "5090 again": (MOE, 5.98, Flags(max_model_len=131_072, dtypes=FP8_CACHE), "4.33", 567_978),
}


@pytest.mark.parametrize(("name", "gib", "flags", "said", "tokens"), AT_ONCE.values(), ids=AT_ONCE)
def test_concurrency_is_that_of_published_logs(name: str, gib: float, flags: Flags, said: str, tokens: int) -> None:
    found = with_cache(name, gib, flags)
    assert f"{found.at_once:.2f}" == said
    assert int(found.at_once * flags.max_model_len) == pytest.approx(tokens, rel=0.0016)


LOG = Path(__file__).with_name("data") / "start-h100-vllm-0.33.0.log"
"""Lines of a start of ours: the tiny model on an H100, compose.yaml's command, `--gpu-memory-utilization 0.2`."""


REFUSED = LOG.with_name("start-h100-qwen3.6-35b-a3b.log")
"""Lines of another: Qwen3.6-35B-A3B's text model in bfloat16, weights made up, vLLM's own `--max-num-seqs`."""


def said(pattern: str, log: Path = LOG) -> str:
    """The log's words there."""
    [found] = re.findall(pattern, log.read_text(encoding="utf-8"))
    return str(found)


def test_what_vllm_refused_on_a_gpu_is_refused_here() -> None:
    """The default model of earlier releases, on the GPU that they named."""
    flags = Flags(max_num_seqs=1024, max_model_len=32768, text_only=True)
    found = with_cache(MOE, float(said(r"cache memory: ([\d.]+) GiB", REFUSED)), flags)
    assert found.block_size == int(said(r"block size to (\d+) tokens", REFUSED))
    most = said(r"at most (\d+)", REFUSED)
    assert found.refusals() == [f"--max-num-seqs 1024: the cache has {most} blocks, take no more"]
    assert f"{found.at_once:.2f}" == said(r"request: ([\d.]+)x", REFUSED)
    assert int(found.at_once * 32768) == int(said(r"size: ([\d,]+) tokens", REFUSED).replace(",", ""))
    assert [each.split(":")[0] for each in fit(load(MOE), 79.18, flags).refusals()] == ["--max-num-seqs 1024"]


def test_a_start_on_a_gpu_is_as_computed() -> None:
    total, available = float(said(r"/([\d.]+) GiB\) on startup")), float(said(r"cache memory: ([\d.]+) GiB"))
    flags = Flags(max_num_seqs=256, max_model_len=4096, gpu_memory=0.2)
    found = fit(load(str(MODEL)), total, flags)
    assert total == pytest.approx(gpu_gib(80), abs=0.1)
    assert found.block_size == int(said(r"block size to (\d+) tokens"))
    blocks, tokens = int(said(r"num_gpu_blocks=(\d+)")), int(said(r"cache size: ([\d,]+) tokens").replace(",", ""))
    assert blocks * found.block_bytes / GIB == pytest.approx(available, abs=0.006)
    kept = int(said(r"num_gpu_blocks_override=(\d+)"))
    assert int(kept / found.request_blocks * flags.max_model_len) == tokens
    used = sum(float(each) for each in re.findall(r"([\d.]+) GiB for", LOG.read_text(encoding="utf-8")))
    assert used < (found.reserved + found.weights) / GIB < used + 2, "an upper estimate"


STARTED = {
    # Tiny models of two mamba layers and one of attention on an H100, vLLM 0.33.0: 1,024 blocks, requests of 4,096
    # tokens.
    "Granite-4, Mamba-2": (Layers(1, 2, 1), 144, "29.26"),
    "Jamba, Mamba-1": (Layers(1, 2), 48, "11.38"),
}


@pytest.mark.parametrize(("kept", "block", "said"), STARTED.values(), ids=STARTED)
def test_a_request_takes_as_many_blocks_as_on_a_gpu(kept: Layers, block: int, said: str) -> None:
    found = Fit(Flags(max_model_len=4096), 1024, 0, 0, block, 1, kept.state_blocks(), kept.attention_groups)
    assert (found.blocks, f"{found.at_once:.2f}") == (1024, said)


def test_block_sizes_are_those_of_published_logs() -> None:
    """Qwen3.8-27B, of Qwen3.6-27B's layers, with an FP8 cache (noonghunna/club-3090#1047); granite-4.0-h-small."""
    assert fit(load("Qwen/Qwen3.6-27B"), 80, Flags(dtypes=FP8_CACHE)).block_size == 1568
    assert fit(load("ibm-granite/granite-4.0-h-small"), 80, Flags()).block_size == 528
    assert fit(load(MOE), 80, Flags(tp=2)).block_size == 1056


WEIGHTS = {
    # "Model loading took", or "GiB for weight". At TP 4 with a draft model of its own (vllm#50722).
    "9B": ("Qwen/Qwen3.5-9B", Flags(), 17.66),
    "35B": (MOE, Flags(), 65.53),
    "35B at TP 4, and a draft model": (MOE, Flags(tp=4), 16.92),
    "35B in FP8": (MOE_FP8, Flags(), 34.22),
    "35B in FP8, by Marlin's kernels": (MOE_FP8, Flags(), 34.71),
    # Of text alone, on an H100 (the log beside; another start).
    "35B, text alone": (MOE, Flags(), 64.61),
    "35B in FP8, text alone": (MOE_FP8, Flags(), 33.3),
}


@pytest.mark.parametrize(("name", "flags", "loaded"), WEIGHTS.values(), ids=WEIGHTS)
def test_weights_are_an_upper_estimate_of_published_logs(name: str, flags: Flags, loaded: float) -> None:
    found = fit(load(name), 80, flags).weights / GIB
    assert loaded * 0.985 < found < loaded * 1.05


RESERVED = {
    # 0.9 of 44.39 GiB of an L40S less weights and cache, and the graphs that vLLM 0.19 did not count yet.
    "9B on an L40S": ("Qwen/Qwen3.5-9B", Flags(max_num_seqs=256), 44.39 * 0.9 - 17.66 - 20.27 + 0.65),
    # vllm#50722, with drafts: peak activation, other memory, CUDA graphs; --max-num-seqs as by default on 80 GB.
    "35B at TP 4": (MOE, Flags(tp=4, max_num_seqs=1024, speculative_tokens=7), 5.66 + 0.13 + 1.34),
    # Of text alone on an H100 (the log beside): what --gpu-memory-utilization 0.92 allows, less weights and cache.
    "35B on an H100": (MOE, Flags(max_num_seqs=1024, text_only=True), 79.18 * 0.92 - 64.61 - 3.81),
}


@pytest.mark.parametrize(("name", "flags", "taken"), RESERVED.values(), ids=RESERVED)
def test_what_is_reserved_is_an_upper_estimate_of_published_logs(name: str, flags: Flags, taken: float) -> None:
    assert taken < fit(load(name), 80, flags).reserved / GIB < taken + 2


def test_the_refusal_that_others_met() -> None:
    """rwlove/home-ops#13226: 131,072 tokens, an FP8 cache of 95 blocks, and the default of 256 sequences."""
    found = with_cache(MOE, 1.9, Flags(max_num_seqs=256, max_model_len=131_072, dtypes=FP8_CACHE))
    assert found.blocks == 95
    assert found.refusals() == ["--max-num-seqs 256: the cache has 95 blocks, take no more"]


# vLLM's own code.


@pytest.mark.parametrize("name", known())
@pytest.mark.parametrize("tp", [1, 2])
def test_vllm_makes_the_same_blocks_of_the_same_memory(name: str, tp: int) -> None:
    """`get_kv_cache_groups` and `get_kv_cache_config_from_groups` over specs of the sizes that are computed here."""
    import torch
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    found, kept = fit(load(name), 79.1, Flags(tp=tp, max_num_seqs=32)), layers(load(name).config)
    if found.blocks == 0:
        pytest.skip("weights leave no room: nothing to divide")
    page = found.block_bytes // kept.in_group
    attention = FullAttentionSpec(
        block_size=found.block_size, num_kv_heads=1, head_size=page // found.block_size // 4, dtype=torch.bfloat16
    )
    assert attention.page_size_bytes == page
    state = MambaSpec(
        shapes=((8,),), dtypes=(torch.float32,), block_size=found.block_size, page_size_padded=page,
        mamba_cache_mode="align", num_prefill_checkpoint_blocks=kept.checkpoints,
    )  # fmt: skip
    specs = {f"attention.{each}": attention for each in range(kept.attention)}
    specs |= {f"mamba.{each}": state for each in range(kept.mamba)}
    groups = kv_cache_utils._get_kv_cache_groups_uniform_page_size(specs)
    assert len(groups) == kept.attention_groups + kept.mamba_groups
    config: Any = vllm_config(found.flags.max_model_len)
    made = kv_cache_utils.get_kv_cache_config_from_groups(config, groups, found.cache)
    assert made.num_blocks == found.blocks
    assert kv_cache_utils.get_max_concurrency_for_kv_cache_config(config, made) == pytest.approx(found.at_once)


def vllm_config(max_model_len: int) -> SimpleNamespace:
    """As much of vLLM's configuration as that code reads."""
    from vllm.config import CacheConfig

    cache = CacheConfig(mamba_cache_mode="align")
    cache.kv_cache_layout = "LBHNC"
    return SimpleNamespace(
        cache_config=cache,
        model_config=SimpleNamespace(max_model_len=max_model_len),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        attention_config=SimpleNamespace(hisparse_config=None),
    )


def test_layers_are_read_from_each_familys_configuration() -> None:
    assert layers(transformers.JambaConfig().to_dict()) == Layers(4, 28)
    assert layers(transformers.FalconH1Config(num_hidden_layers=6).to_dict()) == Layers(6, 6, 1)
    assert layers(transformers.Qwen3NextConfig().to_dict()) == Layers(12, 36)
    hybrid = transformers.NemotronHConfig(layers_block_type=["mamba", "moe", "attention", "mamba"])
    assert layers(hybrid.to_dict()) == Layers(1, 2, 1)
    with pytest.raises(UnknownModelError, match="does not say which layers"):
        layers({"model_type": "granitemoehybrid", "num_hidden_layers": 4})


@pytest.mark.parametrize(
    ("name", "causal"), [(MOE, "Qwen3_5MoeForCausalLM"), ("Qwen/Qwen3.6-27B", "Qwen3_5ForCausalLM"),
                         ("Qwen/Qwen3.5-9B", "Qwen3_5ForCausalLM")],
)  # fmt: skip
def test_listed_sizes_are_those_of_the_listed_configurations(name: str, causal: str) -> None:
    """The sizes are those of transformers' model of the configuration, but for up to 5 % of images and drafts."""
    import torch

    text = known()[name]["config"]["text_config"]
    make = getattr(transformers, causal)
    with torch.device("meta"):
        model = make(make.config_class(**{k: v for k, v in text.items() if k not in ("model_type", "mamba_ssm_dtype")}))
    counted = 2 * sum(each.numel() for each in model.parameters())
    assert counted < known()[name]["bytes"] < counted * 1.09


# The command.


def folder(tmp_path: Path, name: str) -> Path:
    """A folder with the two small files of a model."""
    (tmp_path / "config.json").write_text(json.dumps(known()[name]["config"]))
    index = {"metadata": {"total_size": float(known()[name]["bytes"])}, "weight_map": {}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_a_gpu_that_is_too_small_is_refused_with_the_flags_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(folder(tmp_path, MOE_FP8)), "--max-num-seqs", "256"]
    assert main([*words, "--tp", "1,2", "--gpu", "80"]) == 0
    assert capsys.readouterr().out.count("starts\n") == 2
    assert main([*words, "--tp", "1", "--gpu", "24"]) == 1
    assert "--tensor-parallel-size 1: of 20.6 GiB that --gpu-memory-utilization 0.92 allows" in capsys.readouterr().out
    assert main([*words, "--tp", "1", "--gpu", "48"]) == 1
    assert "--max-num-seqs 256: the cache has 109 blocks, take no more" in capsys.readouterr().out
    assert main([*words, "--tp", "1", "--gpu", "48", "--max-num-seqs", "64", "--max-model-len", "262144"]) == 1
    assert "--max-model-len 262144: the cache holds " in capsys.readouterr().out


def test_what_cannot_be_read_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err
    (folder(tmp_path, MOE) / "model.safetensors.index.json").unlink()
    assert main(["--model", str(tmp_path)]) == 2
    assert "neither model.safetensors.index.json nor a *.safetensors file" in capsys.readouterr().err
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    assert load(str(tmp_path)).total == 1000
    assert main(["--model", MOE, "--tp", "3"]) == 2
    assert "--tensor-parallel-size 3 does not divide the model's heads" in capsys.readouterr().err


def test_experts_are_cut_over_all_ranks_and_the_rest_is_not() -> None:
    one, four = (fit(load(MOE), 80, Flags(dp=dp)).weights for dp in (1, 4))
    assert one == load(MOE).total
    experts = 40 * 256 * 3 * 512 * 2048 * 2
    assert four == one - experts + experts // 4


def test_a_node_near_the_edge_starts_but_not_with_room() -> None:
    model, flags = Model(load(MOE).config, load(MOE).total), Flags(max_num_seqs=64, max_model_len=4096)
    edge = next(gib / 10 for gib in range(700, 900) if not fit(model, gib / 10, flags).refusals())
    assert with_room(model, edge, flags).refusals()
    assert not with_room(model, edge * 1.06, flags).refusals()
