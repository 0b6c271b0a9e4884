"""The names that a list may hold: each is one token of the vocabulary."""

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
