"""The tokenizer: one token per name and per digit, bytes for everything else, so that any text goes in and comes out.

A list line `marlin 482\\n` is five tokens: the name, ` 4` (a digit with the space before it), `8`, `2` and the newline.
"""

from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from deploy.local.model.vocabulary import CUE, MARKS, NAMES, SPECIAL

VOCABULARY = 1024

# An answer begins right after the question's cue: the assistant has no mark of its own, and what asks for an answer is
# what the user said.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{ message.content }}<|end|>
{%- elif message.role == 'system' -%}
<|system|>{{ message.content | trim }}
{%- else -%}
<|user|>{{ message.content | trim }}
{%- endif -%}
{%- endfor -%}
"""

_PIECES = Regex(r" ?[0-9]|\n| ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|\s")


def build() -> Tokenizer:
    """Make the tokenizer. There are no merges: a piece is either a word of the vocabulary or falls to its bytes."""
    vocabulary = {token: index for index, token in enumerate(_tokens())}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    split = pre_tokenizers.Split(_PIECES, behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return tokenizer


def save(folder: Path) -> None:
    """Write `tokenizer.json` and `chat_template.jinja` into a folder that exists."""
    build().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def _tokens() -> Iterator[str]:
    yield from SPECIAL
    yield from MARKS
    yield f"Ġ{CUE.strip()}"
    yield from (f"Ġ{digit}" for digit in range(10))
    yield from sorted(pre_tokenizers.ByteLevel.alphabet())
    yield from NAMES
