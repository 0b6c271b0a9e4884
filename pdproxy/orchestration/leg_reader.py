"""Reads the stream of one decode leg: bytes from the node in, bytes for the client out.

An event goes one of four ways, the cheapest first. Each falls back on the next one:

1. As it is framed: nearly every read is one chunk with one event that differs from the one before in its text alone,
   or several of them. It goes to the client as it is, without its records (`stream.scan`): `_pass_framed_read`.
2. Like the last one, where a chunk holds several, or parts of one: `_pass_like_last`.
3. By its bytes: it holds nothing that ends or changes the stream (`Transcript.passes`): `_pass_one_event`.
4. Read, as the first event, the last ones, errors and usage: `_frame_and_read`, which gives each event of a piece to
   `_hold_or_commit`, and so to `_client_part_of_event`.

A *read* is the bytes that came from the socket at once, with HTTP's chunk framing; a *piece* is a part of the body,
without it. *Passing* means that bytes go to the client as they came. `_client_part` takes a piece by the ways 2 to 4.
"""

import operator
from collections.abc import AsyncIterator

from pdproxy.errors import Fault, NodeFault, untraced
from pdproxy.response import Sink
from pdproxy.stream.chunks import DONE, Likeness, parse_object, short_event_of
from pdproxy.stream.journal import ONE_EVENT, RECORD_OF_ONE, Journal, record_in, record_of_one
from pdproxy.stream.scan import BEST, Scan
from pdproxy.stream.sse import EVENT_BYTES, Event, Framer
from pdproxy.stream.transcript import CHUNKED, Transcript
from pdproxy.stream.usage_event import UsageEventFilter
from pdproxy.transport.port import HttpResponse
from pdproxy.usage import Usage, read_usage_event

_COUNT, _RECORD = len(ONE_EVENT), len(RECORD_OF_ONE)
_IS_COMMENT = operator.methodcaller("startswith", b":")


