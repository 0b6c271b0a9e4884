"""A clock that moves only when a test advances it."""

import asyncio
import heapq
import itertools
from collections.abc import Callable


class FakeClock:
    """Monotonic seconds from 1000. `advance` moves it and wakes the sleepers whose time has come."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._turn = itertools.count()

    def now(self) -> float:
        return self._now

    @property
    def sleepers(self) -> int:
        """How many wait for their time."""
        return sum(not waiter.done() for _, _, waiter in self._waiting)

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        waiter = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (self._now + seconds, next(self._turn), waiter))
        await waiter

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now += seconds
        while self._waiting and self._waiting[0][0] <= self._now:
            waiter = heapq.heappop(self._waiting)[2]
            if not waiter.done():
                waiter.set_result(None)


class PassingClock(FakeClock):
    """Where somebody sleeps, the time passes at once.

    Attributes:
        passed: called each time, before the sleeper wakes.
    """

    def __init__(self, passed: Callable[[], None]) -> None:
        super().__init__()
        self.passed = passed

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)
        self.advance(seconds)
        self.passed()
