"""uvicorn's HTTP/1.1 protocol with bounds that it lacks, and without what it lets pass.

Bounded are the size of a request's head, the time that it may take, what comes with a body that is none of it (chunk
extensions, trailers), and the time that a client may take nothing of its answer. Most of what is malformed or ambiguous
llhttp refuses already (two content-lengths, or one beside transfer-encoding, a bare carriage return, …); the rest is
refused here. Trailers are dropped: taken for headers, they would pass every check that was made on the head.

A bad request never cuts the answer to the one before it. Nor are requests put in line: a client that sends one before
it has its answer gets that answer and then a closed connection, and asks again, as HTTP wants it. uvicorn would stop
reading to keep the line short, and so not notice that the client leaves.
"""

import asyncio
import dataclasses
import typing

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from pdproxy.errors import ClientError, PdproxyError
from pdproxy.server.framing import ambiguous


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What one client may do with a connection.

    Attributes:
        head_bytes: of a head, and of what comes with a body that is none of it between two pieces of the body.
        head_seconds: from the connection's (or the head's) first byte to the head's last.
        taking_seconds: for a client to take what waits for it: else it would hold nodes and memory for ever.
    """

    head_bytes: int
    head_seconds: float
    taking_seconds: float


class RefusedHeadError(PdproxyError):
    """A complete head that is too long or ambiguous; answered already."""


class GuardedProtocol(HttpToolsProtocol):
    """One client connection. Subclassed by `guarded`, which binds the limits."""

    limits: typing.ClassVar[ConnectionLimits]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._refused = self._in_body = False
        self._framing = 0
        self._begin_head()
        self._late = self.loop.call_later(self.limits.head_seconds, self._too_late)
        self._slow: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._late.cancel()
        self._took()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._in_head:
            self._head += len(data)
        elif self._in_body:
            self._framing += len(data)
        super().data_received(data)
        # The piece that ends the head may hold a body as well: only a head that is still open has outgrown its limit.
        if self._in_head and self._head > self.limits.head_bytes:
            self._refuse_size()
        elif self._in_body and self._framing > self.limits.head_bytes:
            self._refuse(400, f"More than {self.limits.head_bytes} bytes came that are no body.", "framing_too_large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._in_head:
            self._begin_head()
            self._head = 1
            self._late = self.loop.call_later(self.limits.head_seconds, self._too_late)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._late.cancel()
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > self.limits.head_bytes:
            self._refuse_size()
        elif wrong := ambiguous(self.parser.get_http_version(), self.headers):
            self._refuse(400, wrong, "invalid_http")
        elif self._answering():
            self._refuse(400, "Wait for an answer before the next request.", "pipelined")
        if self._refused:
            raise RefusedHeadError  # Ends the parsing: the application must not hear of this request.
        super().on_headers_complete()
        self._in_body, self._framing = True, 0

    def on_body(self, body: bytes) -> None:
        self._framing = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._slow = self.loop.call_later(self.limits.taking_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        self._took()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, f"{msg} Send well-formed HTTP/1.1.", "invalid_http")

    def _took(self) -> None:
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None

    def _begin_head(self) -> None:
        self._in_head = True
        self._head = 0

    def _answering(self) -> bool:
        """A request is here as a whole, and its answer not out yet."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.more_body and not cycle.response_complete

    def _too_late(self) -> None:
        if self._head:
            self._refuse(408, f"The headers did not arrive within {self.limits.head_seconds:g} s.", "headers_timeout")
        else:
            self.transport.close()

    def _refuse_size(self) -> None:
        self._refuse(431, f"The request's headers are longer than {self.limits.head_bytes} bytes.", "headers_too_large")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """The connection ends, once: with this error, or with the answer to the request before."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        if self._answering():
            self.cycle.keep_alive = False
            return
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            body = ClientError(status, message, code=code).body()
            head = f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()


def guarded(limits: ConnectionLimits) -> type[GuardedProtocol]:
    """The protocol class with these limits, as uvicorn wants it: a class that it can call."""
    return type("BoundProtocol", (GuardedProtocol,), {"limits": limits})
