"""Heads that two readers could understand in two ways. Pure.

uvicorn's HTTP/1.1 protocol with bounds that it lacks, and without what it lets pass.

Bounded are the size of a request's head, the time that it may take, what comes with a body that is none of it (chunk
extensions, trailers), what follows an answer that did not wait for the body, and the time that a client may take
nothing of its answer. Most of what is malformed or ambiguous llhttp refuses already (two content-lengths, or one beside
transfer-encoding, a bare carriage return, …); the rest is refused here. Trailers are dropped: taken for headers, they
would pass every check that was made on the head.

A bad request never cuts the answer to the one before it. Nor are requests put in line: a client that sends one before
it has its answer gets that answer and then a closed connection, and asks again, as HTTP wants it. uvicorn would stop
reading to keep the line short, and so not notice that the client leaves.

A wish to upgrade is ignored, as HTTP allows. uvicorn ignores the wish, but takes the body for the next request.
"""

import asyncio
import dataclasses
import enum
import typing
from collections.abc import Sequence

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from pdproxy.errors import ClientError, PdproxyError
from pdproxy.response import SINK_EXTENSION
from pdproxy.server.response_writer import ResponseWriter, direct_write, unchunked

FRAMING = (b"content-length", b"transfer-encoding")


def ambiguous(method: bytes, version: str, headers: Sequence[tuple[bytes, bytes]]) -> str:
    """Why somebody else on the way may have understood a head differently; "" where nobody can have.

    Args:
        method: in upper case.
        version: of HTTP, such as "1.1".
        headers: names in lower case.
    """
    hosts, codings = 0, []
    for name, value in headers:
        if name == b"host":
            hosts += 1
        elif name == b"transfer-encoding":
            codings.append(value.strip().lower())
    if method == b"CONNECT":
        return "There are no tunnels here."
    if version not in ("1.0", "1.1"):
        return f"HTTP/{version} is not served here. Send HTTP/1.1."
    if hosts > 1 or (hosts == 0 and version == "1.1"):
        return "Send one Host header, and no more."
    if codings and (codings != [b"chunked"] or version == "1.0"):
        return "The only Transfer-Encoding that is served here is chunked, with HTTP/1.1."
    return ""


