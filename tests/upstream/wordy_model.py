"""Models for vLLM's entrypoint tests: they say something to every prompt, and end JSON early.

Those tests are written for models such as Qwen's. They want some text in every answer, token ids of a large vocabulary,
a token for a word, ChatML, and JSON that ends.

The weights are drawn at random, by their seed. Beyond that, marks that close something are likelier than words, and
bytes that are no text are never said. After a line's end comes a script: an answer to a chat that ends by itself.
Without one, an answer goes on for as long as it may.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

VOCABULARY = 10240
"""Token ids of vLLM's tests are below."""
LENGTH = 8192
MOST_WORDS = 6000
WORD = " ?[A-Za-z]+"
PIECE = rf"{WORD}| ?[^\sA-Za-z]+|\s"
END = "<|im_end|>"
SPECIAL = ("<|pad|>", END, "<|im_start|>")
THINKING_END = "</think>"
LINE_END = "Ċ"
MARKS = ("<think>", THINKING_END, "<tool_call>", "</tool_call>")
CLOSING = ("}", "]", '"')
HIDDEN, SCALE = 128, 4.0
CLOSES, FOLLOWS, NEVER = 8.0, 30.0, -8.0
"""By how much a logit is shifted; those of words have a standard deviation of one."""
_UNUSED = tuple(f"Ġw{number}" for number in range(VOCABULARY - 16, VOCABULARY))
_ASKED_FOR = ("3", "1", "2")
"""The answer to 13 times 24, which some tests look for."""
NO_SCRIPT: tuple[str, ...] = ()
TALKING = (*_ASKED_FOR, *_UNUSED, END)
THINKING = ("<think>", *_UNUSED[:8], THINKING_END, *_ASKED_FOR, *_UNUSED[8:], END)
CHAT_TEMPLATE = """\
{%- if messages[0].role != 'system' -%}
<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- if not (continue_final_message and loop.last) -%}
<|im_end|>
{% endif -%}
{%- if loop.first and tools -%}
<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking -%}
<think>

</think>

{% endif -%}
{%- endif -%}
"""


def make(folder: Path, script: Sequence[str], text: str) -> None:
    """Write a model. `text`: its words are tokens, those that come more than once."""
    folder.mkdir(parents=True, exist_ok=True)
    _network(_tokenizer(folder, text), script).save_pretrained(folder)


def _tokenizer(folder: Path, text: str) -> dict[str, int]:
    """Write the tokenizer: bytes, words of the text, and words that stand in no text. Returns the vocabulary."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    words = (word for word, count in Counter(re.findall(WORD, text)).most_common(MOST_WORDS) if count > 1)
    known = [*SPECIAL, *MARKS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    known += [word.replace(" ", "Ġ") for word in words if len(word) > 1]
    known += [f"Ġw{number}" for number in range(len(known), VOCABULARY)]
    vocabulary = {token: index for index, token in enumerate(known)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    split = pre_tokenizers.Split(Regex(PIECE), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": LENGTH,
        "eos_token": END,
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return vocabulary


def _network(vocabulary: dict[str, int], script: Sequence[str]) -> Any:
    """One direction of the hidden state is the same for all tokens: along it, a token is as likely as we wish.

    One more for each token of the script: along it, what was said before makes it likely.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=LENGTH,
        initializer_range=0.05,
        tie_word_embeddings=False,
        eos_token_id=vocabulary[END],
        pad_token_id=vocabulary["<|pad|>"],
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = Qwen3ForCausalLM(config).eval()
        embedding, head = network.model.embed_tokens.weight.data, network.lm_head.weight.data
        torch.nn.init.normal_(embedding)
        torch.nn.init.normal_(head, std=HIDDEN**-0.5)
    known = 1 + len(script)
    embedding[:, :known], head[:, :known] = 0.0, 0.0
    embedding[:, 0] = SCALE
    state = SCALE * (HIDDEN / (SCALE**2 + HIDDEN - known)) ** 0.5
    unreadable = [token for token in vocabulary if len(token) == 1 and not token.isascii()]
    for shift, tokens in ((CLOSES, CLOSING), (NEVER, unreadable)):
        head[[vocabulary[token] for token in tokens], 0] = shift / state
    for direction, (before, token) in enumerate(pairwise((LINE_END, *script)), start=1):
        embedding[vocabulary[before], direction] = SCALE
        head[vocabulary[token], direction] = FOLLOWS / state
    return network.to(torch.bfloat16)
