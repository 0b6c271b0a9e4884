"""A streamed answer: passed on as it comes, moved to another node when its node fails, and always ended properly."""

import asyncio
import functools
from collections.abc import Callable

from pdproxy.errors import ClientError, Fault, NodeFault
from pdproxy.failures import Moment, RetryOptions, Step, decide
from pdproxy.legs.rewrite import continuation_body
from pdproxy.nodes.pool import UnknownNode
from pdproxy.observe.labels import Answer, Attempt, Leg, Outcome
from pdproxy.orchestration.client_errors import (
    UpstreamErrorResponse,
    as_client_fault,
    deadline_error,
    node_error_event,
    stream_broken_error,
)
from pdproxy.orchestration.context import OrchestrationContext
from pdproxy.orchestration.decode_stream import DecodeStream, UsageEventFilter
from pdproxy.orchestration.resources import node_down_fault
from pdproxy.orchestration.response import ResponseStream
from pdproxy.orchestration.sub_request import RouteReason, SubRequest
from pdproxy.orchestration.upstream import UpstreamBody, UpstreamRequest
from pdproxy.request import Addition, Endpoint, Json
from pdproxy.sink import Sink
from pdproxy.stream.errors import error_event
from pdproxy.stream.transcript import NotContinuable, Transcript
from pdproxy.transport.port import HttpResponse

ALIVE_SECONDS = 0.5
"""How often a stream's progress is told to active health."""


