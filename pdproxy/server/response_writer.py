"""The way out to a client: it takes what waits for it in its time, and gets the whole of what was said before the end.

A connection that is closed while its client still sends is reset, and the answer that lay in between is lost with it
(RFC 9112, 9.6). So the end has two steps there: nothing more goes out, and what comes is dropped until the client has
closed.


The way for pieces of a response that need not wait for their turn: ASGI's ``send`` without the coroutine.

Answers to clients of HTTP/1.0, which know no chunks."""

import asyncio
import functools
from collections.abc import Callable

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from pdproxy.response import Sink

MIN_PROGRESS_BYTES = 64 * 1024
"""Bytes that a client must take of a long answer in its time; of a shorter one all."""
LINGER_SECONDS = 10.0
"""Seconds that a client has to notice that nothing more comes."""


class ResponseWriter(asyncio.Transport):
    """A connection's transport, with bounds. Whoever makes one calls `lost` when the connection is.

    Args:
        inner: what it stands for.
        sends: whether the client may be in the middle of a request.
        seconds: for the client to take what waits, or a good deal of it.
    """

    def __init__(self, inner: asyncio.Transport, sends: Callable[[], bool], seconds: float) -> None:
        super().__init__()
        self._inner = inner
        self._sends = sends
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._left = 0
        self._watch: asyncio.TimerHandle | None = None
        self._ending = False
        self._held: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Goes out in the loop's next turn, as one with what else is said in this: head and body, last piece and end.

        One system call less is worth more than the turn: the client's machine is woken once.
        """
        if not self._held:
            self._loop.call_soon(self._flush)
        self._held.append(bytes(data))

    def write_now(self, data: bytes) -> None:
        """Goes out at once."""
        if self._held:
            self._flush()
        self._inner.write(data)

    def get_write_buffer_size(self) -> int:
        """Bytes that wait."""
        return self._inner.get_write_buffer_size() + sum(map(len, self._held))

    def is_closing(self) -> bool:
        """Nothing more goes out."""
        return self._ending or self._inner.is_closing()

    def close(self) -> None:
        """Let what waits go out, then end. Idempotent."""
        if self.is_closing():
            return
        self._ending = True
        self._flush()
        self._stop()
        if self._sends() and self._inner.can_write_eof():
            self._inner.write_eof()
            self._inner.resume_reading()
            self._watch = self._loop.call_later(LINGER_SECONDS, self._end)
        else:
            self._end()

    def abort(self) -> None:
        """End at once."""
        self._held.clear()
        self._inner.abort()

    def waits(self) -> None:
        """The client does not keep up."""
        if self._watch is None:
            self._look_later()

    def goes_on(self) -> None:
        """It does again."""
        if not self._ending:
            self._stop()

    def lost(self) -> None:
        """The connection is gone: watch no longer, and let go of whose it was."""
        self._stop()
        self._held.clear()
        self._sends = _no_more

    def _flush(self) -> None:
        held, self._held = self._held, []
        if held:
            self._inner.write(held[0] if len(held) == 1 else b"".join(held))

    def _stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _end(self) -> None:
        self._inner.close()
        self._look_later()

    def _look_later(self) -> None:
        self._left = self.get_write_buffer_size()
        self._watch = self._loop.call_later(self._seconds, self._look)

    def _look(self) -> None:
        if self._left - self.get_write_buffer_size() < MIN_PROGRESS_BYTES:
            self._inner.abort()
        else:
            self._look_later()


def _no_more() -> bool:
    return False


def direct_write(cycle: RequestResponseCycle, writer: ResponseWriter) -> Sink:
    """The sink of one exchange; see `pdproxy.response.SINK_EXTENSION`."""
    return functools.partial(_write, cycle, writer)


def _write(cycle: RequestResponseCycle, writer: ResponseWriter, piece: bytes) -> bool:
    """As uvicorn writes a piece of a body whose length is not known."""
    if cycle.disconnected:
        return False
    if cycle.response_complete or not cycle.chunked_encoding:
        raise RuntimeError("only pieces of a body whose length is not known go this way, after its head")
    writer.write_now(b"%x\r\n%b\r\n" % (len(piece), piece))
    return not cycle.flow.write_paused


class UnchunkedCycle(RequestResponseCycle):
    """An exchange whose answer, where its length is not known, ends with the connection (RFC 9112, 6.3).

    uvicorn has chunks for such an answer, whoever asked, and no seam for the class: `unchunked` makes one of its own.
    """

    open_ended = False

    async def send(self, message: ASGISendEvent) -> None:
        """As uvicorn's. It checks that a body is as long as was said: of an open one, each piece is."""
        if message["type"] == "http.response.start":
            self.open_ended = all(name != b"content-length" for name, _ in message.get("headers", ()))
            if self.open_ended:
                self.chunked_encoding = False
        elif self.open_ended and message["type"] == "http.response.body":
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


def unchunked(cycle: RequestResponseCycle) -> None:
    """Have an exchange answered without chunks; and without 100 (Continue), which HTTP/1.0 does not know either."""
    cycle.__class__ = UnchunkedCycle
    cycle.waiting_for_100_continue = False
