"""Nodes of tiny Mamba-2 models with random weights, on a CPU: Granite 4 with one group, Nemotron-H with two."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from deploy.local.node import PLUGINS, NodeSpec
from deploy.local.paths import MODEL, ROOT

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
METADATA = "Metadata-Version: 2.1\nName: cpu-mamba\nVersion: 1\n"
ENTRY_POINTS = "[vllm.general_plugins]\ncpu_mamba = tests.e2e.cpu_mamba:register\n"
COMMON: Mapping[str, Any] = {
    "vocab_size": 1024, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 256, "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip
REMEMBERS = (0.02, 0.3)
"""`A`, by which a state decays with each token: some hundred tokens show."""


def granite() -> Any:
    """One group."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    return GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(
            **COMMON, mamba_n_heads=4, mamba_d_head=64, mamba_n_groups=1, mamba_d_state=64, mamba_d_conv=4,
            mamba_expand=2, mamba_chunk_size=256, num_hidden_layers=3, num_local_experts=0, num_experts_per_tok=0,
            layer_types=["linear_attention", "linear_attention", "full_attention"], shared_intermediate_size=256,
            attention_multiplier=0.125, position_embedding_type="nope",
        )
    )  # fmt: skip


def nemotron_h() -> Any:
    """Two groups."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    return NemotronHForCausalLM(
        NemotronHConfig(
            **COMMON, layers_block_type=["mamba", "mamba", "attention", "mlp"], head_dim=64, ssm_state_size=64,
            mamba_num_heads=4, mamba_head_dim=64, n_groups=2, conv_kernel=4, expand=2, chunk_size=256,
            use_mamba_kernels=False,
        )
    )  # fmt: skip


def write_model(make: Callable[[], Any], folder: Path) -> Path:
    """Write a model with random weights of unit gain and decisive logits, and the tiny model's tokenizer."""
    torch.manual_seed(7)
    model = make().float().eval()
    for name, weights in model.named_parameters():
        _fill(name, weights.data)
    model.save_pretrained(folder)
    for each in TOKENIZER:
        shutil.copy(MODEL / each, folder)
    return folder


def _fill(name: str, weights: torch.Tensor) -> None:
    if name.endswith("A_log"):
        weights.copy_(torch.empty_like(weights).uniform_(*REMEMBERS).log())
    elif name.endswith("dt_bias"):
        weights.fill_(-2.0)
    elif "embed" in name:
        weights.normal_(0, 1)
    elif weights.dim() > 1:
        weights.normal_(0, (4 if "lm_head" in name else 1) / math.sqrt(weights.shape[-1]))
    elif name.endswith("bias"):
        weights.normal_(0, 0.1)


def mamba_node(spec: NodeSpec, model: Path, folder: Path) -> NodeSpec:
    """The node with this model; `folder`: for what makes the plugin known to it."""
    installed = folder / "cpu_mamba-1.dist-info"
    installed.mkdir(parents=True, exist_ok=True)
    (installed / "METADATA").write_text(METADATA, encoding="utf-8")
    (installed / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")
    paths = filter(None, (str(folder), str(ROOT), os.environ.get("PYTHONPATH")))
    environment = {"PYTHONPATH": os.pathsep.join(paths), "VLLM_PLUGINS": f"{PLUGINS},cpu_mamba"}
    return replace(
        spec,
        model=model,
        more_arguments=(*spec.more_arguments, "--dtype", "float32"),
        more_environment={**spec.more_environment, **environment},
    )
