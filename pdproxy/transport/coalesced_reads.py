"""Coalesces reads from many connections: what arrives on any of them within a while is read and handled together."""

import asyncio
import os
import selectors
import time
from collections.abc import Callable
from typing import TypeAlias

COALESCE_SECONDS = 0.02
"""The longest that bytes wait: about one engine step. Blocks of a prompt that was just routed are expected before
their events arrive (`PrefixIndex.expect`)."""
SLICE_SECONDS = 0.001
"""After so long the event loop gets a turn, so that streams go on. One large message may take longer."""
READ_BYTES = 128 * 1024
"""The most that is read from a connection before others get their turn."""

OnBytes: TypeAlias = Callable[[bytes], None]
"""Called with what a connection sent; with no bytes at each read after its end, until it is removed."""


class CoalescedReads:
    """Reads sockets beside the event loop, which is told of them as one: by a selector that it watches.

    A proxy before 100 nodes gets a thousand batches of KV events a second, each on another connection. A batch that is
    handled by itself wakes the proxy, or comes between two requests, when the CPU's caches hold other data
    (docs/decisions/request-cost.md, "By the number of nodes"). ``clock``: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._buffer = bytearray(READ_BYTES)
        self._sockets: dict[int, OnBytes] = {}
        self._selector: selectors.DefaultSelector | None = None
        """None while there are no sockets; then nothing is left open."""
        self._scheduled: asyncio.Handle | None = None
        """The next call of `_read_all`; None while the event loop watches the selector."""

    def add(self, descriptor: int, on_bytes: OnBytes) -> None:
        """Read this non-blocking socket until it is removed, which must come before it is closed."""
        if self._selector is None:
            self._selector = selectors.DefaultSelector()
            self._watch(self._selector)
        self._selector.register(descriptor, selectors.EVENT_READ)
        self._sockets[descriptor] = on_bytes

    def remove(self, descriptor: int) -> None:
        """Read it no more."""
        if self._selector is None or self._sockets.pop(descriptor, None) is None:
            return
        self._selector.unregister(descriptor)
        if self._sockets:
            return
        if self._scheduled is None:
            asyncio.get_running_loop().remove_reader(self._selector.fileno())
        else:
            self._scheduled.cancel()
        self._selector.close()
        self._selector = None

    def _watch(self, selector: selectors.DefaultSelector) -> None:
        self._scheduled = None
        asyncio.get_running_loop().add_reader(selector.fileno(), self._wait, selector)

    def _wait(self, selector: selectors.DefaultSelector) -> None:
        """The first bytes are there: others may follow until `_read_all`."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(selector.fileno())
        self._scheduled = loop.call_later(COALESCE_SECONDS, self._read_all, selector)

    def _read_all(self, selector: selectors.DefaultSelector) -> None:
        """Read until nothing is left, in slices."""
        self._scheduled = again = asyncio.get_running_loop().call_soon(self._read_all, selector)
        if self._read_slice(selector) and self._selector is selector:
            again.cancel()
            self._watch(selector)

    def _read_slice(self, selector: selectors.DefaultSelector) -> bool:
        """Read for `SLICE_SECONDS`; whether nothing was left."""
        until = self._clock() + SLICE_SECONDS
        while self._selector is selector and (ready := selector.select(0)):
            for key, _ in ready:
                self._read(key.fd)
                if self._clock() >= until:
                    return False
        return True

    def _read(self, descriptor: int) -> None:
        on_bytes = self._sockets.get(descriptor)
        if on_bytes is None:  # it was removed by another one's callback
            return
        try:
            size = os.readv(descriptor, (self._buffer,))
        except BlockingIOError:
            return
        except OSError:
            size = 0
        on_bytes(bytes(memoryview(self._buffer)[:size]))
