"""A step's end in time, whatever it waits for."""

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from threading import Thread
from types import FrameType
from typing import Any, TypeVar

AGAIN_S = 60.0
"""Between two alarms: what takes a step's nodes down is quicker."""
ENDS_WITHIN_S = 30.0
Result = TypeVar("Result")


class OverdueError(Exception):
    """A step was not over in time."""


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Raise OverdueError inside when it is not left within so many seconds. For the main thread: it uses a signal."""

    def alarm(_number: int, _frame: FrameType | None) -> None:
        raise OverdueError(f"it was not over after {seconds:,.0f} s")

    handler = signal.signal(signal.SIGALRM, alarm)
    left, again = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left, again)
        signal.signal(signal.SIGALRM, handler)


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run` in a thread: a signal then ends the wait for it, where a callback of the loop would swallow it."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever, name="load")
    thread.start()
    try:
        return asyncio.run_coroutine_threadsafe(work, loop).result()
    finally:
        asyncio.run_coroutine_threadsafe(_end_others(), loop).result(ENDS_WITHIN_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _end_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
