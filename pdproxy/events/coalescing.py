"""Coalesces the handling of KV-event batches, so that those of many nodes are parsed and applied together."""

import asyncio
import time
from collections import deque
from collections.abc import Callable

COALESCE_SECONDS = 0.02
"""The longest that a batch waits: about one engine step. Blocks of a prompt that was just routed are expected before
their events arrive (`PrefixIndex.expect`)."""
SLICE_SECONDS = 0.001
"""After so long the event loop gets a turn, so that streams go on. One large batch may take longer."""


class Coalescer:
    """Runs deferred callbacks together, in the order in which they came.

    A proxy before 100 nodes gets a thousand batches a second, each on another connection. A batch that is handled by
    itself wakes the proxy, or comes between two requests, when the CPU's caches hold other data
    (docs/decisions/request-cost.md, "By the number of nodes"). ``clock``: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._waiting: deque[Callable[[], None]] = deque()

    def defer(self, callback: Callable[[], None]) -> None:
        """Call it once, within `COALESCE_SECONDS`."""
        if not self._waiting:
            asyncio.get_running_loop().call_later(COALESCE_SECONDS, self._run)
        self._waiting.append(callback)

    def _run(self) -> None:
        until = self._clock() + SLICE_SECONDS
        try:
            while self._waiting and self._clock() < until:
                self._waiting.popleft()()
        finally:
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._run)
