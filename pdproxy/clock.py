"""Time as a dependency, so that tests can hand in their own."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds, and waiting for them."""

    def now(self) -> float:
        """Monotonic time in seconds."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after ``seconds``."""
        ...


class SystemClock:
    """The machine's clock."""

    now = staticmethod(time.monotonic)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
