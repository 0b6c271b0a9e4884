"""The transcript of a streamed answer: what the client has, and what of each further event it may see. Pure.

Of an event only the beginning of output, the end, and errors are noticed. Bytes are passed on untouched where nothing
has to be taken out or corrected. Why ``find`` and not ``in``: see `chunks`.
"""

import msgspec

from pdproxy.errors import Fault, NodeFault
from pdproxy.finish_reasons import ABORT, ABORTED, chunk_reasons, is_aborted, message_stop_reason
from pdproxy.request import Endpoint, Json, Shape
from pdproxy.stream.chunks import (
    DONE,
    DONE_EVENT,
    FINAL_EVENTS,
    TICKET_KEY,
    adopted,
    data_event,
    has_output,
    head_of,
    parse_object,
    rewrite_event,
)
from pdproxy.stream.sse import Event
from pdproxy.usage import CacheUse

LAST_EVENTS = frozenset({b"message_stop", b"response.completed", b"response.failed", b"response.incomplete"})
CHUNKED = (Endpoint.COMPLETIONS, Endpoint.CHAT)
"""Endpoints whose streams consist of chunks."""
_LOOKED_AT = LAST_EVENTS | FINAL_EVENTS | {b"error"}
"""Names of events that are not passed on unseen."""


_NOT_FINISHED = b'"finish_reason":null'
"""Is in each chunk of one choice that goes on; a chunk without it is parsed."""


class Checkpoint(msgspec.Struct, frozen=True):
    """The state that `Transcript.rollback` restores."""

    started: bool
    ended: bool
    finishes: int
    reasons: int
    head: Json | None


