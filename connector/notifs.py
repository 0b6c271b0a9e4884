"""The notifs that NIXL carries from decode nodes to prefill nodes, as bytes. Pure.

vLLM's decode side ends a read with `<request id>:<readers>`, where `readers` is the number of its ranks
that send this prefill rank the same; its request id is the alias in our tickets. Ours puts the read's nonce behind it,
`<alias>#<nonce>:<readers>`; a notif without one (a decode node that runs vLLM's own connector) counts as the nonce
`NO_NONCE`. Heartbeats are vLLM's: `HB:<alias>,<alias>...`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

NO_NONCE = ""
LONGEST_DONE = 1024
LONGEST_HEARTBEAT = 4 * 1024 * 1024
MOST_NOTIF_READERS = 4096

_HEARTBEAT = b"HB:"
_DONE = re.compile(r"(?P<alias>[^\x00-\x1f]+?)(?:#(?P<nonce>[0-9A-Za-z_-]{8,64}))?:(?P<readers>[0-9]{1,4})")


@dataclass(frozen=True, slots=True)
class ReadDone:
    """One rank has read all of a request's blocks. `alias`: what the ticket calls the request (see `leases.Aliases`).

    `readers`: how many ranks send this rank such a notif, 1 to `MOST_NOTIF_READERS`.
    """

    alias: str
    nonce: str
    readers: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The leases of these aliases are prolonged."""

    aliases: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Junk:
    """Bytes that are no notif."""

    size: int


Notif = ReadDone | Heartbeat | Junk


def with_nonce(alias: str, nonce: str) -> str:
    """The alias as our notifs carry it; vLLM's own code then appends `:<readers>`."""
    return f"{alias}#{nonce}"


def parse_notif(message: bytes) -> Notif:
    """The notif in `message`. Never raises: anything else is Junk."""
    try:
        if message.startswith(_HEARTBEAT):
            if len(message) > LONGEST_HEARTBEAT:
                return Junk(len(message))
            return Heartbeat(tuple(message[len(_HEARTBEAT) :].decode().split(",")))
        text = message.decode() if len(message) <= LONGEST_DONE else ""
    except UnicodeDecodeError:
        return Junk(len(message))
    found = _DONE.fullmatch(text)
    if found is None or not 1 <= int(found["readers"]) <= MOST_NOTIF_READERS:
        return Junk(len(message))
    return ReadDone(found["alias"], found["nonce"] or NO_NONCE, int(found["readers"]))
