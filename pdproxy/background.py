"""Work that runs beside the requests, cancelled or awaited at the shutdown; its failures are logged.

::

    every     a look that is taken again and again, some seconds after the last one
    keep      a loop that should never end: one that does is counted, and begun again after a pause
    start     a watch over something: runs until it ends, or until its task or `aclose` cancels it
    finish    a short errand, bounded by itself: `aclose` waits for it
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine

from pdproxy.clock import Clock, SystemClock

_LOG = logging.getLogger(__name__)

Work = Coroutine[None, None, None]


class Background:
    """All work beside the requests. No task outlives `aclose`.

    A loop that ends is not taken as the end of the proxy: most likely a node or an API sent something odd, and would
    send it again after a restart too. Meanwhile running streams and the other nodes are fine, and the circuits go on
    judging nodes by their legs.

    Args:
        on_failure: called with the name of a loop that ended.
        patience: seconds that `aclose` waits for errands.
        pause: seconds until a loop that ended begins again.
    """

    def __init__(
        self,
        clock: Clock | None = None,
        on_failure: Callable[[str], None] = lambda _: None,
        patience: float = 5.0,
        pause: float = 1.0,
    ) -> None:
        self._clock = clock or SystemClock()
        self._on_failure = on_failure
        self._patience = patience
        self._pause = pause
        self._watches: set[asyncio.Task[None]] = set()
        self._errands: set[asyncio.Task[None]] = set()

    @property
    def errands(self) -> int:
        """How many are under way."""
        return len(self._errands)

    def every(self, name: str, seconds: float, look: Callable[[], Work | None]) -> None:
        """Do some work now, and again ``seconds`` after each end."""

        async def again_and_again() -> None:
            while True:
                if (work := look()) is not None:
                    await work
                await self._clock.sleep(seconds)

        self.run_forever(name, again_and_again)

    def run_forever(self, name: str, work: Callable[[], Work]) -> None:
        """Run work that should never end."""
        self.start(name, self._again_and_again(name, work))

    def start(self, name: str, work: Work) -> asyncio.Task[None]:
        """Run work that `aclose` cancels."""
        return self._run(name, work, self._watches)

    def finish(self, name: str, work: Work) -> None:
        """Run work that is bounded by itself. Returns at once and never raises, also while being cancelled."""
        self._run(name, work, self._errands)

    async def aclose(self) -> None:
        """Cancel loops and watches, wait for errands; those that outlast the patience are cancelled too."""
        await _cancelled(self._watches)
        if self._errands:
            await asyncio.wait(tuple(self._errands), timeout=self._patience)
            await _cancelled(self._errands)

    def _run(self, name: str, work: Work, running: set[asyncio.Task[None]]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        running.add(task)
        task.add_done_callback(running.discard)
        task.add_done_callback(_log_failure)
        return task

    async def _again_and_again(self, name: str, work: Callable[[], Work]) -> None:
        while True:
            running = asyncio.get_running_loop().create_task(work(), name=f"{name} itself")
            try:
                await asyncio.wait((running,))
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
            why = None if running.cancelled() else running.exception()
            _LOG.error("%s ended unexpectedly; again in %g s", name, self._pause, exc_info=why)
            self._on_failure(name)
            await self._clock.sleep(self._pause)


async def _cancelled(tasks: set[asyncio.Task[None]]) -> None:
    ending = tuple(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _LOG.error("%s failed", task.get_name(), exc_info=error)
