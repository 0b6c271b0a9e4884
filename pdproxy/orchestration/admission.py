"""One prompt's way through the queue: it waits, runs, and ends."""

import functools
from collections.abc import Callable
from typing import TypeVar

from pdproxy.orchestration.request_queue import Asked, RequestQueue, Waiter
from pdproxy.planning.shares import Standing

T = TypeVar("T")


class Admission:
    """One prompt on its way through the queue; to be ended on every exit.

    Attributes:
        runs: it counts among those that run.
    """

    __slots__ = ("_asked", "_queue", "_waiter", "runs")

    def __init__(self, queue: RequestQueue, asked: Asked) -> None:
        self._queue = queue
        self._asked = asked
        self._waiter: Waiter | None = None
        self.runs = False

    async def begin(self, attempt: Callable[[Standing], T | None], lane: Callable[[], str]) -> T:
        """What ``attempt`` returns once there is room: until then that is None. Raises as `RequestQueue.wait`.

        Where there is room and nothing waits, the loop gets no turn. ``attempt`` is told how its key
        stands: there may be less room. ``lane``: its model; called if it waits.
        """
        begun: list[T] = []
        start = functools.partial(self._start, attempt, begun)
        if not self._queue.begin_at_once(self._asked, start):
            self._waiter = await self._queue.wait(self._asked, lane(), start)
        return begun[0]

    def used(self, tokens: int) -> None:
        """It has cost so many tokens, of prompt and answers. One that did not wait was not charged at all."""
        if self._waiter is not None:
            self._queue.correct(self._waiter, tokens)

    def end(self) -> None:
        """It runs no more. Idempotent."""
        if self.runs:
            self.runs = False
            self._queue.ended(self._asked)

    def _start(self, attempt: Callable[[Standing], T | None], begun: list[T], standing: Standing) -> bool:
        result = attempt(standing)
        if result is not None:
            begun.append(result)
            self.runs = True
        return self.runs
