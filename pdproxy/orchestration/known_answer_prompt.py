"""The prompts of known-answer tests. Pure.

The prompt is a list of made-up names and numbers, and one of the names again. Its answer stands far back, so it depends
on blocks far away and on every state that was carried over the list in between; any model that has learned text copies
it. To prompts of random token ids the tiny model of `deploy/local/model` gives a flat answer, nearly the same (0.04
nats) with a mamba state of garbage; to such a list, on which it was trained, one that differs by at least 4.8 nats.
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
"""Assumed for nodes that do not report their block size."""
FEWEST_LINES = 2
SAMPLE_LINES = 16
"""Lines of a list that are tokenized to learn how many tokens a line has."""
_PLAIN_IDS = (8, 250)
"""Ids that any vocabulary has."""
_ECHO = 24
"""Tokens of a prompt of plain ids that are repeated at its end."""


def question(seed: int, lines: int) -> str:
    """A list of so many lines, and the name that is asked for."""
    source = random.Random(seed)
    names = list(itertools.islice(_names(source), max(lines, FEWEST_LINES)))
    listed = "".join(f"{name} {source.randrange(1000):03d}\n" for name in names)
    asked = source.randrange(max(1, min(len(names), len(NAMES)) // ASKED_WITHIN))
    return f"{listed}? {names[asked]} ="


def plain_ids(seed: int, count: int) -> list[int]:
    """So many token ids, whose end repeats a piece of their beginning: for a node without a tokenizer."""
    source = random.Random(seed)
    ids = [source.randrange(*_PLAIN_IDS) for _ in range(count)]
    return [*ids[:-_ECHO], *ids[:_ECHO]] if count > 2 * _ECHO else ids


def prompt_tokens(block_sizes: Sequence[int], max_model_lens: Sequence[int], answer: int) -> int:
    """How many tokens a prompt is to have: some blocks and a part of one, as far as both nodes take it.

    Sizes and lengths are those of the two nodes, 0 where one does not report its own; ``answer`` tokens follow.
    """
    block = max(block_sizes) or UNKNOWN_BLOCK
    wanted = max(LEAST_TOKENS, BLOCKS * block + block // 2)
    longest = min((length for length in max_model_lens if length), default=wanted + answer)
    return max(1, min(wanted, longest - answer))


def up_to_boundary(ids: list[int], unit: int) -> list[int]:
    """The end of a prompt, so long that a hand-over of it and one token more brings all of it.

    Then the decode node computes one token from the state that it read. Of a state that is wrong less shows with each
    further token that it computes after it.
    """
    return ids[len(ids) % unit :] if 0 < unit < len(ids) else ids


def _names(source: random.Random) -> Iterator[str]:
    yield from source.sample(NAMES, len(NAMES))
    while True:
        yield f"{source.choice(NAMES)} {source.choice(NAMES)}"
