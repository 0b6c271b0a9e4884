"""uvicorn's HTTP/1.1 protocol with limits that it lacks, and without requests that could be read in two ways.

Limited are the size of a request's head and the time for it, framing that comes with a body (chunk extensions,
trailers), the rest of a body whose response is out already, and the time for which a client may read nothing of its
response. Most malformed or ambiguous requests llhttp refuses already (two content-lengths, or one beside
transfer-encoding, a bare carriage return, …); the rest is refused here. Trailers are dropped: taken for headers, they
would bypass every check that was made on the head.

A bad request never cuts the response to the one before it. Requests are not pipelined: a client that sends one before
it has its response gets that response and then a closed connection, and sends it again, as HTTP provides. uvicorn would
stop reading in order to queue it, and so not notice that the client disconnects.

``Upgrade`` is ignored, as HTTP allows. uvicorn ignores it too, but takes the body for the next request.
"""

import asyncio
import dataclasses
import enum
import math
import operator
import re
import typing
import urllib.parse
from collections.abc import Sequence
from itertools import chain

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pdproxy.errors import ClientError, PdproxyError
from pdproxy.observe.labels import ConnectionRefusal
from pdproxy.observe.refused_connections import OnRefused, uncounted
from pdproxy.response import EXCHANGE_EXTENSION
from pdproxy.server.response_writer import ClientExchange, ResponseWriter, UnchunkedExchange, WriteFlow

LEAVING_SECONDS = 1
"""After the shutdown has begun, for a client that was not told so to send a request on its idle connection. It gets its
response with ``Connection: close``. A connection that is closed while a request is on its way loses that request, and
HTTP lets clients repeat only some."""

_NAME = operator.itemgetter(0)
FRAMING = (b"content-length", b"transfer-encoding")


def ambiguous(method: bytes, version: str, headers: Sequence[tuple[bytes, bytes]]) -> str:
    """Why another server on the way may read a head differently, or "" where it cannot; header names in lower case."""
    names = [*map(_NAME, headers)]
    hosts, codings = names.count(b"host"), []
    if b"transfer-encoding" in names:
        codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if method == b"CONNECT":
        return "There are no tunnels here."
    if version not in ("1.0", "1.1"):
        return f"HTTP/{version} is not served here. Send HTTP/1.1."
    if hosts > 1 or (hosts == 0 and version == "1.1"):
        return "Send one Host header, and no more."
    if codings and (codings != [b"chunked"] or version == "1.0"):
        return "The only Transfer-Encoding that is served here is chunked, with HTTP/1.1."
    return ""


_ASGI = {"version": "3.0", "spec_version": "2.3"}