class Transcript:
    """One streamed answer to one prompt; ``cache_use`` is that of the prefill node."""

    def __init__(self, endpoint: Endpoint, shape: Shape, cache_use: CacheUse | None = None) -> None:
        self.endpoint = endpoint
        self.shape = shape
        self.cache_use = cache_use
        self.started = False
        """Generated text, ids or events reached the client."""
        self.ended = False
        """The stream's own end was seen; a body that ends without it was cut."""
        self.finish_reasons: list[str] = []
        """Why choices ended, in the order in which they did; of a response its final status."""
        self._finishes = 0
        self._head: Json | None = None
        """The fields that every event repeats, of completions and chat, once there was one."""
        self._adopts = False
        """The answer was asked for anew after its first event: what comes becomes a part of the one that began."""

    def checkpoint(self) -> Checkpoint:
        """For `rollback`, should the next events turn out not to count."""
        return Checkpoint(self.started, self.ended, self._finishes, len(self.finish_reasons), self._head)

    def rollback(self, checkpoint: Checkpoint) -> None:
        """The events since then did not reach the client."""
        self.started, self.ended, self._finishes = checkpoint.started, checkpoint.ended, checkpoint.finishes
        self._head = checkpoint.head
        del self.finish_reasons[checkpoint.reasons :]

    @property
    def finished(self) -> bool:
        """Whether every choice has its finish reason: nothing but usage and the end is missing."""
        return self._finishes >= self.shape.choices

    @property
    def ending_known(self) -> bool:
        """Whether `ending` is all that a stream that has `finished` lacks: usage is known to its node alone."""
        return self.endpoint not in CHUNKED or not self.shape.wants_usage

    def restart(self) -> None:
        """The next events come from the same request, asked again. Only while not `started`."""
        self._adopts = self._head is not None

    def ending(self) -> bytes:
        """The end of a stream that broke after it `finished`."""
        if self.endpoint is Endpoint.MESSAGES:
            return data_event({"type": "message_stop"}, b"message_stop")
        return DONE_EVENT if self.endpoint in CHUNKED else b""

    def take(self, event: Event) -> bytes:
        """The bytes of an event that the client sees, read by `chunks.short_event_of`; empty where nothing.

        Raises:
            NodeFault: an error that the node reports, its JSON in ``body``, its code in ``status``: CLIENT_ERROR for a
                4xx, else ERROR_EVENT. ABORTED where it gives the answer up. INVALID_BODY where an event that must be
                read is no JSON object.
        """
        if event.data is None:
            return event.raw
        if self.endpoint not in CHUNKED:
            return self._take_named(event, event.data)
        if event.data == DONE:
            if not self._finishes:
                raise _aborted()
            self.ended = True
            return event.raw
        if event.name == b"error" or _has_error(event.data):
            raise _reported_error(event.data)
        return self._take_chunk(event, event.data)

    def passes(self, raw: bytes) -> bool:
        """Whether these bytes are one event that goes on as it is, and changes nothing here: `take` need not read it.

        No pattern can match inside a JSON string: quotes are escaped there, and line ends too.
        """
        if not self.started or self._adopts or self.ended:
            return False
        if raw.find(b'"usage"') >= 0 or raw.find(TICKET_KEY) >= 0 or not raw.endswith(b"}\n\n") or raw.find(b"\r") >= 0:
            return False
        line, end = raw.find(b"\n"), len(raw) - 2
        if self.endpoint in CHUNKED:
            return line == end and raw.startswith(b'data: {"id":') and raw.find(_NOT_FINISHED) >= 0
        named = raw.startswith(b"event: ") and raw[7:line] not in _LOOKED_AT
        return named and raw.startswith(b"\ndata: {", line) and raw.find(b"\n", line + 1) == end

    def _take_named(self, event: Event, data: bytes) -> bytes:
        if event.name == b"error":
            raise _reported_error(data)
        if self._is_aborted(event, data):
            raise _aborted()
        self.started = True
        if event.name in LAST_EVENTS:
            self.ended = True
            if self.endpoint is Endpoint.RESPONSES:
                self.finish_reasons = [event.name.partition(b".")[2].decode("ascii")]
        elif event.name == b"message_delta" and (reason := message_stop_reason(data)):
            self._finishes = self.shape.choices
            self.finish_reasons = [reason]
        return rewrite_event(self.endpoint, event, data, self.cache_use)

    def _is_aborted(self, event: Event, data: bytes) -> bool:
        if self.endpoint is Endpoint.MESSAGES:
            return event.name == b"message_delta" and message_stop_reason(data) == ABORT
        if event.name != b"response.completed":
            return False
        response = parse_object(data).get("response")
        return isinstance(response, dict) and is_aborted(self.endpoint, response)

    def _take_chunk(self, event: Event, data: bytes) -> bytes:
        if data.find(ABORTED) >= 0:
            raise _aborted()
        chunk = None if self.started and not self._adopts else parse_object(data)
        if reasons := chunk_reasons(data):
            self._finishes += len(reasons)
            self.finish_reasons += reasons
        if chunk is None:
            return rewrite_event(self.endpoint, event, data, self.cache_use)
        output = has_output(self.endpoint, chunk)
        self.started = self.started or output
        if self._adopts:
            return self._adopt(chunk) if output or not chunk.get("choices") else b""  # the client has the role
        self._head = self._head or head_of(chunk)
        return rewrite_event(self.endpoint, event, data, self.cache_use)

    def _adopt(self, chunk: dict[str, object]) -> bytes:
        """A chunk of an answer that was asked for anew, as a part of the one that the client has the beginning of."""
        return adopted(self.endpoint, chunk, self._head or {}, self.cache_use)


def _has_error(data: bytes) -> bool:
    """Whether an event of completions or chat reports an error: it has one, and no choices."""
    if data.startswith(b'{"error"'):
        return True
    return data.find(b'"choices":') < 0 and data.find(b'"error":') >= 0 and bool(parse_object(data).get("error"))


def _aborted() -> NodeFault:
    return NodeFault(Fault.ABORTED, "the node gave the answer up")


def _reported_error(data: bytes) -> NodeFault:
    payload = parse_object(data)
    error = payload.get("error")
    code = (error if isinstance(error, dict) else payload).get("code")
    status = code if isinstance(code, int) and 400 <= code < 600 else None
    fault = Fault.CLIENT_ERROR if status is not None and status < 500 else Fault.ERROR_EVENT
    return NodeFault(fault, "the node reported an error in its stream", status=status, body=data)
