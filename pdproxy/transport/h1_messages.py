"""HTTP/1.1 messages as bytes: the head of a request, and the parser of the responses on one connection. No I/O."""

import dataclasses
import functools
from typing import NamedTuple
from urllib.parse import urlsplit

import httptools

from pdproxy.request import HOP_BY_HOP, Headers
from pdproxy.transport.faults import PARSING, ProtocolError
from pdproxy.transport.port import HttpRequest

_PORTS = {"http": 80, "https": 443}
_OURS = HOP_BY_HOP | {"accept-encoding", "content-length", "expect", "host"}
"""Headers that belong to one connection or that we set ourselves: never taken from a caller."""


class Origin(NamedTuple):
    """What a pooled connection is connected to."""

    scheme: str
    host: str
    port: int


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Where a URL leads: an origin, its ``Host`` header, and the path with its query."""

    origin: Origin
    host: str
    path: str


@functools.lru_cache(maxsize=512)  # nearly all requests go to a few addresses
def target_of(url: str) -> Target:
    """Take an absolute http(s) URL apart.

    Raises:
        ValueError: another scheme, no host, credentials in the URL, or a bad port.
    """
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname or parts.username is not None:
        raise ValueError(f"{url!r} is not of the form http(s)://host[:port]/path")
    path = parts.path or "/"
    port = parts.port if parts.port is not None else _PORTS[parts.scheme]
    return Target(
        origin=Origin(parts.scheme, parts.hostname, port),
        host=parts.netloc,
        path=f"{path}?{parts.query}" if parts.query else path,
    )


def fields_of(request: HttpRequest, target: Target) -> Headers:
    """The header fields of a request, ours first, without those of a caller that belong to one connection."""
    end_to_end = [field for field in request.headers if field[0] not in _OURS]
    fields = [("host", target.host), ("accept-encoding", "identity"), *end_to_end]
    if request.body or request.method not in ("GET", "HEAD"):
        fields.append(("content-length", str(len(request.body))))
    return tuple(fields)


def request_head(request: HttpRequest, target: Target) -> bytes:
    """The request line and header fields, up to and with the empty line.

    Raises:
        ValueError: a line break or a NUL in the method, the path or a header: it would be read as something else.
    """
    lines = [f"{request.method} {target.path} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in fields_of(request, target)]
    text = "\r\n".join(lines)
    if text.count("\n") != len(lines) - 1 or text.count("\r") != len(lines) - 1 or "\0" in text:
        raise ValueError("a request head must not contain line breaks of its own")
    if lines[0].count(" ") != 2:
        raise ValueError(f"the request line {lines[0]!r} has a space too many")
    return (text + "\r\n\r\n").encode("latin-1")


_OVERHEAD = 128 * 1024
"""Bytes that may come without any of them being body: bounds heads, interim answers, chunk extensions, trailers."""
_BODILESS = frozenset({204, 304})


class ResponseParser:
    """Parses the responses on one connection, one after the other.

    Attributes:
        status: the HTTP status, once `has_head`.
        headers: names in lower case, once `has_head`.
        has_head: the final (not 1xx) head has come.
        ended: the whole answer has come.
        reusable: it has ended, and the connection can carry another. Not after a 5xx: servers close connections after
            an unhandled error without saying so (uvicorn), and the next request would be lost with them.
        silent: no byte has come since `expect`.
        pending: bytes of body that have not been taken yet.
    """

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.expect("GET")

    def expect(self, method: str) -> None:
        """Get ready for the response to a request with this method."""
        self.status = 0
        self.headers: Headers = ()
        self.has_head = self.ended = self.reusable = False
        self.silent = True
        self.pending = 0
        self._bodiless = method == "HEAD"
        self._ends_with_connection = False
        self._fields: list[tuple[str, str]] = []
        self._pieces: list[bytes] = []
        self._overhead = 0

    def feed(self, data: bytes) -> None:
        """Take what came.

        Raises:
            ProtocolError: it is not HTTP, an upgrade, or far too much head.
        """
        self.silent = False
        self._overhead += len(data)
        try:
            self._parser.feed_data(data)
        except PARSING as error:
            if isinstance(error.__context__, ProtocolError):  # of our own, out of a callback
                raise error.__context__ from None
            if not self.ended:
                raise ProtocolError(f"not an HTTP answer ({type(error).__name__}: {error})") from error
            self.reusable = False
        if self._overhead > _OVERHEAD and not self.ended:
            raise ProtocolError(f"more than {_OVERHEAD} bytes came that are no body")

    def feed_eof(self) -> bool:
        """Take the end of the connection. True where that is how the answer ends (no length, not chunked)."""
        if self.has_head and self._ends_with_connection:
            self.ended = True
        self.reusable = False
        return self.ended

    def close(self) -> None:
        """Nothing more is fed. The parser goes: it refers to this object. Idempotent."""
        if hasattr(self, "_parser"):
            del self._parser

    def take(self) -> bytes:
        """All of the body that is here and was not taken yet."""
        pieces, self._pieces, self.pending = self._pieces, [], 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    # What httptools calls.

    def on_message_begin(self) -> None:
        if self.ended:
            self.reusable = False  # a response that was not asked for
        self._fields = []

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.has_head:  # trailers are dropped
            self._fields.append((name.lower().decode("latin-1"), value.decode("latin-1").strip()))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200 or self.has_head:
            return
        codings = [value.lower() for name, value in self._fields if name == "transfer-encoding"]
        if codings not in ([], ["chunked"]):
            raise ProtocolError(f"transfer coding {', '.join(codings)!r}, which is not supported here")
        self.status, self.headers, self.has_head = status, tuple(self._fields), True
        self._fields = []
        framed = bool(codings) or any(name == "content-length" for name, _ in self.headers)
        self._ends_with_connection = not framed and status not in _BODILESS
        self.ended = self._bodiless  # the parser cannot know; the connection is not used again

    def on_body(self, body: bytes) -> None:
        if not self.ended:
            self._pieces.append(body)
            self.pending += len(body)
            self._overhead = 0

    def on_message_complete(self) -> None:
        if self.has_head and not self.ended:
            self.ended = True
            self.reusable = self.status < 500 and self._parser.should_keep_alive()