def head_again(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """A head that says of the body what ``headers`` say, and nothing else."""
    fields = (b"%b: %b\r\n" % field for field in headers if field[0] in FRAMING)
    return b"POST / HTTP/1.1\r\nhost: x\r\n%b\r\n" % b"".join(fields)


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What one client may do with a connection.

    Attributes:
        head_bytes: of a head, and of what comes with a body that is none of it between two pieces of the body.
        head_seconds: from the connection's (or the head's) first byte to the head's last; and for what is left of a
            body whose answer is out already.
        taking_seconds: for a client to take what waits for it: else it would hold nodes and memory for ever.
    """

    head_bytes: int
    head_seconds: float
    taking_seconds: float


class RefusedHeadError(PdproxyError):
    """A complete head that is too long or ambiguous; answered already."""


class ReceiveState(enum.Enum):
    """Of what the client sends."""

    BETWEEN = "between"
    """Nothing of a request is here, or the last one as a whole."""
    HEAD = "head"
    BODY = "body"


class GuardedProtocol(HttpToolsProtocol):
    """One client connection. Subclassed by `guarded`, which binds the limits."""

    limits: typing.ClassVar[ConnectionLimits]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._writer = self.transport = ResponseWriter(transport, self._sends, self.limits.taking_seconds)
        self._stage = ReceiveState.BETWEEN
        self._came = 0
        """Bytes since the last that were a request's, or its body's."""
        self._refused = self._again = False
        self._late: asyncio.TimerHandle | None = None
        self._hurry(self._too_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._in_time()
        self._unset_keepalive_if_required()
        self._writer.lost()
        self._withdraw_sink()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._came += len(data)
        if self._stage is ReceiveState.BETWEEN and self._late is None:
            self._hurry(self._too_late)
        self._parse(data)
        # The piece that ends the head may hold a body as well: only a head that is still open has outgrown its limit.
        if self._came > self.limits.head_bytes:
            self._refuse_size()

    def on_message_begin(self) -> None:
        if self._again:
            return
        super().on_message_begin()
        self._stage = ReceiveState.HEAD
        if self._late is None:
            self._hurry(self._too_late)

    def on_url(self, url: bytes) -> None:
        if not self._again:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._stage is ReceiveState.HEAD:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._again:
            return
        self._in_time()
        version = self.parser.get_http_version()
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > self.limits.head_bytes:
            self._refuse_size()
        elif wrong := ambiguous(self.parser.get_method(), version, self.headers):
            self._refuse(400, wrong, "invalid_http")
        elif self._answering():
            self._refuse(400, "Wait for an answer before the next request.", "pipelined")
        if self._refused:
            raise RefusedHeadError  # Ends the parsing: the application must not hear of this request.
        super().on_headers_complete()
        if version == "1.0":
            unchunked(self.cycle)
        else:
            self.scope["extensions"] = {SINK_EXTENSION: {"sink": direct_write(self.cycle, self._writer)}}
        self._stage, self._came = ReceiveState.BODY, 0

    def on_body(self, body: bytes) -> None:
        self._came = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # httptools sees no body where an upgrade is wished for
        self._stage, self._came = ReceiveState.BETWEEN, 0
        super().on_message_complete()
        if self.cycle.response_complete:
            self._in_time()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._withdraw_sink()
        if self._stage is ReceiveState.BODY and not self.transport.is_closing():
            self._hurry(self.transport.close)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writer.waits()

    def resume_writing(self) -> None:
        self._writer.goes_on()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, f"{msg} Send well-formed HTTP/1.1.", "invalid_http")

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._stay(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _stay(self, rest: bytes) -> None:
        """A head wished for another protocol: what follows it is read as if it had not."""
        self.parser = httptools.HttpRequestParser(self)
        self._again = True
        self._parse(head_again(self.headers))
        self._again = False
        if rest:
            self._parse(rest)

    def _hurry(self, late: typing.Callable[[], None]) -> None:
        self._in_time()
        self._late = self.loop.call_later(self.limits.head_seconds, late)

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _withdraw_sink(self) -> None:
        """It leads back to who offers it: a circle that only the garbage collector would find."""
        if self.cycle is not None:
            self.scope["extensions"] = {}

    def _sends(self) -> bool:
        """The client is not done: more of a request may come, or something that was refused."""
        return self._refused or self._stage is not ReceiveState.BETWEEN

    def _answering(self) -> bool:
        """A request is here as a whole, and its answer not out yet."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.more_body and not cycle.response_complete

    def _too_late(self) -> None:
        self._late = None
        if self._stage is ReceiveState.HEAD:
            self._refuse(408, f"The headers did not arrive within {self.limits.head_seconds:g} s.", "headers_timeout")
        elif not self._answering():
            self.transport.close()

    def _refuse_size(self) -> None:
        most = self.limits.head_bytes
        if self._stage is ReceiveState.BODY:
            self._refuse(400, f"More than {most} bytes came that are no body.", "framing_too_large")
        else:
            self._refuse(431, f"The request's headers are longer than {most} bytes.", "headers_too_large")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """The connection ends, once: with this error, or with the answer to the request before."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._in_time()
        if self._answering():
            self.cycle.keep_alive = False
            return
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            body = ClientError(status, message, code=code).body()
            head = f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self._say_goodbye(cycle)

    def _say_goodbye(self, cycle: RequestResponseCycle | None) -> None:
        """The end; for the application the client has gone, though it may still be listening."""
        self.transport.close()
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()


def guarded(limits: ConnectionLimits) -> type[GuardedProtocol]:
    """The protocol class with these limits, as uvicorn wants it: a class that it can call."""
    return type("BoundProtocol", (GuardedProtocol,), {"limits": limits})
