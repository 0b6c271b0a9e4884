"""Reads the stream of one decode leg: bytes from the node in, bytes for the client out."""

import functools
import re
from collections.abc import AsyncIterator

from pdproxy.errors import Fault, NodeFault
from pdproxy.legs.usage import Usage, read_usage_event
from pdproxy.sink import Sink
from pdproxy.stream.chunks import parse_object
from pdproxy.stream.sse import Event, EventTooLong, SseParser
from pdproxy.stream.transcript import CHUNKED, DONE, NotContinuable, Transcript
from pdproxy.transport.port import HttpResponse

_FINISH = b'"finish_reason":"'
_USAGE = b'"choices":[],'
_FINGERPRINT = re.compile(rb',"system_fingerprint":"[^"\\]*"')
_END = b"}\n\n"


class UsageEventFilter:
    """For one stream of one choice whose ``stream_options.include_usage`` is ours."""

    def __init__(self) -> None:
        self._kept = b""

    @property
    def is_holding(self) -> bool:
        """Something is kept back."""
        return bool(self._kept)

    def is_usage_event(self, data: bytes) -> bool:
        """Whether an event is the usage event."""
        return _USAGE in data

    def keep(self, data: bytes, seen: bytes) -> bytes:
        """What the client may see now, ``seen`` being what it shall see of an event."""
        if _FINISH in data:
            self._kept += seen
            return b""
        return self.flush() + seen if self._kept else seen

    def close(self, data: bytes) -> bytes:
        """The usage event has come: what was kept, with the fingerprint that belongs to it."""
        found, kept = _FINGERPRINT.search(data), self.flush()
        if found is None or not kept.endswith(_END) or _FINGERPRINT.search(kept) is not None:
            return kept
        return kept.removesuffix(_END) + found.group() + _END

    def flush(self) -> bytes:
        """What was kept."""
        kept, self._kept = self._kept, b""
        return kept


class DecodeStream:
    """One leg. A fault in the middle of a piece comes up only after what stood before it was handed out.

    Args:
        response: the response; whoever made the listener closes it.
        transcript: outlives the leg, and knows what the client has.
        ticketed: whether the leg has a ticket, so that recomputing is worth noticing.
        tail: takes out the usage event where only we asked for it.
    """

    def __init__(
        self, response: HttpResponse, transcript: Transcript, ticketed: bool, tail: UsageEventFilter | None
    ) -> None:
        self._response = response
        self._chunks: AsyncIterator[bytes] = aiter(response)
        self._transcript = transcript
        self._ticketed = ticketed
        self._tail = tail
        self._parser = SseParser()
        self._at_event_boundary = False
        """A piece stands for itself: there is no half an event before it, nor one that waits for the next."""
        self._pending_error: NodeFault | NotContinuable | None = None
        self.has_data_event = False
        """A data event came."""
        self.ended = False
        """The body ended, and the stream with it."""
        self.usage: Usage | None = None
        """The last usage that the leg told."""

    @property
    def recomputed(self) -> bool:
        """The leg had a ticket and computed the prompt all the same, as far as it tells."""
        return self._ticketed and self.usage is not None and self.usage.recomputed

    async def read_first(self) -> bytes:
        """Everything up to and with the first data event.

        Raises:
            NodeFault: as `read_next`.
        """
        pieces = []
        while not (self.has_data_event or self.ended):
            pieces.append(await self.read_next())
        return b"".join(pieces)

    async def read_next(self) -> bytes:
        """What the client sees of the next piece; may be empty.

        Raises:
            NodeFault: RESET where the body ended before the stream did; what the transport and the transcript raise.
            NotContinuable: the leg says something else than the client already has.
        """
        if self._pending_error is not None:
            raise self._pending_error
        piece = await self._read_chunk()
        if piece is None:
            return self._end()
        return self._client_bytes(piece)

    async def pipe_to(self, sink: Sink) -> None:
        """Write what the client sees of each piece, while that is all there is to do; `read_next` does the rest."""
        if self.has_data_event and self._pending_error is None and not self.ended:
            await self._response.pipe_to(functools.partial(self._write_piece, sink))

    def _write_piece(self, sink: Sink, piece: bytes) -> bool:
        try:
            seen = self._client_bytes(piece)
        except NodeFault as fault:
            self._pending_error = fault
            return False
        return (not seen or sink(seen)) and self._pending_error is None

    def flush(self) -> bytes:
        """What was kept back for an event that did not come."""
        return b"" if self._tail is None else self._tail.flush()

    async def _read_chunk(self) -> bytes | None:
        try:
            return await anext(self._chunks, None)
        except NodeFault:
            if not self._transcript.ended:
                raise
            return None  # cut after its end: nothing is missing

    def _end(self) -> bytes:
        if not self._transcript.ended:
            raise NodeFault(Fault.RESET, "the body ended before the stream did")
        self.ended = True
        return b""

    def _client_bytes(self, piece: bytes) -> bytes:
        if self._at_event_boundary:
            plain = self._transcript.take_plain(piece)
            if plain is not None:
                return plain
        seen = b"".join(map(self._take_event, self._events(piece)))
        self._at_event_boundary = (
            self.has_data_event and not self._parser.rest and (self._tail is None or not self._tail.is_holding)
        )
        return seen

    def _events(self, piece: bytes) -> list[Event]:
        try:
            return self._parser.feed(piece)
        except EventTooLong as error:
            raise NodeFault(Fault.INVALID_BODY, "an event of the stream has no end") from error

    def _take_event(self, event: Event) -> bytes:
        if event.data is None or self._pending_error is not None:
            return event.raw if self._pending_error is None else b""
        if self._transcript.ended and self._transcript.endpoint in CHUNKED:
            return b""
        if b'"usage":{' in event.data:
            self._note_usage(event.data)
            if self._tail is not None and self._tail.is_usage_event(event.data):
                return self._tail.close(event.data)
        try:
            self._check(event.data)
            seen = self._transcript.take(event)
        except (NodeFault, NotContinuable) as error:
            if not self.has_data_event:
                raise
            if not self._transcript.ended:  # else nothing is missing
                self._pending_error = error
            return b""
        self.has_data_event = True
        return seen if self._tail is None else self._tail.keep(event.data, seen)

    def _check(self, data: bytes) -> None:
        """The first event decides whether this is an answer at all; of the others a glance at both ends must do.

        In the endpoints that it follows closely the transcript parses the first event itself.
        """
        if data == DONE:
            return
        if not self.has_data_event and self._transcript.endpoint not in CHUNKED:
            parse_object(data)
        elif data[:1] != b"{" or data[-1:] != b"}":
            raise NodeFault(Fault.INVALID_BODY, "an event of the stream is no JSON object")

    def _note_usage(self, data: bytes) -> None:
        self.usage = read_usage_event(data) or self.usage
        if self.recomputed:
            self._transcript.cached_tokens = None  # what the prefill node had cached served nobody
