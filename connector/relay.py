"""Gives vLLM's handshake what was fetched already, through its own front door: a side channel on this host.

vLLM's `_nixl_handshake` opens a ZMQ socket, sends, and waits up to five seconds for each rank, in a thread that all
handshakes share; an answer may have any length. Pointed at a relay it waits for nobody: what the prefill node said was
fetched beside it (see `introductions`), in bounded time and memory, and proved where there are keys.
The relay listens on the loopback address for the few milliseconds that the handshake takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from connector.accounts import Accounts
from connector.introductions import Rank
from connector.lease import Verdict
from connector.side_channel import Listener

LOOPBACK = "127.0.0.1"


@contextmanager
def relay(payloads: Mapping[Rank, bytes]) -> Iterator[int]:
    """The port at which the payloads are answered. Raises SideChannelError."""
    listener = Listener(LOOPBACK, 0, payloads, _unknown, Accounts())
    listener.start()
    try:
        yield listener.port
    finally:
        listener.stop()


def _unknown(_engine_id: str, _request_id: str, _nonce: str) -> Verdict:
    return Verdict.UNKNOWN
