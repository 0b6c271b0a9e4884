"""Writing responses to clients: with a time limit for the client to read, and a close that loses nothing.

A connection that is closed while its client still sends is reset, and a response that is under way is lost with it
(RFC 9112, 9.6). So it is closed in two steps: the sending half at once, the rest when the client has closed too.
"""

import asyncio
import logging
import typing
from collections.abc import Callable

from uvicorn._types import ASGISendEvent, HTTPScope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from pdproxy.request import Headers
from pdproxy.response import Sink

_LOG = logging.getLogger("uvicorn.error")

MIN_PROGRESS_BYTES = 64 * 1024
"""Bytes that a client must read within its time limit, or all of a shorter response."""
LINGER_SECONDS = 10.0
"""Seconds that a client has to notice that nothing more comes."""

_FRAMING = frozenset({"connection", "transfer-encoding", "content-length"})
_BODILESS = frozenset({204, 304})
_END_OF_CHUNKS = b"0\r\n\r\n"
_CONTROLS = bytes(range(9)) + bytes(range(10, 32)) + b"\x7f"
"""Bytes that no field may have; two of them end it."""


class ResponseWriter(asyncio.Transport):
    """A connection's transport. `on_lost`, `on_paused` and `on_resumed` are called by the protocol.

    Args:
        is_sending: whether the client may be in the middle of a request.
        seconds: for the client to read what waits, or `MIN_PROGRESS_BYTES` of it.
    """

    def __init__(self, inner: asyncio.Transport, is_sending: Callable[[], bool], seconds: float) -> None:
        super().__init__()
        self._inner = inner
        self._is_sending = is_sending
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._left = 0
        self._timer: asyncio.TimerHandle | None = None
        self._ending = False
        self._unwritten: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write in the loop's next turn, together with what else is written in this one, such as head and body.

        One system call less is worth more than the turn: the client's machine is woken once.
        """
        if not self._unwritten:
            self._loop.call_soon(self.flush)
        self._unwritten.append(bytes(data))

    def write_now(self, data: bytes) -> None:
        """Write at once, together with what waits."""
        if self._unwritten:
            self._unwritten.append(data)
            self.flush()
        else:
            self._inner.write(data)

    def get_write_buffer_size(self) -> int:
        """Bytes that are not written yet."""
        return self._inner.get_write_buffer_size() + sum(map(len, self._unwritten))

    def is_closing(self) -> bool:
        """Whether nothing more is written."""
        return self._ending or self._inner.is_closing()

    def close(self) -> None:
        """Write what waits, then close. Idempotent."""
        if self.is_closing():
            return
        self._ending = True
        self.flush()
        self._stop_timer()
        if self._is_sending() and self._inner.can_write_eof():
            self._inner.write_eof()
            self._inner.resume_reading()
            self._timer = self._loop.call_later(LINGER_SECONDS, self._end)
        else:
            self._end()

    def abort(self) -> None:
        """Close at once."""
        self._unwritten.clear()
        self._inner.abort()

    def on_paused(self) -> None:
        """The client does not keep up: start its time limit."""
        if self._timer is None:
            self._check_later()

    def on_resumed(self) -> None:
        """The client takes bytes again: stop the time limit."""
        if not self._ending:
            self._stop_timer()

    def on_lost(self) -> None:
        """The connection is closed: stop the time limit, and drop the reference to the protocol."""
        self._stop_timer()
        self._unwritten.clear()
        self._is_sending = lambda: False

    def flush(self) -> None:
        """Write what waits."""
        unwritten, self._unwritten = self._unwritten, []
        if unwritten:
            self._inner.write(unwritten[0] if len(unwritten) == 1 else b"".join(unwritten))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self._inner.close()
        self._check_later()

    def _check_later(self) -> None:
        self._left = self.get_write_buffer_size()
        self._timer = self._loop.call_later(self._seconds, self._check_progress)

    def _check_progress(self) -> None:
        if self._left - self.get_write_buffer_size() < MIN_PROGRESS_BYTES:
            self._inner.abort()
        else:
            self._check_later()


class WriteFlow(FlowControl):
    """uvicorn's, with an event only while the client does not keep up: an event has 700 bytes."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.read_paused = self.write_paused = False
        self._resumed: asyncio.Event | None = None

    async def drain(self) -> None:
        if self._resumed is not None:
            await self._resumed.wait()

    def pause_writing(self) -> None:
        if not self.write_paused:
            self.write_paused, self._resumed = True, asyncio.Event()

    def resume_writing(self) -> None:
        resumed, self._resumed, self.write_paused = self._resumed, None, False
        if resumed is not None:
            resumed.set()


class Arrivals:
    """The part of an `asyncio.Event` that uvicorn uses. An event is made when somebody waits: most bodies are here at
    once."""

    __slots__ = ("_event", "_is_set")

    def __init__(self) -> None:
        self._is_set = False
        self._event: asyncio.Event | None = None

    def set(self) -> None:
        """Wake whoever waits."""
        self._is_set = True
        if self._event is not None:
            self._event.set()

    def clear(self) -> None:
        """Nothing has come since."""
        self._is_set = False
        if self._event is not None:
            self._event.clear()

    async def wait(self) -> None:
        """Until it is set."""
        if not self._is_set:
            self._event = self._event or asyncio.Event()
            await self._event.wait()


