"""What a NIXL notice says: parsed once, and never with an exception. Pure.

vLLM's decode side ends a read with `<request id>:<readers>`, where `readers` is the number of its ranks that will
tell this prefill rank the same; what it takes for our request id is the alias that our tickets name. Ours puts the
read's nonce behind it, `<alias>#<nonce>:<readers>`; a notice without one (a decode node that runs vLLM's own
connector) counts as the nonce `NO_NONCE`. Heartbeats are vLLM's: `HB:<alias>,<alias>...`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

NO_NONCE = ""
LONGEST_DONE = 1024
LONGEST_HEARTBEAT = 4 * 1024 * 1024
MOST_READERS = 4096
_HEARTBEAT = b"HB:"
_DONE = re.compile(r"(?P<alias>[^\x00-\x1f]+?)(?:#(?P<nonce>[0-9A-Za-z_-]{8,64}))?:(?P<readers>[0-9]{1,4})")


@dataclass(frozen=True, slots=True)
class Done:
    """One reading rank has everything. `readers`: how many ranks will say so to this rank, 1 to `MOST_READERS`.

    `alias`: what the ticket calls the request (see `aliases`).
    """

    alias: str
    nonce: str
    readers: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Whose leases go on."""

    aliases: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Junk:
    """Bytes that say nothing we know."""

    size: int


Notice = Done | Heartbeat | Junk


def tagged(alias: str, nonce: str) -> str:
    """The alias as our notices carry it; vLLM's own code then appends `:<readers>`."""
    return f"{alias}#{nonce}"


def nonce_of(tag: str) -> str:
    """The nonce in what `tagged` made."""
    return tag.rpartition("#")[2]


def parse(message: bytes) -> Notice:
    """What `message` says. Total: anything that is not a notice is Junk."""
    try:
        if message.startswith(_HEARTBEAT):
            if len(message) > LONGEST_HEARTBEAT:
                return Junk(len(message))
            return Heartbeat(tuple(message[len(_HEARTBEAT) :].decode().split(",")))
        text = message.decode() if len(message) <= LONGEST_DONE else ""
    except UnicodeDecodeError:
        return Junk(len(message))
    found = _DONE.fullmatch(text)
    if found is None or not 1 <= int(found["readers"]) <= MOST_READERS:
        return Junk(len(message))
    return Done(found["alias"], found["nonce"] or NO_NONCE, int(found["readers"]))
