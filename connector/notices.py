"""What a NIXL notice says: parsed once, and never with an exception. Pure.

vLLM's decode side ends a read with `<request id>:<readers>`, where `readers` is the number of its ranks that will
tell this prefill rank the same. Ours puts the read's nonce behind the request id, `<request id>#<nonce>:<readers>`;
a notice without one (a decode node that runs vLLM's own connector) counts as the nonce `NO_NONCE`. Heartbeats are
vLLM's: `HB:<request id>,<request id>...`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

NO_NONCE = ""
LONGEST_DONE = 1024
LONGEST_HEARTBEAT = 4 * 1024 * 1024
MOST_READERS = 4096
_HEARTBEAT = b"HB:"
_DONE = re.compile(r"(?P<request>[^\x00-\x1f]+?)(?:#(?P<nonce>[0-9A-Za-z_-]{8,64}))?:(?P<readers>[0-9]{1,4})")


@dataclass(frozen=True, slots=True)
class Done:
    """One reading rank has everything. `readers`: how many ranks will say so to this rank, 1 to `MOST_READERS`."""

    request_id: str
    nonce: str
    readers: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Requests of ours whose leases go on; comma-separated ids as vLLM's `_handle_heartbeat` takes them."""

    payload: str


@dataclass(frozen=True, slots=True)
class Junk:
    """Bytes that say nothing we know."""

    size: int


Notice = Done | Heartbeat | Junk


def tagged(request_id: str, nonce: str) -> str:
    """The request id as our notices carry it; vLLM's own code then appends `:<readers>`."""
    return f"{request_id}#{nonce}"


def parse(message: bytes) -> Notice:
    """What `message` says. Total: anything that is not a notice is Junk."""
    try:
        if message.startswith(_HEARTBEAT):
            if len(message) > LONGEST_HEARTBEAT:
                return Junk(len(message))
            return Heartbeat(message[len(_HEARTBEAT) :].decode())
        text = message.decode() if len(message) <= LONGEST_DONE else ""
    except UnicodeDecodeError:
        return Junk(len(message))
    found = _DONE.fullmatch(text)
    if found is None or not 1 <= int(found["readers"]) <= MOST_READERS:
        return Junk(len(message))
    return Done(found["request"], found["nonce"] or NO_NONCE, int(found["readers"]))
