"""A list of prompts: one passage and one hand-over each, answered as one, in order."""

import asyncio
import dataclasses
import json
from collections.abc import Callable, Coroutine, Sequence
from typing import TypeVar

from pdproxy.errors import ClientError, NodeFault
from pdproxy.observe.labels import Outcome
from pdproxy.orchestration.buffered import BufferedAnswer
from pdproxy.orchestration.client_errors import UpstreamErrorResponse
from pdproxy.orchestration.relay import Relay
from pdproxy.orchestration.response import ResponseStream
from pdproxy.request import Endpoint
from pdproxy.stream.errors import DONE, error_event
from pdproxy.stream.merge import StreamMerge, merge_answers

Result = TypeVar("Result")


async def gather_bounded(parts: Sequence[Callable[[], Coroutine[None, None, Result]]], width: int) -> list[Result]:
    """All results, in order, at most ``width`` at a time. The first failure cancels the others and is raised."""
    gate = asyncio.Semaphore(width)

    async def one(part: Callable[[], Coroutine[None, None, Result]]) -> Result:
        async with gate:
            return await part()

    tasks = [asyncio.ensure_future(one(part)) for part in parts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _cancel_all(tasks)


def merged_body(answers: Sequence[BufferedAnswer]) -> bytes:
    """The answers to several prompts as the body of one."""
    return json.dumps(merge_answers([each.answer for each in answers]), separators=(",", ":")).encode("ascii")


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """Something of one prompt's stream: bytes, how it ended, or what it raised."""

    prompt: int
    data: bytes = b""
    ended: Outcome | None = None
    raised: Exception | None = None


class FanOut(ResponseStream):
    """The streams of several prompts as one `ReplyStream`. Whoever makes one must `aclose` it, on every exit.

    Args:
        relays: the stream of each prompt, in order; the fan opens and closes them.
        choices: ``n`` of the request.
        width: how many run at once.
        ended: told once how it ended.
    """

    def __init__(self, relays: Sequence[Relay], choices: int, width: int, ended: Callable[[Outcome], None]) -> None:
        super().__init__()
        self._relays = relays
        self._merge = StreamMerge(choices)
        self._gate = asyncio.Semaphore(width)
        self._ended = ended
        self._queue: asyncio.Queue[_Piece] = asyncio.Queue(width)
        self._tasks: list[asyncio.Task[None]] = []
        self._running = len(relays)
        self._opened = False
        self.outcome: Outcome | None = None
        """How it ended; None while it goes on."""

    async def start(self) -> None:
        """Start all, and wait for the first event of any.

        Raises:
            ClientError: one could not begin.
            UpstreamErrorResponse: a node's own error goes to the client.
        """
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._pump(index, relay)) for index, relay in enumerate(self._relays)]
        while not self._ready and self.outcome is None:
            self._ready = self._take(await self._queue.get())
        self._opened = True

    async def aclose(self) -> None:
        """End every stream. Idempotent."""
        if self._ready or self.outcome is None:
            self.outcome, self._ready = Outcome.CLIENT_GONE, b""
        tasks, self._tasks = self._tasks, []  # a second call has nothing to wait for: not even a turn of the loop
        try:
            await _cancel_all(tasks)
        finally:
            if self._opened:
                self._ended(self.outcome)

    async def _advance(self) -> bytes:
        if self.outcome is not None:
            raise StopAsyncIteration
        try:
            return self._take(await self._queue.get())
        except (ClientError, UpstreamErrorResponse) as error:
            return self._broken(error)

    def _broken(self, error: ClientError | UpstreamErrorResponse) -> bytes:
        self.outcome = Outcome.FAILED
        known = error if isinstance(error, ClientError) else ClientError(502, "A node refused one of the prompts.")
        return error_event(Endpoint.COMPLETIONS, known)

    def _take(self, piece: _Piece) -> bytes:
        if piece.raised is not None:
            raise piece.raised
        if piece.ended is None:
            return self._merged(piece)
        self._running -= 1
        if piece.ended is not Outcome.OK:
            self.outcome = Outcome.FAILED
            return DONE
        if self._running:
            return b""
        self.outcome = Outcome.OK
        return self._merge.ending()

    def _merged(self, piece: _Piece) -> bytes:
        try:
            return self._merge.take(piece.prompt, piece.data)
        except NodeFault as fault:
            raise ClientError(502, "A node's answer could not be understood.", code="stream_broken") from fault

    async def _pump(self, index: int, relay: Relay) -> None:
        async with self._gate:
            try:
                await relay.start()
                async for data in relay:
                    await self._queue.put(_Piece(index, data))
                await self._queue.put(_Piece(index, ended=relay.outcome))
            except Exception as error:  # a bug too: whoever reads must not wait for ever
                await self._queue.put(_Piece(index, raised=error))
                raise
            finally:
                await relay.aclose()


async def _cancel_all(tasks: Sequence["asyncio.Future[Result]"]) -> None:
    """No task outlives this, even if it is cancelled while it waits."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
