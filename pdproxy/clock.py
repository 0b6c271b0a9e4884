"""Time as a dependency, so that tests can hand in their own; and waiting for the first of several things."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, Protocol


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


async def first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Return when one of them is done; the others are cancelled, and their end is awaited. Errors are raised."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
