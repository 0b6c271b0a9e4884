"""Decode nodes that differ from the usual prefill node in one thing. Alone each of them answers right.

A hand-over between the two gives wrong answers, although the blocks are held and the transfer succeeds: only a
comparison of what the bytes mean finds it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deploy.local.node import NodeSpec, Role
from deploy.local.paths import MODEL

WEIGHTS = "model.safetensors"
BLOCK_256 = ("--block-size", "256")
"""Given explicitly where another flag would change it, so that the two nodes differ in that flag alone."""
OTHER_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
"""Rotates half of each head's dimensions instead of a quarter. With another theta alone, a model this small still
answers right from the other node's blocks."""

Weights = dict[str, Any]


@dataclass(frozen=True)
class Oddity:
    """One difference. `part`: of the fingerprint. `flag`: the flag that the refusal tells an operator to align.

    `weights`: changes the checkpoint; None leaves it as it is. `seeds`: of questions that the odd node answers right
    alone, and wrong from the usual prefill node's blocks.
    """

    name: str
    part: str
    flag: str
    arguments: tuple[str, ...] = ()
    weights: Callable[[Weights], None] | None = None
    seeds: Sequence[int] = range(900, 904)

    def spec(self, model: Path = MODEL) -> NodeSpec:
        """The odd node; its ports are chosen later."""
        return NodeSpec("odd", Role.DECODE, 0, 0, model=model, more_arguments=self.arguments)


@dataclass(frozen=True)
class OnePath:
    """One path that serves one model after another, as when an operator replaces it. vLLM's handshake compares paths,
    so that nodes with two paths would not be paired."""

    folder: Path

    def usual(self) -> Path:
        """The path, now with the usual model."""
        return self._points_to(MODEL)

    def changed(self, change: Callable[[Weights], None]) -> Path:
        """The path, now with other weights. Running nodes keep the weights that they have loaded."""
        return self._points_to(changed_model(self.folder / "changed", change))

    def _points_to(self, model: Path) -> Path:
        link = self.folder / "model"
        link.unlink(missing_ok=True)
        link.symlink_to(model)
        return link


def changed_model(folder: Path, change: Callable[[Weights], None]) -> Path:
    """A copy of the usual model with other weights under the same names, in the same shapes."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(MODEL, folder, dirs_exist_ok=True)
    weights = load_file(MODEL / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    return folder


def negate_values(weights: Weights) -> None:
    """Change the sign of attention's values; the projection after them changes it back. Only the cache differs."""
    for name in weights:
        if name.endswith(("self_attn.v_proj.weight", "self_attn.o_proj.weight")):
            weights[name] = -weights[name]


def relabel_digits(weights: Weights) -> None:
    """Map each digit to the row of the next one, at the input and the output: as right as the usual model."""
    vocabulary: Mapping[str, int] = json.loads((MODEL / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = weights[name].clone()
        for blank in ("", "Ġ"):
            for digit in range(10):
                rows[vocabulary[f"{blank}{digit}"]] = weights[name][vocabulary[f"{blank}{(digit + 1) % 10}"]]
        weights[name] = rows


OTHER_STATE_TYPE = "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float16"
"""A type other than vLLM 0.32's "auto": float32 on a CPU with AVX-512 BF16 (`platforms/cpu.py`), else the model's."""
STATE_TYPE = Oddity(
    "state type", "state_dtypes", "--mamba-ssm-cache-dtype", (*BLOCK_256, "--mamba-ssm-cache-dtype", OTHER_STATE_TYPE)
)
ODDITIES = (
    STATE_TYPE,
    Oddity("block size", "block_sizes", "--block-size", ("--block-size", "512")),
    Oddity("weights", "checkpoint", "--revision", weights=negate_values),
    Oddity("rope", "rope", "--hf-overrides", ("--hf-overrides", json.dumps(OTHER_ROPE)), seeds=(901, 902, 925, 936)),
    Oddity("another model", "checkpoint", "--model", weights=relabel_digits),
)
SPECULATIVE = Oddity(
    "speculative tokens",
    "speculative",
    "--speculative-config",
    (
        *BLOCK_256,
        "--speculative-config",
        json.dumps({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}),
    ),
)
"""Needs Triton. On a CPU vLLM 0.32 then answers wrong, alone too."""
