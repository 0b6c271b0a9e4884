"""A list of prompts: a sub-request each, answered as one, as a node answers a list of prompts.

Choice indices count through: prompt i's choice j becomes ``i * n + j`` (vLLM 0.32, ``openai/completion/serving.py``).
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import TypeVar

from pdproxy.errors import ClientError, NodeFault
from pdproxy.observe.labels import Outcome
from pdproxy.orchestration.client_errors import UpstreamErrorResponse, error_event, final_error_in_stream
from pdproxy.orchestration.context import OrchestrationContext
from pdproxy.orchestration.relay import Relay
from pdproxy.orchestration.upstream import UpstreamRequest
from pdproxy.request import Endpoint, Json
from pdproxy.response import Sink
from pdproxy.stream.chunks import DONE, DONE_EVENT, HEAD, choices_of, data_event, parse_object
from pdproxy.stream.sse import Framer, event_of
from pdproxy.usage import sum_usage

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
        await cancel_all(tasks)


async def cancel_all(tasks: Sequence["asyncio.Future[Result]"]) -> None:
    """Cancel tasks and wait for their end, even if it is cancelled meanwhile."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def merge_answers(answers: Sequence[Json]) -> dict[str, object]:
    """Completions answers as one; everything but choices and usage is the first one's, and ``metrics`` is left out."""
    merged = dict(answers[0])
    choices = [choice for answer in answers for choice in choices_of(answer)]
    merged["choices"] = [{**choice, "index": index} for index, choice in enumerate(choices)]
    merged["usage"] = sum_usage([usage for answer in answers if isinstance(usage := answer.get("usage"), dict)])
    if "metrics" in merged:
        merged["metrics"] = None
    return merged


class StreamMerge:
    """Merges the events of several prompts' streams, in any order; does no I/O. ``choices`` is ``n`` of the request."""

    def __init__(self, choices: int) -> None:
        self._choices = choices
        self._framers: dict[int, Framer] = {}
        self._usages: dict[int, dict[str, object]] = {}
        self._first: dict[str, object] = {}

    def merged(self, prompt: int, piece: bytes) -> bytes:
        """The bytes for the client from one prompt's stream; the stream's end and usage are kept for `ending`."""
        framer = self._framers.setdefault(prompt, Framer())
        return b"".join(self._take(prompt, raw) for raw in framer.feed(piece))

    def ending(self) -> bytes:
        """The summed usage where the streams reported it, and the end. Call it once every stream has ended."""
        usages = [self._usages[prompt] for prompt in sorted(self._usages)]
        final = data_event({**self._first, "choices": [], "usage": sum_usage(usages)}) if usages else b""
        return final + DONE_EVENT

    def _take(self, prompt: int, raw: bytes) -> bytes:
        data = event_of(raw).data
        if data is None:
            return raw
        if data == DONE:
            return b""
        payload = parse_object(data)
        for key in HEAD:
            if key in payload:
                payload[key] = self._first.setdefault(key, payload[key])
        if payload.get("choices") == [] and isinstance(usage := payload.get("usage"), dict):
            self._usages[prompt] = usage
            return b""
        for choice in choices_of(payload):
            index = choice.get("index")
            choice["index"] = prompt * self._choices + (index if isinstance(index, int) else 0)
        return data_event(payload)


_Piece = tuple[int, bytes | Outcome | Exception | None]
"""The number of a prompt with bytes of its stream, with how that ended, or with what it raised."""


class FanOut:
    """A `ResponseStream`: runs a `Relay` for each prompt and merges their streams."""

    def __init__(
        self,
        context: OrchestrationContext,
        upstreams: Sequence[UpstreamRequest],
        on_finished: Callable[[Outcome], None],
    ) -> None:
        self._relays = [Relay(context, upstream, _ignore_outcome) for upstream in upstreams]
        self._merge = StreamMerge(upstreams[0].sub_request.shape.choices)
        self._gate = asyncio.Semaphore(context.config.fan_out)
        self._failure = upstreams[0].record.failure
        self._on_finished = on_finished
        self._queue: asyncio.Queue[_Piece] = asyncio.Queue(context.config.fan_out)
        self._tasks: list[asyncio.Task[None]] = []
        self._running = len(upstreams)
        self._started = False
        self._ready = b""
        """The bytes that go out next."""
        self.outcome: Outcome | None = None
        """How it ended; None while it goes on."""

    async def start(self) -> None:
        """Start all, and wait for the first event of any; raises as `UpstreamRequest.start`, for any of them."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._pump(index, relay)) for index, relay in enumerate(self._relays)]
        while not self._ready and self.outcome is None:
            self._ready = self._take(await self._queue.get())
        self._started = True

    async def read(self) -> bytes:
        """See `ResponseStream`."""
        while not self._ready and self.outcome is None:
            self._ready = await self._advance()
        ready, self._ready = self._ready, b""
        if not ready:
            await self.aclose()
        return ready

    async def pipe_to(self, sink: Sink, chunk_sink: Sink | None = None) -> None:
        """See `ResponseStream`: every piece is merged with others, so all is left to reading."""

    async def aclose(self) -> None:
        """End every stream. Idempotent."""
        if self._ready or self.outcome is None:
            self.outcome, self._ready = Outcome.CLIENT_GONE, b""
        tasks, self._tasks = self._tasks, []  # a second call has nothing to wait for: not even a turn of the loop
        try:
            await cancel_all(tasks)
        finally:
            if self._started:
                self._on_finished(self.outcome)

    async def _advance(self) -> bytes:
        try:
            return self._take(await self._queue.get())
        except (ClientError, UpstreamErrorResponse) as error:
            self.outcome = Outcome.FAILED
            shown = error if isinstance(error, ClientError) else ClientError(502, "A node refused one of the prompts.")
            self._failure.ended_with(final_error_in_stream(shown))
            return error_event(Endpoint.COMPLETIONS, shown)

    def _take(self, piece: _Piece) -> bytes:
        prompt, content = piece
        if isinstance(content, Exception):
            raise content
        if isinstance(content, bytes):
            return self._merged(prompt, content)
        self._running -= 1
        if content is not Outcome.OK:
            self.outcome = Outcome.FAILED
            return DONE_EVENT
        if self._running:
            return b""
        self.outcome = Outcome.OK
        return self._merge.ending()

    def _merged(self, prompt: int, data: bytes) -> bytes:
        try:
            return self._merge.merged(prompt, data)
        except NodeFault as fault:
            raise ClientError(502, "A node's answer could not be understood.", code="stream_broken") from fault

    async def _pump(self, index: int, relay: Relay) -> None:
        async with self._gate:
            try:
                await relay.start()
                while data := await relay.read():
                    await self._queue.put((index, data))
                await self._queue.put((index, relay.outcome))
            except Exception as error:  # a bug too: the reader of the queue must not wait for ever
                await self._queue.put((index, error))
                raise
            finally:
                await relay.aclose()


def _ignore_outcome(outcome: Outcome) -> None:
    """One of several prompts has ended; only the whole request's outcome is recorded."""
