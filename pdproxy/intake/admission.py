"""What bounds the requests that are handled at once: their number, and the bytes of their bodies."""

import asyncio
import contextlib
import enum
import heapq
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from typing import Self

from pdproxy.errors import ClientError
from pdproxy.intake.auth import ANONYMOUS, ApiKey
from pdproxy.observe.metrics import Metrics


class Rejection(enum.StrEnum):
    """Why a request was turned away."""

    KEY_LIMIT = "key_limit"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    BODIES_FULL = "bodies_full"


class Admission:
    """Bounds the requests that run; those beyond wait in a bounded queue ordered by priority, then arrival.

    Args:
        concurrency: requests that run at once.
        queue: how many may wait.
        queue_seconds: how long one may wait.
        key_limit: open requests of one API key that has no limit of its own; 0: none.
    """

    def __init__(
        self, concurrency: int, queue: int, queue_seconds: float, metrics: Metrics, key_limit: int = 0
    ) -> None:
        self._free = concurrency
        self._queue_limit = queue
        self._queue_seconds = queue_seconds
        self._metrics = metrics
        self._key_limit = key_limit
        self._order = itertools.count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._per_key: Counter[str] = Counter()
        metrics.watch_requests(lambda: concurrency - self._free, lambda: len(self._waiting))

    @contextlib.asynccontextmanager
    async def admit(self, api_key: ApiKey, priority: int) -> AsyncIterator[None]:
        """Be one of the running requests while inside.

        Raises:
            ClientError: 429 with Retry-After: the key's limit, a full queue, or a wait beyond ``queue_seconds``.
        """
        self._enter_key(api_key)
        try:
            await self._take(priority)
            try:
                yield
            finally:
                self._give()
        finally:
            self._leave_key(api_key)

    def _enter_key(self, api_key: ApiKey) -> None:
        limit = api_key.limit or (self._key_limit if api_key is not ANONYMOUS else 0)
        if limit and self._per_key[api_key.name] >= limit:
            text = f"This API key may have {limit} requests open at once."
            raise _rejected(self._metrics, Rejection.KEY_LIMIT, text, 1)
        self._per_key[api_key.name] += 1

    def _leave_key(self, api_key: ApiKey) -> None:
        self._per_key[api_key.name] -= 1
        if not self._per_key[api_key.name]:
            del self._per_key[api_key.name]

    async def _take(self, priority: int) -> None:
        if self._free and not self._waiting:
            self._free -= 1
            return
        if len(self._waiting) >= self._queue_limit:
            text = "All places and the queue are full: try again later."
            raise _rejected(self._metrics, Rejection.QUEUE_FULL, text, 5)
        await self._wait(priority)

    async def _wait(self, priority: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (priority, next(self._order), turn)
        heapq.heappush(self._waiting, entry)
        try:
            # Not wait_for: in Python 3.11 that swallows a cancellation which comes together with the turn.
            async with asyncio.timeout(self._queue_seconds):
                await turn
        except TimeoutError:
            self._abandon(entry)
            text = f"No place became free within {self._queue_seconds:g} s: try again later."
            raise _rejected(self._metrics, Rejection.QUEUE_TIMEOUT, text, 5) from None
        except asyncio.CancelledError:
            self._abandon(entry)
            raise

    def _abandon(self, entry: tuple[int, int, asyncio.Future[None]]) -> None:
        if not entry[2].cancelled():
            self._give()  # The place came in the same moment as the end of the wait: pass it on.
        elif entry in self._waiting:
            self._waiting.remove(entry)
            heapq.heapify(self._waiting)

    def _give(self) -> None:
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)
                break
        else:
            self._free += 1


class BodyBudget:
    """Bounds the bytes of request bodies that are held at once, of all requests together."""

    def __init__(self, limit: int, metrics: Metrics) -> None:
        self._limit = limit
        self._metrics = metrics
        self._held = 0
        metrics.watch_bodies(lambda: self._held)

    def reserve(self) -> "Reservation":
        """For one request; empty at first."""
        return Reservation(self)

    def take(self, size: int) -> None:
        """Hold so many bytes more; a negative number gives some back.

        Raises:
            ClientError: 429 with Retry-After: there is no room for them.
        """
        if self._held + size > self._limit:
            text = "The requests that are here take up all the room there is for them: try again later."
            close = ("connection", "close")  # the rest of the body would otherwise be read as the next request
            raise _rejected(self._metrics, Rejection.BODIES_FULL, text, 1, close)
        self._held += size


class Reservation:
    """The bytes that one request holds; given back at the end of the context."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._size = 0

    def grow_to(self, size: int) -> None:
        """The body has so many bytes by now. The length that its head promises is not reserved.

        Raises:
            ClientError: as `BodyBudget.take`.
        """
        self._budget.take(size - self._size)
        self._size = size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.take(-self._size)
        self._size = 0


def _rejected(
    metrics: Metrics, reason: Rejection, message: str, retry_after: int, *headers: tuple[str, str]
) -> ClientError:
    metrics.rejected(reason)
    retry = ("retry-after", str(retry_after))
    return ClientError(429, message, kind="rate_limit_error", code=reason, headers=(retry, *headers))
