"""Tiny models with random weights, one for each hybrid architecture that is handed over, and CPU nodes that serve them.

A model has two layers with a state and one with attention. Its logits are decisive and its states remember a few
hundred tokens, so that a lost state shows in the next token.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from deploy.local.node import PLUGINS, NodeSpec
from deploy.local.paths import MODEL, ROOT
from tests.e2e.cpu_mamba import TEXT_ONLY

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
METADATA = "Metadata-Version: 2.1\nName: cpu-mamba\nVersion: 1\n"
ENTRY_POINTS = """[vllm.general_plugins]
cpu_mamba = tests.e2e.cpu_mamba:register
cpu_kimi = tests.e2e.cpu_kimi:register
"""
COMMON: Mapping[str, Any] = {
    "vocab_size": 1024, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 256, "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip
MAMBA_2: Mapping[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 64, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 256,
}  # fmt: skip
REMEMBERS = (0.02, 0.3)
"""Range of `A`, by which a state decays with each token: a few hundred tokens show."""


def granite() -> Any:
    """Mamba-2 with one group."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    return GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(
            **COMMON, **MAMBA_2, num_hidden_layers=3, num_local_experts=0, num_experts_per_tok=0,
            layer_types=["linear_attention", "linear_attention", "full_attention"], shared_intermediate_size=256,
            attention_multiplier=0.125, position_embedding_type="nope",
        )
    )  # fmt: skip


def nemotron_h() -> Any:
    """Mamba-2 with two groups."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    return NemotronHForCausalLM(
        NemotronHConfig(
            **COMMON, layers_block_type=["mamba", "mamba", "attention", "mlp"], head_dim=64, ssm_state_size=64,
            mamba_num_heads=4, mamba_head_dim=64, n_groups=2, conv_kernel=4, expand=2, chunk_size=256,
            use_mamba_kernels=False,
        )
    )  # fmt: skip


def falcon_h1() -> Any:
    """Mamba-2 and attention side by side in every layer."""
    from transformers import FalconH1Config, FalconH1ForCausalLM

    return FalconH1ForCausalLM(FalconH1Config(**COMMON, **MAMBA_2, num_hidden_layers=2, mamba_d_ssm=256, head_dim=64))


def jamba() -> Any:
    """Mamba-1."""
    from transformers import JambaConfig, JambaForCausalLM

    return JambaForCausalLM(
        JambaConfig(
            **COMMON, num_hidden_layers=3, attn_layer_period=3, attn_layer_offset=2, num_experts=1,
            num_experts_per_tok=1, expert_layer_period=2, expert_layer_offset=1, mamba_d_state=16, mamba_d_conv=4,
            mamba_expand=2, use_mamba_kernels=False,
        )
    )  # fmt: skip


def lfm2() -> Any:
    """Short convolutions, whose states NIXL does not move."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    return Lfm2ForCausalLM(
        Lfm2Config(
            **{**COMMON, "tie_word_embeddings": True}, num_hidden_layers=3, conv_L_cache=3, conv_dim=128,
            layer_types=["conv", "conv", "full_attention"], block_auto_adjust_ff_dim=False, conv_dim_out=128,
            block_dim=128, block_ff_dim=256,
        )
    )  # fmt: skip


TEXT: Mapping[str, Any] = {
    **COMMON, "num_hidden_layers": 3, "head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_interleaved": True,
        "mrope_section": [6, 5, 5],
    },
}  # fmt: skip
VISION: Mapping[str, Any] = {
    "depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128,
    "num_position_embeddings": 16, "patch_size": 16,
}  # fmt: skip
MARKS: Mapping[str, Any] = {
    "image_token_id": 1020, "video_token_id": 1021, "vision_start_token_id": 1022, "vision_end_token_id": 1023,
}  # fmt: skip


EXPERTS: Mapping[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
}  # fmt: skip


def qwen3_next() -> Any:
    """Gated delta nets, with experts."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    return Qwen3NextForCausalLM(Qwen3NextConfig(**{**TEXT, "rope_parameters": rope}, **EXPERTS))


def qwen3_5() -> Any:
    """Gated delta nets, in the multimodal class that checkpoints name."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config={**TEXT}, vision_config={**VISION}, **MARKS))


