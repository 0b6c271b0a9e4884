"""A streamed answer: passed on as it comes, moved to another node when its node fails, and always ended properly."""

import asyncio
import functools
from collections.abc import Callable

from pdproxy.errors import ClientError, NodeFault
from pdproxy.failures import Moment, RetryOptions, Step, decide
from pdproxy.legs.rewrite import continuation_body
from pdproxy.nodes.pool import UnknownNode
from pdproxy.observe.labels import Attempt, Leg, Outcome
from pdproxy.orchestration.client_errors import (
    StreamError,
    UpstreamErrorResponse,
    deadline_error,
    deadline_passed,
    stream_error_event,
)
from pdproxy.orchestration.context import OrchestrationContext
from pdproxy.orchestration.decode_stream import DecodeStream, UsageEventFilter
from pdproxy.orchestration.resources import node_down_fault
from pdproxy.orchestration.upstream import UpstreamRequest
from pdproxy.request import Addition, Endpoint, Json, SubRequest
from pdproxy.response import ResponseStream, Sink
from pdproxy.stream.choice_state import NotContinuable
from pdproxy.stream.transcript import Transcript
from pdproxy.transport.port import HttpResponse

PROGRESS_SECONDS = 0.1
"""How often a stream's progress is reported to active health, which knows of silence with this precision."""


