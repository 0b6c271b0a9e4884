"""Reads the stream of one decode leg: bytes from the node in, bytes for the client out."""

import re
from collections.abc import AsyncIterator, Callable

from pdproxy.errors import Fault, NodeFault, untraced
from pdproxy.finish_reasons import FINISH_REASON
from pdproxy.response import Sink
from pdproxy.stream.chunks import DONE, parse_object, short_event_of
from pdproxy.stream.sse import Event, SseParser
from pdproxy.stream.transcript import CHUNKED, Transcript
from pdproxy.transport.port import HttpResponse
from pdproxy.usage import Usage, read_usage_event

_USAGE_EVENT = b'"choices":[]'
_FINGERPRINT = re.compile(rb',"system_fingerprint":"[^"\\]*"')
_END = b"}\n\n"


class UsageEventFilter:
    """Takes the usage event out of a stream of one choice whose ``stream_options.include_usage`` is ours.

    vLLM writes ``system_fingerprint`` into the last event: the usage event, or without one the event with the finish
    reason. So the latter is held back until the usage event is here, and gets the fingerprint.
    """

    def __init__(self) -> None:
        self._held = b""

    @property
    def is_holding(self) -> bool:
        return bool(self._held)

    def is_usage_event(self, data: bytes) -> bool:
        return data.find(_USAGE_EVENT) >= 0

    def feed(self, data: bytes, seen: bytes) -> bytes:
        """What the client may see now; ``seen`` is what it shall see of the event that has this data."""
        if data.find(FINISH_REASON) >= 0:
            self._held += seen
            return b""
        return self.flush() + seen if self._held else seen

    def on_usage_event(self, data: bytes) -> bytes:
        """What was held back, with the usage event's fingerprint."""
        found, held = _FINGERPRINT.search(data), self.flush()
        if found is None or not held.endswith(_END) or _FINGERPRINT.search(held) is not None:
            return held
        return held.removesuffix(_END) + found.group() + _END

    def flush(self) -> bytes:
        held, self._held = self._held, b""
        return held


class DecodeStream:
    """The stream of one decode leg. A fault in the middle of a piece is raised only after what stood before it.

    The caller closes ``response``.

    Args:
        ticket_tail: the most prompt tokens that the node computes itself with its ticket; None where it has none.
        usage_filter: given where only we asked for the usage event.
    """

    def __init__(
        self,
        response: HttpResponse,
        transcript: Transcript,
        ticket_tail: int | None,
        usage_filter: UsageEventFilter | None,
    ) -> None:
        self._response = response
        self._chunks: AsyncIterator[bytes] = aiter(response)
        self._transcript = transcript
        self._ticket_tail = ticket_tail
        self._usage_filter = usage_filter
        self._parser = SseParser(short_event_of)
        self._at_event_boundary = False
        """No part of an event, and nothing held back, precedes the next piece."""
        self._pending_error: NodeFault | None = None
        self.has_data_event = False
        """A data event came."""
        self.has_begun = False
        """The node has shown that it generates: a data event came, or a record of the journal."""
        self.ended = False
        """The body ended, and the stream with it."""
        self.usage: Usage | None = None
        """The last usage that the leg reported."""

    async def read_first(self) -> bytes:
        """Everything up to and with the first data event, or record of a journal; raises as `read_next`."""
        pieces = []
        while not (self.has_begun or self.ended):
            pieces.append(await self.read_next())
        return b"".join(pieces)

    async def read_next(self) -> bytes:
        """What the client sees of the next piece; may be empty.

        Raises:
            NodeFault: RESET where the body ended before the stream did; what the transport and the transcript raise.
        """
        if self._pending_error is not None:
            raise untraced(self._pending_error)
        try:
            piece = await anext(self._chunks, None)
        except NodeFault:
            if not self._transcript.ended:
                raise
            piece = None  # cut after its end: nothing is missing
        if piece is not None:
            return self._client_bytes(piece)
        self._check_rest()
        if not self._transcript.ended:
            raise NodeFault(Fault.RESET, "the body ended before the stream did")
        self.ended = True
        return b""

    async def pipe_to(self, sink: Sink, passed_on: Sink) -> None:
        """Write what the client sees of each piece, until one needs `read_next`: error or end.

        ``passed_on`` is called with each, which may be empty, once it is written; False: leave the next to `read_next`.
        All of it runs within the callback that read the piece from the node's socket.
        """

        take_fast_path = self._fast_path()

        def write(piece: bytes) -> bool:
            seen = take_fast_path(piece) if self._at_event_boundary else None
            if seen is None:
                try:
                    seen = self._client_bytes(piece)
                except NodeFault as fault:
                    self._pending_error = untraced(fault)
                    return False
            written = not seen or sink(seen)
            return passed_on(seen) and written and self._pending_error is None

        if self.has_begun and self._pending_error is None and not self.ended:
            await self._response.pipe_to(write)

    def _check_rest(self) -> None:
        """Raise the error that the node may have reported in what was not passed on, at the end of the body."""

    def flush(self) -> bytes:
        """What was held back for a usage event that did not come."""
        return b"" if self._usage_filter is None else self._usage_filter.flush()

    def _fast_path(self) -> Callable[[bytes], bytes | None]:
        """What the client sees of most pieces, at an event's boundary; None for one that `_client_bytes` must read."""
        return self._transcript.take_fast_path

    def _client_bytes(self, piece: bytes) -> bytes:
        if self._at_event_boundary:
            seen = self._transcript.take_fast_path(piece)
            if seen is not None:
                return seen
        seen = b"".join(map(self._take_event, self._parser.feed(piece)))
        self._at_event_boundary = (
            self.has_data_event
            and not self._parser.rest
            and (self._usage_filter is None or not self._usage_filter.is_holding)
        )
        return seen

    def _take_event(self, event: Event) -> bytes:
        if event.data is None or self._pending_error is not None:
            return event.raw if self._pending_error is None else b""
        if self._transcript.ended and self._transcript.endpoint in CHUNKED:
            return b""
        if event.data.find(b'"usage":{') >= 0:
            self._note_usage(event.data)
            if self._usage_filter is not None and self._usage_filter.is_usage_event(event.data):
                return self._usage_filter.on_usage_event(event.data)
        try:
            self._check(event.data)
            seen = self._transcript.take(event)
        except NodeFault as fault:
            if not self.has_data_event:
                raise
            if not self._transcript.ended:  # else nothing is missing
                self._pending_error = untraced(fault)
            return b""
        self.has_data_event = self.has_begun = True
        return seen if self._usage_filter is None else self._usage_filter.feed(event.data, seen)

    def _check(self, data: bytes) -> None:
        """The first event must be a JSON object; of the others only both ends are looked at.

        Of completions and chat the transcript parses the first event itself.
        """
        if data == DONE:
            return
        if not self.has_data_event and self._transcript.endpoint not in CHUNKED:
            parse_object(data)
        elif data[:1] != b"{" or data[-1:] != b"}":
            raise NodeFault(Fault.INVALID_BODY, "an event of the stream is no JSON object")

    def _note_usage(self, data: bytes) -> None:
        self.usage = read_usage_event(data) or self.usage
        tail = self._ticket_tail
        if tail is not None and self.usage is not None and self.usage.recomputed(tail):
            self._transcript.cached_tokens = None  # what the prefill node had cached was of no use
