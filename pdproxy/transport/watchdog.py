"""A deadline that costs nothing while all goes well."""

import asyncio
import math
from collections.abc import Callable


class Watchdog:
    """Calls ``bite`` when one `watch` lasts longer than its seconds.

    The timer is not moved at each `watch`: when it fires it looks whether somebody waits, and since when.
    So a stream of thousands of pieces sets a handful of timers.

    Attributes:
        latest: when it bites whatever the seconds say, in the loop's time.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, bite: Callable[[], None]) -> None:
        self.latest = math.inf
        self._loop = loop
        self._bite = bite
        self._due: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, seconds: float) -> None:
        """Bite in ``seconds``, unless told otherwise before."""
        self._due = min(self._loop.time() + seconds, self.latest)
        if self._timer is not None and self._timer.when() > self._due:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self._loop.call_at(self._due, self._fire)

    @property
    def late(self) -> bool:
        """`latest` has come."""
        return self._loop.time() >= self.latest

    def rest(self) -> None:
        """Nobody waits any more."""
        self._due = None

    def stop(self) -> None:
        """For good: leave no timer behind."""
        self._due = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        if self._due is None:
            return
        if self._loop.time() < self._due:
            self._timer = self._loop.call_at(self._due, self._fire)
        else:
            self._bite()
