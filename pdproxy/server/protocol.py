"""uvicorn's HTTP/1.1 protocol with bounds that it lacks: the size of a request's head, and the time it may take.

Without them one client could send a head for ever. What is malformed or ambiguous (both content-length and
transfer-encoding, a bare carriage return, …) llhttp already refuses; the answer gets OpenAI's error shape here.
"""

import asyncio
import dataclasses
import typing

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pdproxy.errors import ClientError, PdproxyError


@dataclasses.dataclass(frozen=True, slots=True)
class HeadLimits:
    """``size`` in bytes, ``seconds`` from the connection's (or the head's) first byte to the head's last."""

    size: int
    seconds: float


class HeadTooLargeError(PdproxyError):
    """A complete head that is longer than the limit; answered already."""


class GuardedProtocol(HttpToolsProtocol):
    """One client connection. Subclassed by `guarded`, which binds the limits."""

    limits: typing.ClassVar[HeadLimits]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()
        self._late = self.loop.call_later(self.limits.seconds, self._too_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._late.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head += len(data)
        super().data_received(data)
        # The piece that ends the head may hold a body as well: only a head that is still open has outgrown its limit.
        if self._in_head and self._head > self.limits.size:
            self._refuse_size()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._in_head:
            self._begin_head()
            self._head = 1
            self._late = self.loop.call_later(self.limits.seconds, self._too_late)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._late.cancel()
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > self.limits.size:
            self._refuse_size()
            raise HeadTooLargeError  # Ends the parsing: the application must not hear of this request.
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, f"{msg} Send well-formed HTTP/1.1.", "invalid_http")

    def _begin_head(self) -> None:
        self._in_head = True
        self._head = 0

    def _too_late(self) -> None:
        if self._head:
            self._refuse(408, f"The headers did not arrive within {self.limits.seconds:g} s.", "headers_timeout")
        else:
            self.transport.close()

    def _refuse_size(self) -> None:
        self._refuse(431, f"The request's headers are longer than {self.limits.size} bytes.", "headers_too_large")

    def _refuse(self, status: int, message: str, code: str) -> None:
        if self.transport.is_closing():
            return
        body = ClientError(status, message, code=code).body()
        head = f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()


def guarded(limits: HeadLimits) -> type[GuardedProtocol]:
    """The protocol class with these limits, as uvicorn wants it: a class that it can call."""
    return type("BoundProtocol", (GuardedProtocol,), {"limits": limits})
