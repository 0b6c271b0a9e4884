"""The answer to one streamed request: its events are held until the endpoint's code asks for the next output, and leave
with the record of what they were made of (`journal`).

Of a stream that is continued, the first outputs are replayed (`replay`) and their events dropped. The answer begins
only then, so that a replay that fails is answered by a status.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextvars import ContextVar
from itertools import count
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import RequestOutputKind, SamplingParams

from .journal import BadRecordsError, Group, JournalWriter, Output, Record
from .replay import GROUPS_AT_ONCE, ResumedEngine, View, check
from .resume_order import KEY
from .resumed_requests import ResumeLimits

if TYPE_CHECKING:
    from starlette.types import Message, Send
    from vllm.outputs import RequestOutput

NOT_RESUMABLE = "NotResumableError"
FAILURES = ("abort", "error")
"""Finish reasons with which a node, not the model, ends a choice."""


class StreamRefusedError(Exception):
    """The request gets no stream; `status` and `kind` of the answer, and why."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


class StreamedEngine(View):
    """The engine client of the serving objects; `current`: the answer that the running task makes."""

    def __init__(self, engine: Any, current: ContextVar[JournaledResponse]) -> None:
        super().__init__(engine, _current=current)

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `AsyncLLM.generate`. Raises StreamRefusedError."""
        response: JournaledResponse = self._current.get()
        engine = response.admit(self._target, sampling_params)
        return response.follow(engine.generate(prompt, sampling_params, request_id, **options))

    async def notify_kv_transfer_request_rejected(self, *args: Any, **kwargs: Any) -> None:
        """As `AsyncLLM`'s, which gives a rejected request's ticket back; not where the endpoint itself can use it."""
        if not self._current.get().left_to_endpoint:
            await self._target.notify_kv_transfer_request_rejected(*args, **kwargs)


class JournaledResponse:
    """One answer on its way: takes what the endpoint sends, and sends it when its record can be written."""

    def __init__(self, send: Send, records: Sequence[Record], secret: bytes) -> None:
        self._send = send
        self._records = records
        self._secret = secret
        self._journal = JournalWriter(records)
        self._start: Message | None = None
        self._streams = False
        self._admitted = False
        self._complete = False
        self._turns = count()
        self._refusal: StreamRefusedError | None = None

    @property
    def left_to_endpoint(self) -> bool:
        """Whether it was refused because of its shape, which the endpoint itself serves."""
        return self._refusal is not None and self._refusal.kind == NOT_RESUMABLE

    async def __call__(self, message: Message) -> None:
        """ASGI's `send`. Raises StreamRefusedError, whatever the endpoint has made of it."""
        if self._refusal is not None:
            raise self._refusal
        if message["type"] == "http.response.start":
            self._streams = _is_event_stream(message)
            self._start = message
        if not self._streams:
            await self._send(message)
        elif message["type"] == "http.response.body":
            await self._take(message["body"])
            if not message.get("more_body", False):
                await self._end()

    def admit(self, engine: Any, params: SamplingParams) -> Any:
        """The engine client to generate with. Raises StreamRefusedError."""
        limits = ResumeLimits.of(engine.vllm_config)
        if why := self._not_resumable(params, limits):
            raise self._refuse(400, NOT_RESUMABLE, why)
        self._admitted = True
        if not self._records:
            return engine
        try:
            check(self._records, params, engine.model_config.get_vocab_size())
        except BadRecordsError as error:
            raise self._refuse(400, "BadRequestError", f"{KEY}: {error}") from error
        return ResumedEngine(engine, self._records, self._secret)

    async def follow(self, outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
        """The outputs, each with its record once the endpoint's code asks for the next."""
        try:
            await self._commit(())
            async for output in outputs:
                group = group_of(output)
                self._journal.note_cached(output.num_cached_tokens, output.num_cache_creation_tokens)
                yield output
                if any(each.finish_reason in FAILURES for each in group):
                    return
                await self._commit(group)
            self._complete = True
        except Exception as error:
            if not self._journal.replaying:
                raise
            raise self._refuse(409, "ReplayError", f"it cannot be made again: {error.__cause__ or error}") from error
        finally:
            await outputs.aclose()

    def _not_resumable(self, params: SamplingParams, limits: ResumeLimits) -> str | None:
        if self._admitted:
            return "several prompts in one body are not resumable"
        if params.output_kind is not RequestOutputKind.DELTA:
            return "the body is not a stream, or asks for beam search, which is not resumable"
        if params.prompt_logprobs is not None:
            return "log-probabilities of the prompt are not resumable"
        obstacle = limits.obstacle(params)
        return None if obstacle is None else f"{obstacle} is not resumable"

    def _refuse(self, status: int, kind: str, message: str) -> StreamRefusedError:
        self._refusal = StreamRefusedError(status, kind, message)
        return self._refusal

    async def _take(self, chunk: bytes) -> None:
        if chunk.startswith(b":") and self._journal.empty and self._start is None:
            await self._write(chunk)  # a keep-alive comment, which must not wait
        elif chunk:
            self._journal.add(chunk)

    async def _commit(self, group: Group) -> None:
        data = self._journal.commit(group)
        if not self._journal.replaying:
            await self._begin()
            await self._write(data)
        elif next(self._turns) % GROUPS_AT_ONCE == 0:
            await asyncio.sleep(0)

    async def _begin(self) -> None:
        if self._start is not None:
            start, self._start = self._start, None
            await self._send(start)

    async def _write(self, data: bytes) -> None:
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _end(self) -> None:
        if self._journal.replaying:
            raise self._refuse(409, "ReplayError", "it ends before all of it is made again")
        data = self._journal.commit(()) if self._complete else self._journal.rest()
        await self._begin()
        await self._send({"type": "http.response.body", "body": data, "more_body": False})


def group_of(output: RequestOutput) -> list[Output]:
    """The part of a record that describes one output of the engine client."""
    return [Output(each.index, each.token_ids, each.finish_reason, each.stop_reason) for each in output.outputs]


def _is_event_stream(start: Message) -> bool:
    types = [value for name, value in start["headers"] if name.lower() == b"content-type"]
    return start["status"] == 200 and any(value.startswith(b"text/event-stream") for value in types)