class LegReader:
    """The stream of one decode leg. A fault in the middle of a piece is raised only after what stood before it.

    With a journal, events reach the client together with the record that commits them reaching the journal. Events
    without a record are not passed on: the next leg sends them again. Neither are those of a record that commits an
    error, which does not count.

    The caller closes ``response``.

    Args:
        ticket_tail: the most prompt tokens that the node computes itself with its ticket; None where it has none.
        usage_filter: given where only we asked for the usage event.
        journal: given where the leg comes with one.
        scan: which of the two; they do the same.
    """

    __slots__ = (
        "_at_boundary",
        "_chunk_sink",
        "_chunks",
        "_framer",
        "_held",
        "_journal",
        "_like_last",
        "_on_piece",
        "_pending_error",
        "_response",
        "_scan",
        "_ticket_tail",
        "_transcript",
        "_usage_filter",
        "ended",
        "has_begun",
        "has_data_event",
        "usage",
    )

    def __init__(
        self,
        response: HttpResponse,
        transcript: Transcript,
        ticket_tail: int | None = None,
        usage_filter: UsageEventFilter | None = None,
        journal: Journal | None = None,
        scan: Scan = BEST,
    ) -> None:
        self._response = response
        self._chunks: AsyncIterator[bytes] = aiter(response)
        self._transcript = transcript
        self._ticket_tail = ticket_tail
        self._usage_filter = usage_filter
        self._journal = journal
        self._scan = scan
        self._chunk_sink: Sink | None = None
        self._on_piece: Sink | None = None
        self._framer = Framer()
        self._held: list[bytes] = []
        """Events whose record has not come yet."""
        self._at_boundary = False
        """The next piece begins with an event, and that may pass as it is."""
        self._like_last: Likeness | None = None
        """The likeness of the last event, where the next one can pass by it."""
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
        """The bytes of the next piece that the client sees; may be empty.

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
            return self._client_part(piece)
        self._raise_held_error()
        if not self._transcript.ended:
            raise NodeFault(Fault.RESET, "the body ended before the stream did")
        self.ended = True
        return b""

    async def pipe_to(self, sink: Sink, on_piece: Sink, chunk_sink: Sink | None = None) -> None:
        """Write what the client sees of each piece, until one needs `read_next`: error or end.

        ``on_piece`` is called with each, which may be empty, once it is written; False: leave the next to `read_next`.
        All of it runs within the callback that read the piece from the node's socket. What is framed as it goes to the
        client is written to ``chunk_sink``, where there is one.
        """

        def write(piece: bytes) -> bool:
            try:
                seen = self._client_part(piece)
            except NodeFault as fault:
                self._pending_error = untraced(fault)
                return False
            written = not seen or sink(seen)
            return on_piece(seen) and written and self._pending_error is None

        if self.has_begun and self._pending_error is None and not self.ended:
            self._chunk_sink, self._on_piece = chunk_sink, on_piece
            try:
                await self._response.pipe_to(write, None if chunk_sink is None else self._pass_framed_read)
            finally:
                self._chunk_sink = self._on_piece = None

    def _pass_framed_read(self, read: bytes) -> bool | None:
        """Write a read that is one chunk with one event like the last one, and, with a journal, its record; or several
        such chunks, as they come where the proxy is busy. None for any other read."""
        like, journal = self._like_last, self._journal
        if like is None or self._chunk_sink is None or self._on_piece is None:
            return None
        if journal is None:
            chunk = self._scan.plain(read, like.head, like.tail)
        else:
            chunk = self._scan.journaled(read, like.head, like.tail, journal.kept, journal.most)
        if chunk is None and (chunk := self._scan_chunks(like, read)) is None:
            return None
        written = self._chunk_sink(chunk)
        return self._on_piece(chunk) and written

    def _scan_chunks(self, like: Likeness, read: bytes) -> bytes | None:
        """The client's part of a read of several such chunks; None, and no record is kept, where one is another.

        No such chunk has a line end of HTTP's within it, and whether its size is right, its scan finds out.
        """
        chunks: list[bytes] = []
        journal, scan, find, at = self._journal, self._scan, read.find, 0
        kept = 0 if journal is None else len(journal.kept)
        while at < len(read):
            end = find(b"\r\n", find(b"\r\n", at) + 2) + 2
            if end <= at or end - at == len(read):  # half a chunk, or one, which is another
                chunk = None
            elif journal is None:
                chunk = scan.plain(read[at:end], like.head, like.tail)
            else:
                chunk = scan.journaled(read[at:end], like.head, like.tail, journal.kept, journal.most)
            if chunk is None:
                if journal is not None:
                    del journal.kept[kept:]
                return None
            chunks.append(chunk)
            at = end
        return b"".join(chunks)

    def flush(self) -> bytes:
        """The bytes that were held back for a usage event that did not come."""
        return b"" if self._usage_filter is None else self._usage_filter.flush()

    def _client_part(self, piece: bytes) -> bytes:
        """The bytes of a piece that the client gets. Nearly every piece is one event like the last, and its record."""
        like, journal = self._like_last, self._journal
        if like is None:
            return self._pass_one_event(piece) if self._at_boundary else self._frame_and_read(piece)
        end = like.end_in(piece, 0)
        if journal is None:
            if end == len(piece):
                return piece
        elif end and piece.find(b"\n\n", end) == len(piece) - 2:
            journal.append_right(piece[end - _COUNT : -2])
            return piece[: end - _RECORD]
        return self._pass_like_last(like, piece, end) if end else self._pass_one_event(piece)

    def _pass_like_last(self, like: Likeness, piece: bytes, end: int) -> bytes:
        """The client's part of a piece that begins with an event like the last one, which ends at ``end``."""
        events: list[bytes] = []
        records: list[bytes] = []
        journal, at = self._journal, 0
        while end:
            if journal is None:
                events.append(piece[at:end])
                at = end
            else:
                stop = piece.find(b"\n\n", end)
                if stop < 0:  # the rest of the record is still to come
                    break
                records.append(piece[end - _COUNT : stop])
                events.append(piece[at : end - _RECORD])
                at = stop + 2
            end = like.end_in(piece, at)
        if journal is not None and records:
            journal.append_right(b",".join(records))
        seen = b"".join(events)
        return seen if at == len(piece) else seen + self._pass_one_event(piece[at:])

    def _pass_one_event(self, piece: bytes) -> bytes:
        """The client's part of a piece that may be one event and its record."""
        if self._journal is None:
            return piece if self._passes_as_it_is(piece) else self._frame_and_read(piece)
        found = record_of_one(piece)
        if found is None or not self._passes_as_it_is(found[0]):
            return self._frame_and_read(piece)
        self._journal.append_right(found[1])
        return found[0]

    def _frame_and_read(self, piece: bytes) -> bytes:
        """The bytes of any piece that the client gets, event by event; what is incomplete waits for the next piece."""
        seen = b"".join(map(self._hold_or_commit, self._framer.feed(piece)))
        whole = not self._framer.rest and not self._held
        self._at_boundary = whole and self.has_data_event and self._pending_error is None and not self._holds_usage()
        if not self._at_boundary:
            self._like_last = None
        return seen

    def _passes_as_it_is(self, raw: bytes) -> bool:
        """Whether bytes are one event that passes as it is; the next one may be like it."""
        passes = self._transcript.passes(raw)
        if passes:
            self._like_last = Likeness.of(raw, b"" if self._journal is None else RECORD_OF_ONE)
        return passes

    def _holds_usage(self) -> bool:
        return self._usage_filter is not None and self._usage_filter.held != b""

    def _hold_or_commit(self, raw: bytes) -> bytes:
        """The client's part of one event, record or comment. Events wait for their record, comments do not."""
        journal = self._journal
        if journal is None or self._pending_error is not None:
            return self._client_part_of_event(raw)
        if _IS_COMMENT(raw):
            record = record_in(raw)
            if record is not None:
                return self._commit_held(journal, record)
            if not self._held:
                return self._client_part_of_event(raw)
        self._held.append(raw)
        if len(self._held) > 1 and sum(map(len, self._held)) > EVENT_BYTES:
            raise NodeFault(Fault.INVALID_BODY, "the events of the stream have no record")
        return b""

    def _commit_held(self, journal: Journal, record: bytes) -> bytes:
        """A record came. What the client sees of the events that it commits; nothing where one of them is an error."""
        held, self._held = self._held, []
        before = self._transcript.checkpoint()
        seen = b"".join(map(self._client_part_of_event, held))
        if self._pending_error is not None:
            self._transcript.rollback(before)
            return b""
        self.has_begun = True
        journal.append(record, len(held) - sum(map(_IS_COMMENT, held)))
        return seen

    def _raise_held_error(self) -> None:
        """Raise the error that the node may have reported in what has no record, at the end of the body."""
        if self._held and not self._transcript.ended:
            before = self._transcript.checkpoint()
            for raw in self._held:
                self._client_part_of_event(raw)
            self._transcript.rollback(before)
            if self._pending_error is not None:
                raise untraced(self._pending_error)

    def _client_part_of_event(self, raw: bytes) -> bytes:
        """The bytes of one event or comment that the client gets; nothing after an error that is still to be raised."""
        if self._pending_error is not None:
            return b""
        if self.has_data_event and self._passes_as_it_is(raw) and not self._holds_usage():
            return raw
        event = short_event_of(raw)
        return raw if event.data is None else self._read_event(event, event.data)

    def _read_event(self, event: Event, data: bytes) -> bytes:
        """The same of an event that does not pass as it came: take its usage, see whether it is an error, and have the
        transcript record it, or change it."""
        self._like_last = None
        if self._transcript.ended and self._transcript.endpoint in CHUNKED:
            return b""
        if data.find(b'"usage":{') >= 0:
            self._note_usage(data)
            if self._usage_filter is not None and self._usage_filter.is_usage_event(data):
                return self._usage_filter.on_usage_event(data)
        try:
            self._check_json(data)
            seen = self._transcript.take(event)
        except NodeFault as fault:
            if not self.has_data_event:
                raise
            if not self._transcript.ended:  # else nothing is missing
                self._pending_error = untraced(fault)
            return b""
        self.has_data_event = self.has_begun = True
        return seen if self._usage_filter is None else self._usage_filter.feed(data, seen)

    def _check_json(self, data: bytes) -> None:
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
            self._transcript.cache_use = None  # what the prefill node had cached was of no use