class ClientExchange(RequestResponseCycle):
    """uvicorn's exchange of one request and its response; also the `pdproxy.response.Exchange` for the application.

    Args:
        on_response: called when the response is complete.
        expects_100: the client waits for 100 (Continue) before it sends the body.
        keeps_alive: the connection can carry another exchange after this one.
    """

    has_chunks = True
    _on_left: Callable[[], None] | None = None

    def __init__(
        self,
        scope: HTTPScope,
        writer: ResponseWriter,
        flow: FlowControl,
        default_headers: list[tuple[bytes, bytes]],
        on_response: Callable[[], None],
        *,
        expects_100: bool,
        keeps_alive: bool,
    ) -> None:
        arrived = typing.cast(asyncio.Event, Arrivals())
        super().__init__(
            scope, writer, flow, _LOG, _LOG, False, default_headers, arrived, expects_100, keeps_alive, on_response
        )
        self._writer = writer

    @property
    def sink(self) -> Sink | None:
        return self._write_piece if self.has_chunks else None

    @property
    def chunk_sink(self) -> Sink | None:
        return self._write_chunk if self.has_chunks else None

    def _write_piece(self, piece: bytes) -> bool:
        """As uvicorn frames it."""
        return self._write_chunk(b"%x\r\n%b\r\n" % (len(piece), piece))

    def _write_chunk(self, chunk: bytes) -> bool:
        if self.disconnected:
            return False
        if self.response_complete or not self.chunked_encoding:
            raise RuntimeError("only pieces of a body whose length is not known go this way, after its head")
        self._writer.write_now(chunk)
        return not self.flow.write_paused

    def take_body(self) -> bytes | None:
        if self.more_body or self.disconnected or self.waiting_for_100_continue:
            return None
        self.flow.resume_reading()
        self.message_event.clear()
        body, self.body = bytes(self.body), bytearray()
        return body

    def tell_when_left(self, on_left: Callable[[], None] | None) -> None:
        self._on_left = on_left
        if on_left is None:
            return
        if self.disconnected:
            asyncio.get_running_loop().call_soon(self.left)
        else:
            self.flow.resume_reading()  # paused behind a large body, the connection would not tell that the client left

    async def send(self, message: ASGISendEvent) -> None:
        """uvicorn's, which would write the end of a body in the loop's next turn."""
        await super().send(message)
        if self.response_complete:
            self._writer.flush()

    def write_head(self, status: int, headers: Headers) -> bool:
        if self.scope["method"] == "HEAD" or status in _BODILESS:
            return False
        head = self._head(status, headers, "transfer-encoding: chunked")
        if head is None:
            return False
        self.chunked_encoding = True
        self._writer.write(head)
        return True

    def write_whole(self, status: int, headers: Headers, body: bytes) -> bool:
        head = self._head(status, headers, f"content-length: {len(body)}")
        if head is None:
            return False
        self._writer.write_now(head if self.scope["method"] == "HEAD" else head + body)
        self._complete()
        return True

    def write_end(self) -> bool:
        if self.disconnected or self.flow.write_paused or self.response_complete or not self.chunked_encoding:
            return False
        self._writer.write_now(_END_OF_CHUNKS)
        self._complete()
        return True

    def _complete(self) -> None:
        """All of the response is written."""
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self._writer.close()
        self.on_response()

    def _head(self, status: int, headers: Headers, framing: str) -> bytes | None:
        """The head of a response that begins now, framed like this; None, and nothing has begun, where uvicorn has to
        find out how: of an HTTP without chunks, of a head that frames itself, with a field that is none, …"""
        if self.response_started or self.disconnected or self.flow.write_paused or not self.has_chunks:
            return None
        if not _FRAMING.isdisjoint(dict(headers)):
            return None
        own = "\r\n".join([*map(": ".join, headers), framing]).encode("latin-1")
        fields = [*map(b": ".join, self.default_headers), own]
        head = b"\r\n".join(fields)
        breaks = len(fields) - 1 + len(headers)
        if len(head) - len(head.translate(None, _CONTROLS)) != len(b"\r\n") * breaks:
            return None
        self.response_started, self.waiting_for_100_continue = True, False
        end = b"\r\n\r\n" if self.keep_alive else b"\r\nconnection: close\r\n\r\n"
        return b"".join((STATUS_LINE[status], head, end))

    def left(self) -> None:
        """The client has disconnected, or has sent what ends its connection."""
        on_left, self._on_left = self._on_left, None
        if on_left is not None:
            on_left()


class UnchunkedExchange(ClientExchange):
    """A response that, where its length is not known, ends with the connection: HTTP/1.0 has no chunks (RFC 9112, 6.3),
    nor 100 (Continue)."""

    has_chunks = open_ended = False

    async def send(self, message: ASGISendEvent) -> None:
        """uvicorn's checks that a body has its announced length: where there is none, each piece announces its own."""
        if message["type"] == "http.response.start":
            self.open_ended = all(name != b"content-length" for name, _ in message.get("headers", ()))
            if self.open_ended:
                self.chunked_encoding = False
        elif self.open_ended and message["type"] == "http.response.body":
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)
