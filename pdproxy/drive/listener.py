"""Reads one decode leg's stream: bytes in, what the client sees out."""

import functools
from collections.abc import AsyncIterator

from pdproxy.drive.tail import Tail
from pdproxy.errors import Fault, NodeFault
from pdproxy.legs.tally import Tally, tally_event
from pdproxy.sink import Sink
from pdproxy.stream.chunk import parse_object
from pdproxy.stream.sse import Event, EventTooLong, SseParser
from pdproxy.stream.transcript import CHUNKED, DONE, NotContinuable, Transcript
from pdproxy.transport.port import Incoming


class Listener:
    """One leg. A fault in the middle of a piece comes up only after what stood before it was handed out.

    Args:
        incoming: the response; whoever made the listener closes it.
        transcript: outlives the leg, and knows what the client has.
        ticketed: whether the leg has a ticket, so that recomputing is worth noticing.
        tail: takes out the usage event where only we asked for it.
    """

    def __init__(self, incoming: Incoming, transcript: Transcript, ticketed: bool, tail: Tail | None) -> None:
        self._incoming = incoming
        self._chunks: AsyncIterator[bytes] = incoming.chunks()
        self._transcript = transcript
        self._ticketed = ticketed
        self._tail = tail
        self._parser = SseParser()
        self._nothing_kept = False
        """A piece stands for itself: there is no half an event before it, nor one that waits for the next."""
        self._trouble: NodeFault | NotContinuable | None = None
        self.heard = False
        """A data event came."""
        self.over = False
        """The body ended, and the stream with it."""
        self.tally: Tally | None = None
        """The last usage that the leg told."""

    @property
    def recomputed(self) -> bool:
        """The leg had a ticket and computed the prompt all the same, as far as it tells."""
        return self._ticketed and self.tally is not None and self.tally.recomputed

    async def first(self) -> bytes:
        """Everything up to and with the first data event.

        Raises:
            NodeFault: as `next`.
        """
        pieces = []
        while not (self.heard or self.over):
            pieces.append(await self.next())
        return b"".join(pieces)

    async def next(self) -> bytes:
        """What the client sees of the next piece; may be empty.

        Raises:
            NodeFault: RESET where the body ended before the stream did; what the transport and the transcript raise.
            NotContinuable: the leg says something else than the client already has.
        """
        if self._trouble is not None:
            raise self._trouble
        piece = await self._piece()
        if piece is None:
            return self._end()
        return self._seen(piece)

    async def pipe_to(self, sink: Sink) -> None:
        """Hand on what the client sees of each piece, as long as that is all there is to do; `next` tells the rest."""
        if self.heard and self._trouble is None and not self.over:
            await self._incoming.pipe_to(functools.partial(self._hand_on, sink))

    def _hand_on(self, sink: Sink, piece: bytes) -> bool:
        try:
            seen = self._seen(piece)
        except NodeFault as fault:
            self._trouble = fault
            return False
        return (not seen or sink(seen)) and self._trouble is None

    def flush(self) -> bytes:
        """What was kept back for an event that did not come."""
        return b"" if self._tail is None else self._tail.flush()

    async def _piece(self) -> bytes | None:
        try:
            return await anext(self._chunks, None)
        except NodeFault:
            if not self._transcript.ended:
                raise
            return None  # cut after its end: nothing is missing

    def _end(self) -> bytes:
        if not self._transcript.ended:
            raise NodeFault(Fault.RESET, "the body ended before the stream did")
        self.over = True
        return b""

    def _seen(self, piece: bytes) -> bytes:
        if self._nothing_kept:
            plain = self._transcript.take_plain(piece)
            if plain is not None:
                return plain
        seen = b"".join(map(self._take, self._events(piece)))
        self._nothing_kept = self.heard and not self._parser.rest and (self._tail is None or not self._tail.keeps)
        return seen

    def _events(self, piece: bytes) -> list[Event]:
        try:
            return self._parser.feed(piece)
        except EventTooLong as error:
            raise NodeFault(Fault.INVALID_BODY, "an event of the stream has no end") from error

    def _take(self, event: Event) -> bytes:
        if event.data is None or self._trouble is not None:
            return event.raw if self._trouble is None else b""
        if self._transcript.ended and self._transcript.endpoint in CHUNKED:
            return b""
        if b'"usage":{' in event.data:
            self._note(event.data)
            if self._tail is not None and self._tail.ours(event.data):
                return self._tail.close(event.data)
        try:
            self._check(event.data)
            seen = self._transcript.take(event)
        except (NodeFault, NotContinuable) as trouble:
            if not self.heard:
                raise
            if not self._transcript.ended:  # else nothing is missing
                self._trouble = trouble
            return b""
        self.heard = True
        return seen if self._tail is None else self._tail.keep(event.data, seen)

    def _check(self, data: bytes) -> None:
        """The first event decides whether this is an answer at all; of the others a glance at both ends must do.

        In the endpoints that it follows closely the transcript parses the first event itself.
        """
        if data == DONE:
            return
        if not self.heard and self._transcript.endpoint not in CHUNKED:
            parse_object(data)
        elif data[:1] != b"{" or data[-1:] != b"}":
            raise NodeFault(Fault.INVALID_BODY, "an event of the stream is no JSON object")

    def _note(self, data: bytes) -> None:
        self.tally = tally_event(data) or self.tally
        if self.recomputed:
            self._transcript.cached_tokens = None  # what the prefill node had cached served nobody
