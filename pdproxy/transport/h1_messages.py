"""HTTP/1.1 messages as bytes: the head of a request, and the parser of the responses on one connection. No I/O."""

import dataclasses
import functools
import re
from typing import NamedTuple
from urllib.parse import urlsplit

import httptools

from pdproxy.request import HOP_BY_HOP, Headers
from pdproxy.transport.faults import PARSING, ProtocolError
from pdproxy.transport.port import HttpRequest

_PORTS = {"http": 80, "https": 443}
_OURS = HOP_BY_HOP | {"accept-encoding", "content-length", "expect", "host"}
"""Headers that belong to one connection or that we set ourselves: never taken from a caller."""

_WITHOUT_BODY = frozenset({"GET", "HEAD"})
_ENDS_WORD = re.compile("[ \\r\\n\\0]").search


class Origin(NamedTuple):
    """The address to which a pooled connection leads."""

    scheme: str
    host: str
    port: int


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Where a URL leads: an origin, its ``Host`` header, the path with its query, and the head's part behind the method
    that is the same for all requests there."""

    origin: Origin
    host: str
    path: str
    start: str


@functools.lru_cache(maxsize=512)  # nearly all requests go to a few addresses
def target_of(url: str) -> Target:
    """Take an absolute http(s) URL apart.

    Raises:
        ValueError: another scheme, no host, credentials in the URL, a bad port, or a space or line break in it.
    """
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname or parts.username is not None:
        raise ValueError(f"{url!r} is not of the form http(s)://host[:port]/path")
    path = parts.path or "/"
    path = f"{path}?{parts.query}" if parts.query else path
    if _ENDS_WORD(path + parts.netloc):
        raise ValueError(f"{url!r} has a space, a line break or a NUL in it")
    port = parts.port if parts.port is not None else _PORTS[parts.scheme]
    return Target(
        origin=Origin(parts.scheme, parts.hostname, port),
        host=parts.netloc,
        path=path,
        start=f" {path} HTTP/1.1\r\nhost: {parts.netloc}\r\naccept-encoding: identity",
    )


def fields_of(request: HttpRequest, target: Target) -> Headers:
    """The header fields of a request, ours first, without those of a caller that belong to one connection."""
    fields = [("host", target.host), ("accept-encoding", "identity"), *_end_to_end(request.headers)]
    if request.body or request.method not in _WITHOUT_BODY:
        fields.append(("content-length", str(len(request.body))))
    return tuple(fields)


def _end_to_end(headers: Headers) -> Headers:
    return headers if _OURS.isdisjoint(dict(headers)) else tuple([field for field in headers if field[0] not in _OURS])


def request_head(request: HttpRequest, target: Target) -> bytes:
    """The request line and header fields, up to and with the empty line.

    Raises:
        ValueError: a line break or a NUL in the method, the path or a header: it would be read as something else.
    """
    method, body = request.method, request.body
    lines = [method, *map(": ".join, _end_to_end(request.headers))]
    if body or method not in _WITHOUT_BODY:
        lines.append(f"content-length: {len(body)}")
    text, breaks = "\r\n".join(lines), len(lines) - 1
    if text.count("\n") != breaks or text.count("\r") != breaks or "\0" in text or " " in method:
        raise ValueError("a request head must not contain line breaks of its own, nor a method a space")
    return f"{method}{target.start}{text[len(method) :]}\r\n\r\n".encode("latin-1")


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
        between_chunks: the body is chunked, and what came ends where a chunk does: those that follow as a whole may be
            left out of what is fed.
        pieces: of body that have not been taken yet. httptools itself appends to it, and notes in a list whether a
            chunk is open: a stream has many.
    """

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.on_body = self.pieces.append
        self._outside_chunks = [True]
        self.on_chunk_header = self._outside_chunks.clear
        self.on_chunk_complete = functools.partial(self._outside_chunks.append, True)
        self._parser = httptools.HttpResponseParser(self)
        self.expect("GET")

    def expect(self, method: str) -> None:
        """Get ready for the response to a request with this method."""
        self.status = 0
        self.headers: Headers = ()
        self.has_head = self.ended = self.reusable = False
        self.silent = True
        self.pieces.clear()
        self.between_chunks = self._chunked = False
        self._outside_chunks[:] = [True]
        self._bodiless = method == "HEAD"
        self._ends_with_connection = False
        self._fields: list[tuple[str, str]] = []
        self._overhead = 0

    def feed(self, data: bytes) -> None:
        """Take what came.

        Raises:
            ProtocolError: it is not HTTP, an upgrade, or far too much head.
        """
        self.silent = False
        try:
            self._parser.feed_data(data)
        except PARSING as error:
            self._on_parser_stopped(error)
        if self.pieces and not self._bodiless:
            self._overhead = 0
        else:
            self._count_overhead(len(data))
        # Half of a size, or of what may follow it, never ends in a line's end: the chunk begins with that.
        self.between_chunks = self._chunked and bool(self._outside_chunks) and not self.ended and data.endswith(b"\r\n")

    def _count_overhead(self, size: int) -> None:
        self.pieces.clear()
        self._overhead += size
        if self._overhead > _OVERHEAD and not self.ended:
            raise ProtocolError(f"more than {_OVERHEAD} bytes came that are no body")

    def _on_parser_stopped(self, error: Exception) -> None:
        """Bytes behind the whole answer were not asked for. Before it has ended, they are no answer."""
        if self.ended:
            self.reusable = False
        elif isinstance(error.__context__, ProtocolError):  # of our own, out of a callback
            raise error.__context__ from None
        else:
            raise ProtocolError(f"not an HTTP answer ({type(error).__name__}: {error})") from error

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
        taken = b"".join(self.pieces)  # no copy of a single one
        self.pieces.clear()
        return taken

    # What httptools calls, beside `on_body`.

    def on_message_begin(self) -> None:
        if self.ended:
            raise ProtocolError("a response that was not asked for")
        self._fields = []

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.has_head:  # trailers are dropped
            self._fields.append((name.lower().decode("latin-1"), value.decode("latin-1").strip()))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200 or self.has_head:
            return
        names = dict(self._fields)
        chunked = "transfer-encoding" in names
        if chunked:
            codings = [value.lower() for name, value in self._fields if name == "transfer-encoding"]
            if codings != ["chunked"]:
                raise ProtocolError(f"transfer coding {', '.join(codings)!r}, which is not supported here")
        self.status, self.headers, self.has_head = status, tuple(self._fields), True
        self._fields, self._chunked = [], chunked
        self._ends_with_connection = not chunked and "content-length" not in names and status not in _BODILESS
        self.ended = self._bodiless  # the parser cannot know; the connection is not used again

    def on_message_complete(self) -> None:
        if self.has_head and not self.ended:
            self.ended = True
            self.reusable = self.status < 500 and self._parser.should_keep_alive()