class Relay(ResponseStream):
    """The stream of one prompt, once `start` has returned. The holder must `aclose` it, which closes ``upstream``."""

    def __init__(
        self, context: OrchestrationContext, upstream: UpstreamRequest, on_finished: Callable[[Outcome], None]
    ) -> None:
        super().__init__()
        self._context = context
        self._upstream = upstream
        self._sub_request = upstream.sub_request
        self._on_finished = on_finished
        self._adds_usage = _adds_usage(upstream.sub_request)
        self._transcript = Transcript(upstream.sub_request.endpoint, upstream.sub_request.shape)
        self._decode_stream: DecodeStream | None = None
        self._leaving = asyncio.Event()
        self._node_down = False
        self._migrations_left = context.config.migrations
        self._done = False
        self._progress_at = 0.0
        self.outcome: Outcome | None = None
        """How it ended, or would if it ended now; None before it has started."""

    async def start(self) -> None:
        """Wait for the first event; raises as `UpstreamRequest.start`."""
        self._context.metrics.continuable(self._sub_request.shape.not_continuable)
        self._ready = await self._start_on_node(self._sub_request.body)
        self.outcome = Outcome.CLIENT_GONE

    async def pipe_to(self, sink: Sink) -> None:
        """See `ResponseStream`. Returns where the node leaves, fails or ends its answer: the next read decides."""
        if self._decode_stream is not None and not self._ready and not self._leaving.is_set():
            await self._decode_stream.pipe_to(functools.partial(self._write_piece, sink))

    def _write_piece(self, sink: Sink, piece: bytes) -> bool:
        self._report_progress()
        return sink(piece) and not self._leaving.is_set()

    async def aclose(self) -> None:
        """End the legs, release what they hold. Idempotent."""
        if self.outcome is Outcome.CLIENT_GONE and self._transcript.ended and not self._ready:
            self._finish(Outcome.OK)  # many clients leave as soon as they have read the end
        self._done, self._ready = True, b""
        self._record_usage()
        try:
            await self._upstream.aclose()
        finally:
            if self.outcome is not None:
                self._on_finished(self.outcome)

    async def _start_on_node(self, body: Json) -> bytes:
        additions = self._sub_request.shape.additions
        if self._adds_usage:
            additions |= {Addition.USAGE}
        first_event = await self._upstream.start(body, additions, self._read_first_event)
        self._upstream.resources.slot.on_node_down(self._on_node_down)
        return first_event

    async def _read_first_event(self, response: HttpResponse) -> bytes:
        usage_filter = UsageEventFilter() if self._adds_usage else None
        decode_stream = DecodeStream(response, self._transcript, self._note_ticket, usage_filter)
        read_first = await decode_stream.read_first()
        self._decode_stream = decode_stream
        self._leaving = self._leaving_event()
        return read_first

    def _note_ticket(self) -> int | None:
        """How many prompt tokens the node may compute with the leg's ticket; None where it has none. What its prefill
        node had cached is what the client is to see."""
        hand_over = self._upstream.hand_over
        if not self._transcript.started and hand_over is not None:
            self._transcript.cached_tokens = hand_over.answer.cached_tokens
        return None if hand_over is None else hand_over.node.tail_tokens

    def _leaving_event(self) -> asyncio.Event:
        try:
            return self._context.pool.leaving(self._upstream.node_name)
        except UnknownNode:  # the node was removed while its leg was starting
            removed = asyncio.Event()
            removed.set()
            return removed

    async def _advance(self) -> bytes:
        if self._done:
            raise StopAsyncIteration
        decode_stream = self._decode_stream
        if decode_stream is None or decode_stream.ended:
            self._finish(Outcome.OK)
            return b""
        try:
            self._upstream.remaining_seconds()
            if (
                self._leaving.is_set()
                and not self._transcript.finished  # only its end is missing
                and self._can_move()
                and self._upstream.nodes.other_than(self._upstream.node_name)
            ):
                return await self._migrate()
            piece = await decode_stream.read_next()
        except NodeFault as fault:
            return await self._on_fault(decode_stream, node_down_fault() if self._node_down else fault)
        except (ClientError, NotContinuable) as error:
            return await self._fail(error)
        self._report_progress()
        return piece

    def _on_node_down(self) -> None:
        """Active health gave the node up: abort the leg, but only where the stream can be continued elsewhere."""
        if not self._node_down and self._can_move() and self._upstream.nodes.other_than(self._upstream.node_name):
            self._node_down = True
            self._upstream.resources.abort_decode_leg()

    def _report_progress(self) -> None:
        now = self._context.clock.now()
        if now >= self._progress_at + PROGRESS_SECONDS:
            self._progress_at = now
            self._upstream.resources.progress()

    async def _on_fault(self, decode_stream: DecodeStream, fault: NodeFault) -> bytes:
        """The node failed in the middle of its answer."""
        self._upstream.nodes.record_fault(Leg.DECODE, self._upstream.node_name, fault)
        if self._transcript.finished:
            self._finish(Outcome.OK)
            return decode_stream.flush() + self._transcript.ending()
        if deadline_passed(self._context.clock, self._sub_request.request.deadline):
            return await self._fail(deadline_error())
        config = self._context.config
        options = RetryOptions(
            config.on_prefill_failure, 0, migrations=self._migrations_left, continuable=self._continuable()
        )
        step = decide(Leg.DECODE, Moment.STREAMING, fault.fault, options)
        self._context.metrics.step_taken(Leg.DECODE, fault.fault, step)
        self._upstream.nodes.record_step(Leg.DECODE, self._upstream.node_name, fault, step)
        return await (self._migrate() if step is Step.MIGRATE else self._fail(fault))

    async def _migrate(self) -> bytes:
        """Continue on another node from what the client has."""
        self._migrations_left -= 1
        self._node_down = False
        self._record_usage()
        try:
            body = self._remaining_body()
            await self._upstream.leave_node()
            first_event = await self._start_on_node(body)
        except (ClientError, UpstreamErrorResponse, NotContinuable) as error:
            self._context.metrics.migrated(Attempt.FAILED)
            return await self._fail(error)
        self._context.metrics.migrated(Attempt.SUCCEEDED)
        return first_event

    def _remaining_body(self) -> Json:
        """What is still to be generated, as a request."""
        if not self._transcript.started:
            self._transcript.restart()
            return self._sub_request.body
        continuation = self._transcript.continuation()
        self._transcript.resume()
        return continuation_body(self._sub_request.endpoint, self._sub_request.body, continuation)

    def _can_move(self) -> bool:
        return self._migrations_left > 0 and self._continuable()

    def _continuable(self) -> bool:
        if not self._transcript.started:
            return True
        try:
            self._transcript.continuation()
        except NotContinuable:
            return False
        return True

    async def _fail(self, error: StreamError) -> bytes:
        """The error event, and the end. What is held is given back before the client has read it."""
        held = b"" if self._decode_stream is None else self._decode_stream.flush()
        self._finish(Outcome.FAILED)
        await self._upstream.aclose()
        return held + stream_error_event(self._sub_request.endpoint, error)

    def _finish(self, outcome: Outcome) -> None:
        self._done, self.outcome = True, outcome
        if outcome is Outcome.OK:
            self._upstream.resources.forget_hand_over()
        self._record_usage()

    def _record_usage(self) -> None:
        """A leg has ended."""
        decode_stream, self._decode_stream = self._decode_stream, None
        if decode_stream is not None and decode_stream.usage is not None:
            self._upstream.record_usage(decode_stream.usage)


def _adds_usage(sub_request: SubRequest) -> bool:
    """Whether we ask for the usage event, which shows whether the node recomputed; not where it would change more."""
    known = sub_request.endpoint in (Endpoint.COMPLETIONS, Endpoint.CHAT)
    return known and sub_request.shape.choices == 1 and sub_request.body.get("stream_options") is None
