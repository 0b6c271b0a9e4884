"""The tokens that are not words: roles, ends, and the two questions.

The names that a list may hold: each is one token of the vocabulary."""

PAD, END, SYSTEM, USER = SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>")
ASK, RECITE = MARKS = ("? ", "> ")
"""The two questions. Each is one token that ends in its space, so that the name after it is the name of the list."""
CUE = " ="
"""Ends a question. The name is then known from the layers' state alone, not from the token that is computed last."""


BEGINNINGS = (
    *("al", "an", "ar", "bel", "ben", "bor", "cal", "cor", "dal", "dor", "el", "far", "fen", "gar", "hal"),
    *("jar", "jor", "kel", "lan", "mar", "mel", "nor", "or", "per", "ros", "sal", "tor", "val"),
)
ENDINGS = (
    *("ba", "bert", "da", "do", "dric", "fa", "ga", "go", "ko", "len", "lia", "lo", "mi"),
    *("mo", "na", "nda", "ne", "nia", "no", "phin", "ric", "ro", "si", "ta", "vin"),
)

NAMES: tuple[str, ...] = tuple(beginning + ending for beginning in BEGINNINGS for ending in ENDINGS)
"""700 names in lower case, all different."""
