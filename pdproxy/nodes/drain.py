"""How a node leaves: running requests finish, or are made to move elsewhere when the deadline comes."""

import asyncio
import contextlib
import enum
import logging
from collections.abc import Callable, Coroutine

from pdproxy.background import Background
from pdproxy.clock import Clock, first_of
from pdproxy.nodes.pool import BY_OPERATOR, Pool, UnknownNode

_LOG = logging.getLogger(__name__)


class AfterDrain(enum.Enum):
    """The fate of a node once it is drained."""

    KEEP = "keep"
    """The node stays, DRAINING, until it is removed or rejoins."""
    REMOVE = "remove"


class Drainer:
    """Watches over drains in the background.

    Args:
        grace: seconds for streams to move elsewhere after the deadline.
        is_needed: whether a node that terminates, by its name, waits for those that follow it (`Cohorts.is_needed`).
    """

    def __init__(
        self,
        pool: Pool,
        clock: Clock,
        background: Background,
        grace: float = 30.0,
        is_needed: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._pool = pool
        self._is_needed = is_needed
        self._clock = clock
        self.background = background
        self._grace = grace
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, name: str, seconds: float, after: AfterDrain, reason: str = BY_OPERATOR) -> None:
        """No new requests from now on; after ``seconds`` at the latest, running ones must leave.

        A drain that is under way is replaced. Raises `UnknownNode`.
        """
        self._pool.drain(name, reason)
        self._run(name, self._drain(name, seconds, after))

    def terminate(self, name: str, seconds: float) -> None:
        """As `start`, but requests still go there while no other node of its role takes any. Raises `UnknownNode`."""
        self._pool.terminate(name)
        self._run(name, self._hand_over_later(name, seconds))

    def _run(self, name: str, watch: Coroutine[None, None, None]) -> None:
        self.stop(name)
        task = self.background.start(f"drain of {name}", watch)
        self._tasks[name] = task
        task.add_done_callback(lambda done: self._forget(name, done))

    def stop(self, name: str) -> None:
        """End the drain's deadline; the node stays as it is."""
        task = self._tasks.pop(name, None)
        if task is not None:
            task.cancel()

    async def _drain(self, name: str, seconds: float, after: AfterDrain) -> None:
        try:
            idle, leaving = self._pool.idle(name), self._pool.leaving(name)
        except UnknownNode:
            return
        await first_of(idle.wait(), self._clock.sleep(seconds))
        if not idle.is_set():
            _LOG.info("node %s: the drain deadline came, running requests move elsewhere", name)
            leaving.set()
            await first_of(idle.wait(), self._clock.sleep(self._grace))
        if after is AfterDrain.REMOVE:
            self._pool.remove(name)

    async def _hand_over_later(self, name: str, seconds: float) -> None:
        """Idle or not: the last resort may get requests yet. The time counts from when the node is needed no more."""
        while self._is_needed(name):
            await self._clock.sleep(1.0)
        await self._clock.sleep(seconds)
        with contextlib.suppress(UnknownNode):
            self._pool.leaving(name).set()

    def _forget(self, name: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(name) is task:
            del self._tasks[name]
