"""A tiny model of attention layers alone, and transformers' answers from it.

Its weights are random, by a fixed seed. Sharp queries (`SHARPNESS`) make each token depend on a few places far back in
the prompt: with another prompt's keys and values the answer differs.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.local.paths import MODEL

VOCABULARY, SPECIAL, END = 1024, 8, 1
HIDDEN, HEAD, SHARPNESS = 128, 64, 4.0
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class Said:
    """Token ids, and the smallest lead in logits of any of them over the next best token."""

    ids: list[int]
    margin: float


@dataclass(frozen=True)
class Dense:
    """The model, in memory and in the folder that nodes load."""

    folder: Path
    network: Any

    def says(self, prompt: Sequence[int], most: int) -> Said:
        """The most likely tokens after the prompt, up to the end mark."""
        import torch

        got = self.network.generate(
            torch.tensor([prompt]), max_new_tokens=most, return_dict_in_generate=True, output_logits=True
        )
        best = torch.cat(got.logits).topk(2).values
        return Said(got.sequences[0, len(prompt) :].tolist(), float((best[:, 0] - best[:, 1]).min()))


def tokens(seed: int, count: int) -> list[int]:
    """Random tokens of the vocabulary, none of them special."""
    source = random.Random(seed)
    return [source.randrange(SPECIAL, VOCABULARY) for _ in range(count)]


def make_dense(folder: Path) -> Dense:
    """Write the model, with the tokenizer of the tiny hybrid one."""
    network = _network()
    network.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(MODEL / name, folder)
    return Dense(folder, network)


def _network() -> Any:
    import torch
    from transformers import Qwen3ForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = Qwen3ForCausalLM(_config()).eval()
        torch.nn.init.normal_(network.model.embed_tokens.weight, std=0.02)
        torch.nn.init.normal_(network.lm_head.weight)
    for layer in network.model.layers:
        torch.nn.init.constant_(layer.self_attn.q_norm.weight, SHARPNESS)
    return network


def _config() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=HEAD,
        max_position_embeddings=4096,
        initializer_range=0.09,
        tie_word_embeddings=False,
        eos_token_id=END,
        pad_token_id=0,
    )
