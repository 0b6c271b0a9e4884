"""Keeps background tasks going: one that ends is begun again, loudly.

Begun again rather than taken as the end of the proxy: what brings such a task down is most likely something odd that a
node or an API sent, it would be sent again after a restart too, and meanwhile running streams and the other nodes are
fine. The circuits go on judging nodes by their legs. Each failure is logged with its traceback and counted.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine

from pdproxy.clock import Clock
from pdproxy.observe.labels import Task
from pdproxy.observe.metrics import Metrics

_LOG = logging.getLogger(__name__)

Work = Callable[[], Coroutine[None, None, None]]


class TaskSupervisor:
    """Owns the tasks; `aclose` ends them.

    Args:
        pause: seconds before a failed task begins again.
    """

    def __init__(self, clock: Clock, metrics: Metrics, pause: float = 1.0) -> None:
        self._clock = clock
        self._metrics = metrics
        self._pause = pause
        self._kept: list[asyncio.Task[None]] = []

    def keep(self, name: Task, work: Work) -> None:
        """Do work that never ends, from now until `aclose`."""
        self._kept.append(asyncio.get_running_loop().create_task(self._again_and_again(name, work), name=name))

    async def aclose(self) -> None:
        """End all."""
        for task in self._kept:
            task.cancel()
        await asyncio.gather(*self._kept, return_exceptions=True)

    async def _again_and_again(self, name: Task, work: Work) -> None:
        while True:
            running = asyncio.get_running_loop().create_task(work(), name=f"{name} itself")
            try:
                await asyncio.wait((running,))
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
            why = None if running.cancelled() else running.exception()
            _LOG.error("%s ended unexpectedly; again in %g s", name, self._pause, exc_info=why)
            self._metrics.task_failed(name)
            await self._clock.sleep(self._pause)
