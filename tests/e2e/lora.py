"""LoRA adapters for a model of attention alone. The model answers the same with them; the cached values differ.

`negating` changes the sign of the attention's values, and the next projection changes it back. `silent` adds nothing.
Blocks of one are wrong for the other.

A hybrid model with experts cannot run with LoRA on a CPU: vLLM 0.32 and 0.33 compute its experts with Triton then
(`fused_moe/oracle/unquantized.py`), and the first request ends the engine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RANK = 128
"""Enough to negate the widest projection exactly."""
MODULES = ("v_proj", "o_proj")


def arguments(adapters: dict[str, Path]) -> tuple[str, ...]:
    """A node's flags for these adapters, by the names that clients use."""
    modules = (f"{name}={folder}" for name, folder in adapters.items())
    return ("--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "4", "--lora-modules", *modules)


def silent(folder: Path, model: Path) -> Path:
    """An adapter that adds zero to every weight that it names."""
    return _write(folder, model, 0.0)


def negating(folder: Path, model: Path) -> Path:
    """An adapter that subtracts each weight twice, which leaves its negative."""
    return _write(folder, model, -2.0)


def _write(folder: Path, model: Path, times: float) -> Path:
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True)
    tensors: dict[str, Any] = {}
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(tuple(f"self_attn.{each}" for each in MODULES)):
            down, up = _factors(weight, times)
            tensors[f"base_model.model.{module}.lora_A.weight"] = down
            tensors[f"base_model.model.{module}.lora_B.weight"] = up
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(MODULES), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _factors(weight: Any, times: float) -> tuple[Any, Any]:
    """Factors with `up @ down == times * weight`: the weight, which has at most RANK rows, is one of them."""
    import torch

    rows = weight.shape[0]
    down = torch.zeros(RANK, weight.shape[1], dtype=weight.dtype)
    down[:rows] = weight
    up = torch.zeros(rows, RANK, dtype=weight.dtype)
    up[:, :rows] = times * torch.eye(rows)
    return down, up
