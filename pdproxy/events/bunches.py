"""Puts off what is to be done for KV events, so that many batches are taken in together."""

import asyncio
import time
from collections import deque
from collections.abc import Callable

BUNCH_SECONDS = 0.02
"""The longest that a batch waits: about a step of an engine. What prompts leave in a cache is expected before its
events come (`PrefixIndex.expect`)."""
AT_ONCE_SECONDS = 0.001
"""Then the loop does what else there is to do: no stream's token waits longer for a bunch."""


class Bunches:
    """Runs callbacks in bunches, in the order in which they came.

    A proxy before 100 nodes gets a thousand batches a second, each from another connection. Each by itself would wake
    the proxy, or come between two requests, and find the CPU's caches full of other things
    (docs/decisions/request-cost.md, "By the number of nodes"). ``clock``: of what they take, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._waiting: deque[Callable[[], None]] = deque()

    def later(self, callback: Callable[[], None]) -> None:
        """Run it once, within `BUNCH_SECONDS`."""
        if not self._waiting:
            asyncio.get_running_loop().call_later(BUNCH_SECONDS, self._run)
        self._waiting.append(callback)

    def _run(self) -> None:
        until = self._clock() + AT_ONCE_SECONDS
        try:
            while self._waiting and self._clock() < until:
                self._waiting[0]()
                self._waiting.popleft()
        except BaseException:
            self._waiting.popleft()
            raise
        finally:
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._run)
