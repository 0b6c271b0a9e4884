"""The prompt of a known-answer test: a list of made-up names and numbers, and one of the names again. Pure.

The answer stands far back in the prompt, and nobody can say it who does not read it there: any model that has learned
text copies it. So it depends on blocks far away, and on every state that was carried over the list in between.

That matters. Of prompts of random token ids the tiny model of `deploy/local/model` makes no more than a flat answer,
which was nearly the same (0.04 nats) with a mamba state of garbage; with a list of this form, on which it was trained
(with names of these syllables), the same state changed the answer by 4.8 nats at the least.
"""

import itertools
import random
from collections.abc import Iterator, Sequence

BEGINNINGS = (
    *("al", "an", "ar", "bel", "ben", "bor", "cal", "cor", "dal", "dor", "el", "far", "fen", "gar", "hal"),
    *("jar", "jor", "kel", "lan", "mar", "mel", "nor", "or", "per", "ros", "sal", "tor", "val"),
)
ENDINGS = (
    *("ba", "bert", "da", "do", "dric", "fa", "ga", "go", "ko", "len", "lia", "lo", "mi"),
    *("mo", "na", "nda", "ne", "nia", "no", "phin", "ric", "ro", "si", "ta", "vin"),
)
NAMES = tuple(beginning + ending for beginning in BEGINNINGS for ending in ENDINGS)
"""700 names; longer lists go on with names of two words."""

ASKED_WITHIN = 4
"""The name that is asked for stands in the first of so many parts of the list."""
BLOCKS = 2
"""Full attention blocks of a prompt; half of another one follows."""
LEAST_TOKENS = 256
UNKNOWN_BLOCK = 512
"""Taken for the block size of nodes that do not say theirs."""
FEWEST_LINES = 2

_PLAIN_IDS = (8, 250)
"""Ids that any vocabulary has."""
_ECHO = 24
"""Tokens of a prompt of plain ids that are said again at its end."""


def question(seed: int, lines: int) -> str:
    """A list of so many lines, and the name that is asked for."""
    source = random.Random(seed)
    names = list(itertools.islice(_names(source), max(lines, FEWEST_LINES)))
    listed = "".join(f"{name} {source.randrange(1000):03d}\n" for name in names)
    asked = source.randrange(max(1, min(len(names), len(NAMES)) // ASKED_WITHIN))
    return f"{listed}? {names[asked]} ="


def plain_ids(seed: int, count: int) -> list[int]:
    """So many token ids, whose end repeats a piece of their beginning: for a node that takes no text."""
    source = random.Random(seed)
    ids = [source.randrange(*_PLAIN_IDS) for _ in range(count)]
    return [*ids[:-_ECHO], *ids[:_ECHO]] if count > 2 * _ECHO else ids


def prompt_tokens(block_sizes: Sequence[int], max_model_lens: Sequence[int], answer: int) -> int:
    """How many tokens a prompt is to have: some blocks and a part of one, as far as both nodes take it.

    Args:
        block_sizes: of the two nodes; 0 where one does not say.
        max_model_lens: likewise.
        answer: tokens that are to be generated.
    """
    block = max(block_sizes) or UNKNOWN_BLOCK
    wanted = max(LEAST_TOKENS, BLOCKS * block + block // 2)
    longest = min((told for told in max_model_lens if told), default=wanted + answer)
    return max(1, min(wanted, longest - answer))


def _names(source: random.Random) -> Iterator[str]:
    yield from source.sample(NAMES, len(NAMES))
    while True:
        yield f"{source.choice(NAMES)} {source.choice(NAMES)}"