class Relay(ResponseStream):
    """The stream of one prompt; a `ReplyStream` once it is `start`. Whoever makes one must `aclose` it.

    Args:
        context: dependencies.
        upstream: this prompt's; the relay closes it.
        sub_request: what has to be answered.
        ended: told once how it ended.
    """

    def __init__(
        self,
        context: OrchestrationContext,
        upstream: UpstreamRequest,
        sub_request: SubRequest,
        ended: Callable[[Outcome], None],
    ) -> None:
        super().__init__()
        self._context = context
        self._upstream = upstream
        self._sub_request = sub_request
        self._ended = ended
        self._transcript = Transcript(sub_request.endpoint, sub_request.shape)
        self._decode_stream: DecodeStream | None = None
        self._leaving = asyncio.Event()
        self._node_down = False
        self._migrations_left = context.config.migrations
        self._done = False
        self._progress_at = 0.0
        self.outcome: Outcome | None = None
        """How it ended, or would if it ended now; None until it is open."""

    async def start(self) -> None:
        """Wait for the first event.

        Raises:
            ClientError: all chances are used up.
            UpstreamErrorResponse: a node's own error goes to the client.
        """
        why = RouteReason.of(self._sub_request.shape.final_because)
        self._context.metrics.continuable(Answer.YES if why is RouteReason.NONE else Answer.NO, why)
        self._ready = await self._upstream.start(self._body_for(self._sub_request.body), self._read_first_event)
        self._upstream.resources.slot.on_node_down(self._on_node_down)
        self.outcome = Outcome.CLIENT_GONE

    async def pipe_to(self, sink: Sink) -> None:
        """See `ReplyStream`. A node that leaves, fails or ends its answer is looked at by the next read."""
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
                self._ended(self.outcome)

    def _body_for(self, body: Json) -> UpstreamBody:
        usage = frozenset({Addition.USAGE}) if _adds_usage(self._sub_request) else frozenset()
        return UpstreamBody(body, self._sub_request.shape.additions | usage)

    async def _read_first_event(self, response: HttpResponse) -> bytes:
        """A decode leg's head is here: read up to its first event."""
        hand_over = self._upstream.hand_over
        if not self._transcript.started and hand_over is not None:
            self._transcript.cached_tokens = hand_over.cached_tokens
        tail = UsageEventFilter() if _adds_usage(self._sub_request) else None
        decode_stream = DecodeStream(response, self._transcript, hand_over is not None, tail)
        read_first = await decode_stream.read_first()
        self._decode_stream = decode_stream
        self._leaving = self._leaving_event()
        return read_first

    def _leaving_event(self) -> asyncio.Event:
        try:
            return self._context.pool.leaving(self._upstream.node_name)
        except UnknownNode:  # it was removed while it was asked
            gone = asyncio.Event()
            gone.set()
            return gone

    async def _advance(self) -> bytes:
        if self._done:
            raise StopAsyncIteration
        decode_stream = self._decode_stream
        if decode_stream is None or decode_stream.ended:
            self._finish(Outcome.OK)
            return b""
        try:
            self._upstream.remaining_seconds()
            if self._leaving.is_set() and self._can_move() and self._upstream.other_node_available():
                return await self._migrate()
            piece = await decode_stream.read_next()
        except NodeFault as fault:
            return await self._on_fault(decode_stream, node_down_fault() if self._node_down else as_client_fault(fault))
        except (ClientError, NotContinuable) as error:
            return await self._fail(error)
        self._report_progress()
        return piece

    def _on_node_down(self) -> None:
        """Active health finds the node gone. Worth ending the wait for it only where the stream can go on elsewhere."""
        if not self._node_down and self._can_move() and self._upstream.other_node_available():
            self._node_down = True
            self._upstream.resources.abort_decode_leg()

    def _report_progress(self) -> None:
        """Tell active health now and then that the node is at work."""
        now = self._context.clock.now()
        if now >= self._progress_at + ALIVE_SECONDS:
            self._progress_at = now
            self._upstream.resources.progress()

    async def _on_fault(self, decode_stream: DecodeStream, fault: NodeFault) -> bytes:
        """The node failed in the middle of its answer."""
        self._upstream.leg_failed(fault)
        if self._transcript.finished:
            self._finish(Outcome.OK)
            return decode_stream.flush() + self._transcript.ending()
        if fault.fault is Fault.CLIENT_ERROR:
            return await self._fail(fault)
        if self._upstream.deadline_passed:
            return await self._fail(deadline_error())
        chances = RetryOptions(
            self._context.config.on_prefill_failure, 0, False, self._migrations_left, self._continuable()
        )
        step = decide(Leg.DECODE, Moment.STREAMING, fault.fault, chances)
        self._context.metrics.step_taken(Leg.DECODE, fault.fault, step)
        self._upstream.record_failure(Leg.DECODE, self._upstream.node_name, fault, step)
        return await (self._migrate() if step is Step.MIGRATE else self._fail(fault))

    async def _migrate(self) -> bytes:
        """Go on elsewhere from what the client has."""
        self._migrations_left -= 1
        self._node_down = False
        self._record_usage()
        try:
            body = self._remaining_body()
            await self._upstream.leave_node()
            ready = await self._upstream.start(body, self._read_first_event)
            self._upstream.resources.slot.on_node_down(self._on_node_down)
        except (ClientError, UpstreamErrorResponse, NotContinuable) as error:
            self._context.metrics.migrated(Attempt.FAILED)
            return await self._fail(error)
        self._context.metrics.migrated(Attempt.SUCCEEDED)
        return ready

    def _remaining_body(self) -> UpstreamBody:
        """What is still to be generated, as a request."""
        if not self._transcript.started:
            self._transcript.restart()
            return self._body_for(self._sub_request.body)
        continuation = self._transcript.continuation()
        self._transcript.resume()
        return self._body_for(continuation_body(self._sub_request.endpoint, self._sub_request.body, continuation))

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

    async def _fail(self, error: NodeFault | ClientError | UpstreamErrorResponse | NotContinuable) -> bytes:
        """The error event, and the end. What is held is given back before the client has read it."""
        kept = b"" if self._decode_stream is None else self._decode_stream.flush()
        self._finish(Outcome.FAILED)
        await self._upstream.aclose()
        own = node_error_event(self._sub_request.endpoint, error)
        return kept + (own or error_event(self._sub_request.endpoint, stream_broken_error(error)))

    def _finish(self, outcome: Outcome) -> None:
        self._done, self.outcome = True, outcome
        if outcome is Outcome.OK:
            self._upstream.resources.hand_over_read()
        self._record_usage()

    def _record_usage(self) -> None:
        """A leg has ended: count what it told of itself."""
        decode_stream, self._decode_stream = self._decode_stream, None
        if decode_stream is not None and decode_stream.usage is not None:
            self._upstream.record_usage(decode_stream.usage)


def _adds_usage(sub_request: SubRequest) -> bool:
    """Whether we ask for the usage event: it tells whether the node recomputed. Not where it would change more."""
    known = sub_request.endpoint in (Endpoint.COMPLETIONS, Endpoint.CHAT)
    return known and sub_request.shape.choices == 1 and sub_request.body.get("stream_options") is None
