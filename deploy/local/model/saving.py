"""Writes the folder that vLLM and transformers load."""

import copy
import json
from pathlib import Path

import torch
from transformers import PreTrainedModel

from deploy.local.model import tokenizer
from deploy.local.model.architecture import CONTEXT, generation
from deploy.local.model.vocabulary import END, PAD


def save(model: PreTrainedModel, folder: Path) -> None:
    """Write config, weights (in bfloat16; the model itself stays as it is), tokenizer and chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    rounded.generation_config = generation()
    rounded.save_pretrained(folder)
    tokenizer.save(folder)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