def qwen3_5_moe() -> Any:
    """The same with experts, as Qwen3.6-35B-A3B has them."""
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    text = {**TEXT, **EXPERTS}
    return Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(text_config=text, vision_config={**VISION}, **MARKS))


def kimi_linear() -> Any:
    """Kimi delta attention, whose states decay by channel, and multi-head latent attention; with experts."""
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    kept = {"num_heads": 2, "head_dim": 64, "short_conv_kernel_size": 4}
    return KimiLinearForCausalLM(
        KimiLinearConfig(
            **{**COMMON, "num_key_value_heads": 2}, num_hidden_layers=3, kv_lora_rank=256, qk_nope_head_dim=64,
            qk_rope_head_dim=64, v_head_dim=64, mla_use_nope=True, num_experts=4, num_experts_per_token=4,
            moe_intermediate_size=64, num_shared_experts=1, first_k_dense_replace=0,
            linear_attn_config={**kept, "kda_layers": [1, 2], "full_attn_layers": [3]},
        )
    )  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A family of models. `make`: makes the tiny model.

    `dtype`: of the nodes; vLLM's CPU kernels of gated delta nets take only bfloat16. `rounding`: nats by which a
    log-probability may be off for that. `refused`: the part of the fingerprint for which nodes of one and of two ranks
    refuse each other. `plugin`: replaces what vLLM's CPU build lacks.
    """

    name: str
    make: Callable[[], Any]
    dtype: str = "float32"
    rounding: float = 1e-4
    refused: str | None = None
    arguments: tuple[str, ...] = ()
    plugin: str = "cpu_mamba"


GRANITE = Family("Granite-4", granite, refused="state_groups")
NEMOTRON_H = Family("Nemotron-H", nemotron_h)
FALCON_H1 = Family("Falcon-H1", falcon_h1, refused="state_groups")
JAMBA = Family("Jamba", jamba)
LFM2 = Family("LFM2", lfm2)
QWEN3_NEXT = Family("Qwen3-Next", qwen3_next, "bfloat16", rounding=0.25)
QWEN3_5 = Family("Qwen3.5", qwen3_5, "bfloat16", rounding=0.25, arguments=(TEXT_ONLY,))
KIMI_LINEAR = Family("Kimi-Linear", kimi_linear, plugin="cpu_kimi")
QWEN3_5_MOE = Family("Qwen3.6-MoE", qwen3_5_moe, "bfloat16", rounding=0.25, arguments=(TEXT_ONLY,))


def write_model(family: Family, folder: Path) -> Path:
    """Write a family's model with random weights of unit gain and the repository's tokenizer. Returns its folder."""
    torch.manual_seed(7)
    model = family.make().float().eval()
    for name, weights in model.named_parameters():
        _fill(name, weights.data)
    model.save_pretrained(folder)
    for each in TOKENIZER:
        shutil.copy(MODEL / each, folder)
    return folder


def _fill(name: str, weights: torch.Tensor) -> None:
    if name.endswith("A_log"):
        weights.copy_(torch.empty_like(weights).uniform_(*REMEMBERS).log())
    elif name.endswith(("dt_bias", "dt_proj.bias")):
        weights.fill_(-2.0)
    elif "embed" in name:
        weights.normal_(0, 1)
    elif weights.dim() > 1:
        gain = 4 if "lm_head" in name else 0.3 if "dt_proj" in name else 1
        weights.normal_(0, gain / math.sqrt(weights.shape[-1]))
    elif name.endswith("bias"):
        weights.normal_(0, 0.1)


def family_node(spec: NodeSpec, family: Family, model: Path, folder: Path) -> NodeSpec:
    """A node with this model. `folder`: for the metadata by which vLLM finds the plugin."""
    installed = folder / "cpu_mamba-1.dist-info"
    installed.mkdir(parents=True, exist_ok=True)
    (installed / "METADATA").write_text(METADATA, encoding="utf-8")
    (installed / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")
    paths = filter(None, (str(folder), str(ROOT), os.environ.get("PYTHONPATH")))
    environment = {"PYTHONPATH": os.pathsep.join(paths), "VLLM_PLUGINS": f"{PLUGINS},{family.plugin}"}
    return replace(
        spec,
        model=model,
        more_arguments=(*spec.more_arguments, "--dtype", family.dtype, *family.arguments),
        more_environment={**spec.more_environment, **environment},
    )
