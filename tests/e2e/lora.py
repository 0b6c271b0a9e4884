"""LoRA adapters for a model of attention alone: two of other content, with which it answers as it does without.

`negating` turns the sign of the attention's values and, after them, of what the next projection makes of them: the
answers stay, the cached values are others. `silent` adds nothing. What one has cached is wrong for the other.

A hybrid model with experts cannot run with LoRA on a CPU: vLLM 0.32 and 0.33 then compute its experts with Triton
(`fused_moe/oracle/unquantized.py`), and the first request ends the engine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RANK = 128
"""What it takes to negate the widest projection exactly."""
MODULES = ("v_proj", "o_proj")


def arguments(adapters: dict[str, Path]) -> tuple[str, ...]:
    """A node's flags for these adapters, by the names under which clients ask for them."""
    modules = (f"{name}={folder}" for name, folder in adapters.items())
    return ("--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "4", "--lora-modules", *modules)


def silent(folder: Path, model: Path) -> Path:
    """An adapter that adds zero to every weight that it names."""
    return _write(folder, model, 0.0)


def negating(folder: Path, model: Path) -> Path:
    """An adapter that takes twice the weight away, which leaves its negative."""
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
    """`up @ down` is `times` the weight, which has no more rows than RANK: it is itself one of the factors."""
    import torch

    rows = weight.shape[0]
    down = torch.zeros(RANK, weight.shape[1], dtype=weight.dtype)
    down[:rows] = weight
    up = torch.zeros(rows, RANK, dtype=weight.dtype)
    up[:, :rows] = times * torch.eye(rows)
    return down, up
