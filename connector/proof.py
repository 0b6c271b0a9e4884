"""That a question, and its answer, come from a node which has the ticket keys. Pure.

On every connection each side names a fresh random *challenge* before the first message (a property of ZMTP's READY
command). A message then carries an HMAC-SHA256 over both challenges, its direction, and its own bytes, which hold a
number; the prefill node takes only numbers that grow.

What a message that somebody captured is worth to him:
    on another connection, to this node or another        nothing: the challenges differ
    on the same connection, injected into it              nothing: its number was used
    sent back to whom it came from                        nothing: the direction differs
So a replay needs no clock to be refused. Nothing here is encrypted: who sees the packets sees ids, verdicts and the
metadata of the handshake, and can delay or cut the connection.

The first key signs, as with tickets; every key is tried, each in constant time. The prefill node answers with the key
by which it was asked, so that keys can be changed one node after the other.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

CHALLENGE_BYTES = 16
PROPERTY = b"x-pdproxy-challenge"

_DOMAIN = b"pdproxy side channel\n"
_ASKED, _ANSWERED = b"q", b"a"


class Asker:
    """The decode node's end of one connection."""

    def __init__(self, keys: Sequence[bytes], theirs: bytes, ours: bytes) -> None:
        self._keys = keys
        self._challenges = theirs + ours

    def sign(self, message: bytes) -> tuple[bytes, ...]:
        """The frames of a message: with its MAC where there is a key."""
        return (message, _mac(self._keys[0], self._challenges, _ASKED, message)) if self._keys else (message,)

    def genuine(self, frames: Sequence[bytes]) -> bool:
        """Whether an answer (message, and MAC if any) comes from a node with one of our keys; without keys always."""
        if not self._keys:
            return len(frames) in (1, 2)
        return len(frames) == 2 and _find(self._keys, self._challenges, _ANSWERED, *frames) is not None


class Answerer:
    """The prefill node's end of one connection."""

    def __init__(self, keys: Sequence[bytes], ours: bytes, theirs: bytes) -> None:
        self._keys = keys
        self._challenges = ours + theirs
        self._key = b""

    def genuine(self, message: bytes, mac: bytes) -> bool:
        """Whether a question comes from a node with one of our keys."""
        key = _find(self._keys, self._challenges, _ASKED, message, mac)
        self._key = key or self._key
        return key is not None

    def sign(self, message: bytes) -> tuple[bytes, ...]:
        """The frames of an answer: with its MAC, by the key of the last genuine question, if there was one."""
        return (message, _mac(self._key, self._challenges, _ANSWERED, message)) if self._key else (message,)


def _mac(key: bytes, challenges: bytes, direction: bytes, message: bytes) -> bytes:
    return hmac.digest(key, _DOMAIN + challenges + direction + message, "sha256")


def _find(keys: Sequence[bytes], challenges: bytes, direction: bytes, message: bytes, mac: bytes) -> bytes | None:
    """The key that made `mac`; every key is tried."""
    made = [hmac.compare_digest(_mac(key, challenges, direction, message), mac) for key in keys]
    return keys[made.index(True)] if any(made) else None
