"""Reads the stream of a decode leg that comes with a journal."""

from collections.abc import Callable

from pdproxy.errors import untraced
from pdproxy.orchestration.decode_stream import DecodeStream, UsageEventFilter
from pdproxy.stream.journal import Batch, Journal, RecordSplitter, one_event
from pdproxy.stream.transcript import Transcript
from pdproxy.transport.port import HttpResponse


class JournaledStream(DecodeStream):
    """As `DecodeStream`; events reach the client together with the record that commits them reaching the journal.

    Events without a record are not passed on: the next leg sends them again. Neither are those of a batch with an error
    in it, whose record does not count.
    """

    def __init__(
        self,
        response: HttpResponse,
        transcript: Transcript,
        ticket_tail: int | None,
        usage_filter: UsageEventFilter | None,
        journal: Journal,
    ) -> None:
        super().__init__(response, transcript, ticket_tail, usage_filter)
        self._journal = journal
        self._splitter = RecordSplitter()

    def _fast_path(self) -> Callable[[bytes], bytes | None]:
        take_fast_path, splitter = self._transcript.take_fast_path, self._splitter
        append_one = self._journal.append_one

        def take(piece: bytes) -> bytes | None:
            batch = None if splitter.rest or self._pending_error is not None else one_event(piece)
            seen = None if batch is None else take_fast_path(batch.events)
            if batch is not None and seen is not None:
                append_one(batch.record)
            return seen

        return take

    def _client_bytes(self, piece: bytes) -> bytes:
        batches = self._splitter.feed(piece)
        return self._take(batches[0]) if len(batches) == 1 else b"".join(map(self._take, batches))

    def _take(self, batch: Batch) -> bytes:
        if self._at_event_boundary and batch.record and self._pending_error is None:
            seen = self._transcript.take_fast_path(batch.events)
            if seen is not None:
                self._journal.append(batch)
                return seen
        return self._take_slowly(batch)

    def _take_slowly(self, batch: Batch) -> bytes:
        if self._has_failed():
            return b""
        before = self._transcript.checkpoint()
        seen = super()._client_bytes(batch.events) if batch.events else b""
        if self._has_failed():
            self._transcript.rollback(before)
            return b""
        if batch.record:
            self.has_begun = True
            self._journal.append(batch)
        return seen

    def _check_rest(self) -> None:
        if self._splitter.rest and not self._transcript.ended:
            before = self._transcript.checkpoint()
            self._take(Batch(self._splitter.rest, b""))
            self._transcript.rollback(before)
            if self._pending_error is not None:
                raise untraced(self._pending_error)

    def _has_failed(self) -> bool:
        return self._pending_error is not None
