"""Writing responses to clients: with a time limit for the client to read, and a close that loses nothing.

A connection that is closed while its client still sends is reset, and a response that is under way is lost with it
(RFC 9112, 9.6). So it is closed in two steps: the sending half at once, the rest when the client has closed too.
"""

import asyncio
import logging
from collections.abc import Callable

from uvicorn._types import ASGISendEvent, HTTPScope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from pdproxy.response import Sink

_LOG = logging.getLogger("uvicorn.error")

MIN_PROGRESS_BYTES = 64 * 1024
"""Bytes that a client must read within its time limit, or all of a shorter response."""
LINGER_SECONDS = 10.0
"""Seconds that a client has to notice that nothing more comes."""

_OF_CONNECTION = frozenset({b"connection", b"transfer-encoding"})
_BODILESS = frozenset({204, 304})
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

    def hold(self, head: bytes) -> None:
        """Write together with the body that comes next, and `flush`."""
        self._unwritten.append(head)

    def write_now(self, data: bytes) -> None:
        """Write at once, after what waits."""
        if self._unwritten:
            self.flush()
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


class ClientExchange(RequestResponseCycle):
    """uvicorn's exchange of one request and its response; also the `pdproxy.response.Exchange` for the application.

    Args:
        on_response: called when the response is complete.
        expects_100: the client waits for 100 (Continue) before it sends the body.
        keeps_alive: the connection can carry another exchange after this one.
    """

    has_chunks = True
    _on_left: Callable[[], None] | None = None
    _head_waits = False
    """For the body's first piece: the two are written at once then, and not in the loop's next turn."""

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
        arrived = asyncio.Event()
        arrived._waiters = []  # type: ignore[assignment]  # nobody waits yet; a deque has 600 bytes
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
        """uvicorn's, which looks at each field of a head by itself, and would write head and body apart."""
        if message["type"] == "http.response.start":
            whole: bytes | None = message.pop("body", None)  # type: ignore[typeddict-item]  # `pdproxy.response`
            if self._write_head(message["status"], [*message.get("headers", ())], whole):
                return
            if whole is not None:
                await self.send(message)
                message = {"type": "http.response.body", "body": whole}
        first, self._head_waits = self._head_waits, False
        await super().send(message)
        if first or self.response_complete:
            self._writer.flush()

    def _write_head(self, status: int, headers: list[tuple[bytes, bytes]], whole: bytes | None) -> bool:
        """Write the head, and the body where it is here as a ``whole``; not a head that says itself how it is framed,
        or that has a field that is none."""
        if self.response_started or self.disconnected or self.flow.write_paused or not self.has_chunks:
            return False
        values = dict(headers)
        if not _OF_CONNECTION.isdisjoint(values):
            return False
        length = values.get(b"content-length")
        fields = [*map(b": ".join, self.default_headers), *map(b": ".join, headers), b""]
        head = b"\r\n".join(fields)
        if len(head) - len(head.translate(None, _CONTROLS)) != len(b"\r\n") * (len(fields) - 1):
            return False
        self.response_started, self.waiting_for_100_continue = True, False
        self._head_waits = whole is None
        if length is not None:
            self.chunked_encoding, self.expected_content_length = False, int(length)
        elif self.scope["method"] != "HEAD" and status not in _BODILESS:
            self.chunked_encoding = True
            head += b"transfer-encoding: chunked\r\n"
        head = b"%b%b%b\r\n" % (STATUS_LINE[status], head, b"" if self.keep_alive else b"connection: close\r\n")
        if whole is not None:
            self._write_whole(head if self.scope["method"] == "HEAD" else head + whole)
        elif length is None:
            self._writer.write(head)
        else:
            self._writer.hold(head)
        return True

    def _write_whole(self, response: bytes) -> None:
        """Write a whole response."""
        self._writer.write_now(response)
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self._writer.close()
        self.on_response()

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
