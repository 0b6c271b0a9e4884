"""How many requests run at once, who waits, and who is turned away."""

import asyncio
import contextlib
import enum
import heapq
import itertools
from collections import Counter
from collections.abc import AsyncIterator

from pdproxy.errors import ClientError
from pdproxy.intake.keys import ANYBODY, Holder
from pdproxy.observe.metrics import Metrics


class Rejection(enum.StrEnum):
    """Why a request was turned away."""

    KEY_LIMIT = "key_limit"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    BODIES_FULL = "bodies_full"


class Admission:
    """A bounded number of places, and a bounded queue ordered by priority, then arrival.

    Args:
        concurrency: places.
        queue: how many may wait.
        patience: seconds that one may wait.
        metrics: told of every change.
        key_limit: open requests of one key whose holder has no limit of its own; 0: none.
    """

    def __init__(self, concurrency: int, queue: int, patience: float, metrics: Metrics, key_limit: int = 0) -> None:
        self._free = concurrency
        self._queue_limit = queue
        self._patience = patience
        self._metrics = metrics
        self._key_limit = key_limit
        self._order = itertools.count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._per_key: Counter[str] = Counter()

    @contextlib.asynccontextmanager
    async def place(self, holder: Holder, priority: int) -> AsyncIterator[None]:
        """Hold a place while inside.

        Raises:
            ClientError: 429 with Retry-After: the key's limit, a full queue, or a wait beyond ``patience``.
        """
        self._enter_key(holder)
        try:
            await self._take(priority)
            self._metrics.request_began()
            try:
                yield
            finally:
                self._metrics.request_left()
                self._give()
        finally:
            self._leave_key(holder)

    def _enter_key(self, holder: Holder) -> None:
        limit = holder.limit or (self._key_limit if holder is not ANYBODY else 0)
        if limit and self._per_key[holder.name] >= limit:
            raise self._refused(Rejection.KEY_LIMIT, f"This API key may have {limit} requests open at once.", 1)
        self._per_key[holder.name] += 1

    def _leave_key(self, holder: Holder) -> None:
        self._per_key[holder.name] -= 1
        if not self._per_key[holder.name]:
            del self._per_key[holder.name]

    async def _take(self, priority: int) -> None:
        if self._free and not self._waiting:
            self._free -= 1
            return
        if len(self._waiting) >= self._queue_limit:
            raise self._refused(Rejection.QUEUE_FULL, "All places and the queue are full: try again later.", 5)
        await self._wait(priority)

    async def _wait(self, priority: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (priority, next(self._order), turn)
        heapq.heappush(self._waiting, entry)
        self._tell()
        try:
            # Not wait_for: in Python 3.11 that swallows a cancellation which comes together with the turn.
            async with asyncio.timeout(self._patience):
                await turn
        except TimeoutError:
            self._abandon(entry)
            text = f"No place became free within {self._patience:g} s: try again later."
            raise self._refused(Rejection.QUEUE_TIMEOUT, text, 5) from None
        except asyncio.CancelledError:
            self._abandon(entry)
            raise

    def _abandon(self, entry: tuple[int, int, asyncio.Future[None]]) -> None:
        if not entry[2].cancelled():
            self._give()  # The place came in the same moment as the end of the wait: pass it on.
        elif entry in self._waiting:
            self._waiting.remove(entry)
            heapq.heapify(self._waiting)
        self._tell()

    def _give(self) -> None:
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)
                break
        else:
            self._free += 1
        self._tell()

    def _tell(self) -> None:
        self._metrics.queue_is(len(self._waiting))

    def _refused(self, reason: Rejection, message: str, seconds: int) -> ClientError:
        self._metrics.rejected(reason)
        retry = (("retry-after", str(seconds)),)
        return ClientError(429, message, kind="rate_limit_error", code=reason, headers=retry)
