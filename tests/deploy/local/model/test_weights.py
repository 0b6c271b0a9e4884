"""The committed model folder: small, in bfloat16, and made by the code beside it."""

import json

from tokenizers import Tokenizer

from deploy.local.model import MODEL_PATH
from deploy.local.model.quiz import END, VOCABULARY
from deploy.local.model.train import CHAT_TEMPLATE, build_tokenizer

MOST_BYTES = 5_000_000


def test_the_weights_are_small_and_all_bfloat16() -> None:
    raw = (MODEL_PATH / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    kinds = {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
    assert kinds == {"BF16"}
    assert len(raw) <= MOST_BYTES


def test_the_config_has_three_state_layers_and_one_attention_layer() -> None:
    config = json.loads((MODEL_PATH / "config.json").read_text())
    assert config["architectures"] == ["Qwen3NextForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    assert config["vocab_size"] == VOCABULARY
    assert config["tie_word_embeddings"] is False


def test_generation_ends_at_the_end_mark() -> None:
    generation = json.loads((MODEL_PATH / "generation_config.json").read_text())
    assert generation["eos_token_id"] == build_tokenizer().token_to_id(END)


def test_tokenizer_and_template_are_the_ones_that_the_code_makes() -> None:
    saved = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
    assert saved.to_str() == build_tokenizer().to_str()
    assert (MODEL_PATH / "chat_template.jinja").read_text() == CHAT_TEMPLATE
