"""Turns of the event loop, for tests that have no real I/O to wait for."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], bool]) -> None:
    """Give the loop turns until the condition holds; the limit only ends a hang."""
    async with asyncio.timeout(60):
        while True:
            if condition():
                return
            await asyncio.sleep(0)


async def settle() -> None:
    """Enough turns of the loop for anything that could happen now to have happened."""
    for _ in range(100):
        await asyncio.sleep(0)
