"""A streamed answer: passed on as it comes, moved to another node when its node fails, and always ended properly."""

import asyncio
from collections.abc import Callable

from pdproxy.errors import ClientError, NodeFault
from pdproxy.failures import Moment, RetryOptions, Step, decide
from pdproxy.nodes.pool import UnknownNode
from pdproxy.observe.labels import Attempt, Leg, Move, Outcome
from pdproxy.observe.tracing import note_event
from pdproxy.orchestration.client_errors import (
    StreamError,
    UpstreamErrorResponse,
    deadline_error,
    final_error_in_stream,
    stream_error_event,
)
from pdproxy.orchestration.context import OrchestrationContext, deadline_passed
from pdproxy.orchestration.continuity import Continuity
from pdproxy.orchestration.leg_reader import LegReader
from pdproxy.orchestration.leg_wait import node_down_fault
from pdproxy.orchestration.upstream import UpstreamRequest
from pdproxy.raw_json import value_of
from pdproxy.request import Endpoint, SubRequest
from pdproxy.response import Sink
from pdproxy.stream.usage_event import UsageEventFilter
from pdproxy.transport.port import HttpResponse

PROGRESS_SECONDS = 0.1
"""How often a stream's progress is reported to active health, which knows of silence with this precision."""


class Relay:
    """The `ResponseStream` of one prompt, once `start` has returned. To `aclose` it closes ``upstream``."""

    def __init__(
        self, context: OrchestrationContext, upstream: UpstreamRequest, on_finished: Callable[[Outcome], None]
    ) -> None:
        self._context = context
        self._now = context.clock.now
        self._upstream = upstream
        self._sub_request = upstream.sub_request
        self._on_finished = on_finished
        self._adds_usage = _adds_usage(upstream.sub_request)
        self._continuity = Continuity(
            upstream.sub_request, context.config.migrations, upstream.nodes, adds_usage=self._adds_usage
        )
        self._transcript = self._continuity.transcript
        self._leg_reader: LegReader | None = None
        self._ready = b""
        """The bytes that go out next."""
        self._leaving = asyncio.Event()
        self._node_down = self._done = self._closed = False
        self._progress_due = 0.0
        self._passed_on_at = 0.0
        self._ticket_tail: int | None = None
        self._moved: Move | None = None
        """The move after which the client has got nothing yet."""
        self.outcome: Outcome | None = None
        """How it ended, or would if it ended now; None before it has started."""

    async def start(self) -> None:
        """Wait for the first event; raises as `UpstreamRequest.start`."""
        self._ready = await self._start_on_node()
        self._passed_on_at = self._context.clock.now()
        self._upstream.record.began_with(self._ready)
        self._context.metrics.continuable(self._continuity.obstacle)
        self._drop_unneeded_body()
        self.outcome = Outcome.CLIENT_GONE

    async def read(self) -> bytes:
        """See `ResponseStream`."""
        while not self._ready and not self._done:
            self._ready = await self._advance()
        ready, self._ready = self._ready, b""
        if not ready:
            await self.aclose()
        return ready

    async def pipe_to(self, sink: Sink, chunk_sink: Sink | None = None) -> None:
        """See `ResponseStream`. Returns where the node leaves, fails or ends its answer: the next read decides."""
        if self._leg_reader is not None and not self._ready and not self._leaving.is_set():
            await self._leg_reader.pipe_to(sink, self._on_piece, chunk_sink)

    async def aclose(self) -> None:
        """End the legs, release what they hold. Idempotent."""
        if self._closed:
            return
        if self.outcome is Outcome.CLIENT_GONE and self._transcript.ended and not self._ready:
            self._finish(Outcome.OK)  # many clients leave as soon as they have read the end
        self._done, self._ready = True, b""
        self._record_move()
        self._record_usage()
        try:
            await self._upstream.aclose()
            self._closed = True
        finally:
            if self.outcome is not None:
                self._on_finished(self.outcome)

    async def _start_on_node(self) -> bytes:
        first_event = await self._upstream.start(self._continuity.new_form, self._read_first_event)
        self._upstream.on_node_down(self._on_node_down)
        return first_event

    async def _read_first_event(self, response: HttpResponse) -> bytes:
        usage_filter = UsageEventFilter() if self._adds_usage else None
        tail, journal = self._note_ticket(), self._continuity.journal
        leg_reader = LegReader(response, self._transcript, tail, usage_filter, journal)
        read_first = await leg_reader.read_first()
        self._leg_reader = leg_reader
        self._leaving = self._leaving_event()
        return read_first

    def _note_ticket(self) -> int | None:
        """How many prompt tokens the node may compute with the leg's ticket; None where it has none. What its prefill
        node had cached is what the client is to see. A stream that is resumed tells of the nodes that began it."""
        hand_over = self._upstream.hand_over
        if not self._upstream.resumed:
            if not self._transcript.started and hand_over is not None:
                self._transcript.cache_use = hand_over.answer.cache_use
            self._ticket_tail = None if hand_over is None else hand_over.node.tail_tokens
        return self._ticket_tail

    def _leaving_event(self) -> asyncio.Event:
        try:
            return self._context.pool.leaving(self._upstream.node_name)
        except UnknownNode:  # the node was removed while its leg was starting
            removed = asyncio.Event()
            removed.set()
            return removed

    async def _advance(self) -> bytes:
        """The client's next bytes. A stream whose node leaves moves first, if it can. No leg has failed then,
        so the failure table is not asked. A leg that fails goes to `_on_fault`, which asks it."""
        leg_reader = self._leg_reader
        if leg_reader is None or leg_reader.ended:
            self._finish(Outcome.OK)
            return b""
        try:
            self._upstream.remaining_seconds()
            if self._leaving.is_set() and (move := self._move_now()) is not None:
                return await self._move(move)
            piece = await leg_reader.read_next()
        except NodeFault as fault:
            return await self._on_fault(leg_reader, node_down_fault() if self._node_down else fault)
        except ClientError as error:
            return await self._fail(error)
        self._on_piece(piece)
        return piece

    def _on_node_down(self) -> None:
        """Active health gave the node up: abort the leg, but only where the stream can end without it or go on
        elsewhere."""
        if not self._node_down and (self._only_lacks_its_end() or self._move_now() is not None):
            self._node_down = True
            self._upstream.abort_decode_leg()

    def _only_lacks_its_end(self) -> bool:
        """Whether all was said, so that the stream can be ended here: nobody needs to be asked for usage, or nobody can
        be."""
        move = self._continuity.possible_move(self._upstream.node_name)
        return self._transcript.finished and (move is None or self._continuity.complete)

    def _move_now(self) -> Move | None:
        """How the stream would move if it left its node now; None where it cannot, need not, or has nowhere to go."""
        name = self._upstream.node_name
        move = None if self._continuity.complete else self._continuity.possible_move(name)
        return None if move is None or not self._upstream.nodes.other_than(name, move) else move

    def _on_piece(self, piece: bytes) -> bool:
        """Something came from the node, and this of it goes to the client; whether the stream stays on the node."""
        now = self._now()
        if piece:
            if self._moved is not None:
                self._record_move()
                self._upstream.went_on()
            self._passed_on_at = now
        if now >= self._progress_due:
            self._progress_due = now + PROGRESS_SECONDS
            self._upstream.progress()
            self._drop_unneeded_body()
        return not self._leaving.is_set()

    def _drop_unneeded_body(self) -> None:
        """While a stream may move, its next node gets the body too; once it cannot, no leg needs it."""
        if not self._continuity.may_move:
            self._sub_request.held.drop()

    async def _on_fault(self, leg_reader: LegReader, fault: NodeFault) -> bytes:
        """The node failed in the middle of its answer."""
        broken = self._upstream.broke_off(fault)
        move = self._continuity.possible_move(self._upstream.node_name)
        if self._only_lacks_its_end():
            return leg_reader.flush() + self._end()
        if deadline_passed(self._context.clock, self._sub_request.request.deadline):
            return await self._fail(deadline_error())
        config = self._context.config
        options = RetryOptions(
            config.on_prefill_failure,
            0,
            moves_left=self._continuity.moves_left,
            continuable=move is not None,
            broken=broken,
        )
        step = decide(Leg.DECODE, Moment.STREAMING, fault.fault, options)
        self._context.metrics.step_taken(Leg.DECODE, fault.fault, step)
        self._upstream.show_broken_stream(fault, step)
        return await (self._move(move) if step is Step.MIGRATE and move is not None else self._fail(fault))

    async def _move(self, move: Move) -> bytes:
        """Go on at another node from what the client has."""
        self._node_down, left = False, self._upstream.node_name
        self._record_move()
        self._record_usage()
        try:
            self._continuity.start_move(move)
            await self._upstream.leave_node(move)
            first_event = await self._start_on_node()
        except (ClientError, UpstreamErrorResponse) as error:
            self._context.metrics.migrated(Attempt.FAILED)
            note_event("move_failed", {"move": move.value, "from_node": left})
            if not self._transcript.finished:
                return await self._fail(error)
            await self._upstream.aclose()  # what this leg held was not read
            return self._end()
        self._context.metrics.migrated(Attempt.SUCCEEDED)
        note_event("moved", {"move": move.value, "from_node": left, "to_node": self._upstream.node_name})
        self._moved = move
        self._on_piece(first_event)
        return first_event

    def _record_move(self) -> None:
        """Where the stream has moved: how long the client got nothing, until now."""
        move, self._moved = self._moved, None
        if move is not None:
            stall = self._context.clock.now() - self._passed_on_at
            self._upstream.record.moved(move, stall)
            self._context.metrics.stalled(move, stall)

    def _end(self) -> bytes:
        """The end of a stream that lacks nothing else."""
        self._finish(Outcome.OK)
        return self._transcript.ending()

    async def _fail(self, error: StreamError) -> bytes:
        """The error event, and the end. What is held is given back before the client has read it."""
        held = b"" if self._leg_reader is None else self._leg_reader.flush()
        self._finish(Outcome.FAILED)
        self._upstream.record.failure.ended_with(final_error_in_stream(error), self._upstream.node_name)
        await self._upstream.aclose()
        return held + stream_error_event(self._sub_request.endpoint, error)

    def _finish(self, outcome: Outcome) -> None:
        self._done, self.outcome = True, outcome
        if outcome is Outcome.OK:
            self._upstream.stream_ended()
        self._record_usage()
        self._upstream.record.finish_reasons = self._transcript.finish_reasons

    def _record_usage(self) -> None:
        """A leg has ended."""
        leg_reader, self._leg_reader = self._leg_reader, None
        if leg_reader is not None and leg_reader.usage is not None:
            self._upstream.record_usage(leg_reader.usage)


def _adds_usage(sub_request: SubRequest) -> bool:
    """Whether we ask for the usage event, which shows whether the node recomputed; not where it would change more."""
    known = sub_request.endpoint in (Endpoint.COMPLETIONS, Endpoint.CHAT)
    return known and sub_request.shape.choices == 1 and value_of(sub_request.body.get("stream_options")) is None
