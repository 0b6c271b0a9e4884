"""Unguessable ids."""

import os
from collections.abc import Iterator

_BYTES = 16
_AT_ONCE = 256
"""To ask the system for randomness costs more than all else that an id takes."""


def random_ids() -> Iterator[str]:
    """Ids without end, each 128 bits of the system's randomness in hex. Not to be shared with a fork of the process."""
    while True:
        drawn = os.urandom(_BYTES * _AT_ONCE).hex()
        for start in range(0, len(drawn), 2 * _BYTES):
            yield drawn[start : start + 2 * _BYTES]