def framing_head(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """A head with nothing but the framing of the body from ``headers``."""
    fields = (b"%b: %b\r\n" % field for field in headers if field[0] in FRAMING)
    return b"POST / HTTP/1.1\r\nhost: x\r\n%b\r\n" % b"".join(fields)


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of one client connection.

    Attributes:
        head_bytes: of a head, and of framing between two pieces of a body.
        head_seconds: from the connection's (or the head's) first byte to the head's last; and for the rest of a body
            whose response is out already.
        stall_seconds: for a client to read what waits for it: else it would hold nodes and memory for ever.
        on_refused: told of connections whose request is refused before the application has it.
    """

    head_bytes: int
    head_seconds: float
    stall_seconds: float
    on_refused: OnRefused = uncounted


class RefusedHeadError(PdproxyError):
    """A complete head that is too long or ambiguous; the error response is out already."""


class ReceiveState(enum.Enum):
    """Which part of a request the client is sending."""

    BETWEEN = "between"
    """None: the last request has come as a whole."""
    HEAD = "head"
    BODY = "body"


class GuardedProtocol(HttpToolsProtocol):
    """One client connection. `guarded` makes a subclass with the limits."""

    __slots__ = (
        "_exchange", "_framing_bytes", "_idle_timer", "_idle_timer_at", "_idle_until", "_leaving", "_refused",
        "_reparsing", "_state", "_timer", "_writer",
    )  # fmt: skip
    """In the dict of the instance they would be more keys than can share one table: a kilobyte for each connection."""

    limits: typing.ClassVar[ConnectionLimits]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = WriteFlow(transport)
        self.pipeline = ()  # type: ignore[assignment]  # nothing is pipelined, and an empty deque has 700 bytes
        self._writer = self.transport = ResponseWriter(transport, self._is_sending, self.limits.stall_seconds)
        self._exchange: ClientExchange | None = None
        """The last request's: `cycle`, by its class."""
        self._state, self._framing_bytes = ReceiveState.BETWEEN, 0
        """Bytes since the last complete head or piece of a body."""
        self._refused = self._reparsing = self._leaving = False
        self._idle_timer: asyncio.TimerHandle | None = None
        self._idle_until = self._idle_timer_at = math.inf
        """When a connection that is idle has been so for too long; when the timer fires."""
        self._timer: asyncio.TimerHandle | None = None
        self._start_timer(self._on_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_idle_timer()
        self._writer.on_lost()
        self._withdraw_exchange()
        super().connection_lost(exc)
        if self._exchange is not None and self._exchange.disconnected:
            self._exchange.left()

    def data_received(self, data: bytes) -> None:
        if self._refused or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._framing_bytes += len(data)
        before = self._exchange
        self._parse(data)
        is_head = self._state is ReceiveState.HEAD or (self._exchange is before and self._state is ReceiveState.BETWEEN)
        if is_head and self._timer is None and not self._refused:
            self._start_timer(self._on_timeout)
        # The piece that ends the head may hold a body as well: only a head that is still open has outgrown its limit.
        if self._framing_bytes > self.limits.head_bytes:
            self._refuse_size()

    def on_message_begin(self) -> None:
        if self._reparsing:
            return
        self.url, self.headers, self.expect_100_continue = b"", [], False
        self._state = ReceiveState.HEAD

    def on_url(self, url: bytes) -> None:
        if not self._reparsing:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._state is ReceiveState.HEAD:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._reparsing:
            return
        self._stop_timer()
        if not self.url.startswith(b"/"):
            self._take_authority()
        version, most = self.parser.get_http_version(), self.limits.head_bytes
        if self._framing_bytes > most and len(self.url) + sum(map(len, chain(*self.headers))) > most:
            self._refuse_size()
        elif wrong := ambiguous(self.parser.get_method(), version, self.headers):
            self._refuse(400, wrong, "invalid_http")
        elif self._responding():
            self._refuse(400, "Wait for an answer before the next request.", "pipelined")
        if self._refused:
            raise RefusedHeadError  # Ends the parsing: the application must not get this request.
        if version != "1.0" and b"expect" in dict(self.headers):
            expected = [value.lower() for name, value in self.headers if name == b"expect"]
            self.expect_100_continue = b"100-continue" in expected
        self._begin_exchange(version)
        self._state, self._framing_bytes = ReceiveState.BODY, 0

    def _begin_exchange(self, version: str) -> None:
        """uvicorn's, without what is not used here: WebSockets, a queue of requests, its limit of connections."""
        url = httptools.parse_url(self.url)
        path = url.path.decode("ascii")
        method = self.parser.get_method().decode("ascii")
        # What is shared is not copied: each dict of its own would stay as long as the stream.
        scope: typing.Any = {
            "type": "http", "asgi": _ASGI, "http_version": version, "method": method, "scheme": self.scheme,
            "path": urllib.parse.unquote(path) if "%" in path else path, "raw_path": url.path, "root_path": "",
            "query_string": url.query or b"", "headers": self.headers, "server": self.server, "client": self.client,
            "state": self.app_state,
        }  # fmt: skip
        keeps_alive = version != "1.0" and not self._leaving and self.parser.should_keep_alive()
        kind = UnchunkedExchange if version == "1.0" else ClientExchange
        self.cycle = self._exchange = exchange = kind(
            scope, self._writer, self.flow, self.server_state.default_headers, self.on_response_complete,
            expects_100=self.expect_100_continue, keeps_alive=keeps_alive,
        )  # fmt: skip
        scope["extensions"], self.scope = {EXCHANGE_EXTENSION: exchange}, scope
        self._start_asgi_task(exchange, self.app)

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = 0
        if not self.cycle.response_complete:
            self.cycle.body += body
            if len(self.cycle.body) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
            self.cycle.message_event.set()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # httptools sees no body where the head has an upgrade
        self._state, self._framing_bytes = ReceiveState.BETWEEN, 0
        if not self.cycle.response_complete:
            self.cycle.more_body = False
            self.cycle.message_event.set()
        else:
            self._stop_timer()
            self._begin_idle()

    def on_response_complete(self) -> None:
        """uvicorn's, without its queue of requests, and with one timer for many of them."""
        self.server_state.total_requests += 1
        self._withdraw_exchange()
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        self._begin_idle()
        if self._state is ReceiveState.BODY:
            self._start_timer(self.transport.close)

    def shutdown(self) -> None:
        """The server ends. A response whose head is not out yet says so, and its connection is closed after it. Others
        may serve one more request: see `LEAVING_SECONDS`."""
        self._leaving, self.timeout_keep_alive = True, LEAVING_SECONDS
        cycle = self._exchange
        if cycle is not None and not cycle.response_complete:
            cycle.keep_alive = cycle.keep_alive and cycle.response_started
        elif self._state is ReceiveState.BETWEEN:
            self._begin_idle()

    def end(self) -> None:
        """The time for running requests is over: no further one is taken. Closes an idle connection; others end after
        their response."""
        super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writer.on_paused()

    def resume_writing(self) -> None:
        self._writer.on_resumed()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, f"{msg} Send well-formed HTTP/1.1.", "invalid_http")

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Parse what follows a head with an upgrade as if the head had none."""
        self.parser = httptools.HttpRequestParser(self)
        self._reparsing = True
        self._parse(framing_head(self.headers))
        self._reparsing = False
        if rest:
            self._parse(rest)

    def _take_authority(self) -> None:
        """A target that is a whole address tells the host, and `Host` is to be ignored (RFC 9112, 3.2.2)."""
        authority = re.split(rb"[/?#]", self.url.partition(b"://")[2], maxsplit=1)[0]
        self.headers[:] = [(name, authority if name == b"host" else value) for name, value in self.headers]

    def _start_timer(self, on_timeout: typing.Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self.limits.head_seconds, on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin_idle(self) -> None:
        """Close the connection in `timeout_keep_alive` seconds, unless something comes before.

        The timer is not moved for each response: when it fires it looks whether the time has come.
        """
        self._idle_until = due = self.loop.time() + self.timeout_keep_alive
        if due < self._idle_timer_at:
            self._set_idle_timer(due)

    def _unset_keepalive_if_required(self) -> None:
        self._idle_until = math.inf

    def _set_idle_timer(self, due: float) -> None:
        self._stop_idle_timer()
        self._idle_timer, self._idle_timer_at = self.loop.call_at(due, self._on_idle_timer), due

    def _stop_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._idle_timer, self._idle_timer_at = None, math.inf

    def _on_idle_timer(self) -> None:
        self._idle_timer, self._idle_timer_at = None, math.inf
        if self.loop.time() >= self._idle_until:
            self.timeout_keep_alive_handler()
        elif self._idle_until < math.inf:
            self._set_idle_timer(self._idle_until)

    def _withdraw_exchange(self) -> None:
        """Break the cycle between exchange and scope, which refer to each other, for the garbage collector."""
        if self.cycle is not None:
            self.scope["extensions"] = {}

    def _is_sending(self) -> bool:
        """Whether the client may still be sending: the rest of a request, or what follows a refused one."""
        return self._refused or self._state is not ReceiveState.BETWEEN

    def _responding(self) -> bool:
        """Whether a request has come as a whole, and its response is not out yet."""
        cycle = self._exchange
        return cycle is not None and not cycle.more_body and not cycle.response_complete

    def _on_timeout(self) -> None:
        self._timer = None
        if self._state is ReceiveState.HEAD:
            self._refuse(408, f"The headers did not arrive within {self.limits.head_seconds:g} s.", "headers_timeout")
        elif not self._responding():
            self.transport.close()

    def _refuse_size(self) -> None:
        most = self.limits.head_bytes
        if self._state is ReceiveState.BODY:
            self._refuse(400, f"More than {most} bytes came that are no body.", "framing_too_large")
        else:
            self._refuse(431, f"The request's headers are longer than {most} bytes.", "headers_too_large")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """End the connection with this error, or with the response to the request before. Once."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._stop_timer()
        self.limits.on_refused(ConnectionRefusal.HTTP, f"{self.client and self.client[0]}: {status} {code}: {message}")
        if self._responding():
            self.cycle.keep_alive = False
            return
        cycle = self._exchange
        if cycle is None or cycle.response_complete or not cycle.response_started:
            body = ClientError(status, message, code=code).body()
            head = f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()
        if cycle is not None:
            cycle.disconnected = True  # for the application, though the client may still read
            cycle.message_event.set()
            cycle.left()


def guarded(limits: ConnectionLimits) -> type[GuardedProtocol]:
    """The protocol class with these limits: uvicorn takes a class, not an instance."""
    return type("BoundProtocol", (GuardedProtocol,), {"__slots__": (), "limits": limits})
