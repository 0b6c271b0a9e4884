"""Host names to addresses, without ever waiting: `getaddrinfo` may hang for as long as a name server is silent.

Addresses written as numbers need no look-up. A name is looked up in a thread of its own, at most one a name and
`MOST_THREADS` in all, and its address is kept; an old one serves on while the name is looked up anew.
"""

from __future__ import annotations

import socket
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MOST_THREADS = 128
"""A look-up cannot be ended. So many names whose server is silent, and further new names fail at once."""
MOST_NAMES = 1024
FRESH_FOR = 60.0

SocketAddress = tuple[Any, ...]
LookUp = Callable[[str, int], tuple[socket.AddressFamily, SocketAddress]]
"""(host, port) → family and address; raises OSError."""


@dataclass(frozen=True, slots=True)
class Found:
    """Where to connect."""

    family: socket.AddressFamily
    address: SocketAddress


def look_up(host: str, port: int) -> tuple[socket.AddressFamily, SocketAddress]:
    """The system's answer, IPv4 before IPv6 as the listener binds. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    return family, address


class Resolver:
    """For one thread. `wake` is called in another one when a look-up has ended."""

    def __init__(self, wake: Callable[[], None], clock: Callable[[], float], look_up: LookUp = look_up) -> None:
        self._wake = wake
        self._clock = clock
        self._look_up = look_up
        self._lock = threading.Lock()
        self._running: set[tuple[str, int]] = set()
        self._found: OrderedDict[tuple[str, int], tuple[Found, float]] = OrderedDict()
        self._failed: dict[tuple[str, int], OSError] = {}

    def find(self, host: str, port: int) -> Found | None:
        """Where `host:port` is; None while that is looked up. Raises OSError where it is nowhere."""
        literal = _literal(host, port)
        if literal is not None:
            return literal
        with self._lock:
            known = self._found.get((host, port))
            failed = self._failed.pop((host, port), None)
        if known is not None and self._clock() - known[1] < FRESH_FOR:
            return known[0]
        if failed is not None and known is None:
            raise failed
        self._start(host, port, optional=known is not None)
        return None if known is None else known[0]

    def _start(self, host: str, port: int, *, optional: bool) -> None:
        with self._lock:
            if (host, port) in self._running:
                return
            if len(self._running) >= MOST_THREADS:
                if optional:
                    return
                raise OSError(f"{MOST_THREADS} names are being looked up already")
            self._running.add((host, port))
        threading.Thread(target=self._run, args=(host, port), name="pdproxy_resolver", daemon=True).start()

    def _run(self, host: str, port: int) -> None:
        try:
            result: Found | OSError = Found(*self._look_up(host, port))
        except (OSError, UnicodeError) as error:
            result = OSError(str(error))
        with self._lock:
            self._running.discard((host, port))
            if isinstance(result, Found):
                self._found[host, port] = (result, self._clock())
                self._found.move_to_end((host, port))
            elif len(self._failed) < MOST_NAMES:
                self._failed[host, port] = result
            while len(self._found) > MOST_NAMES:
                self._found.popitem(last=False)
        self._wake()


def _literal(host: str, port: int) -> Found | None:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[
            0
        ]
    except (OSError, UnicodeError):
        return None
    return Found(family, address)
