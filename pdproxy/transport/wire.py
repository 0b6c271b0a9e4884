"""What goes out on a connection: where a URL leads, and the bytes of a request's head. Pure."""

import dataclasses
import functools
from typing import NamedTuple
from urllib.parse import urlsplit

from pdproxy.request import Headers
from pdproxy.transport.port import Outgoing

_PORTS = {"http": 80, "https": 443}
_OURS = frozenset(
    {
        "accept-encoding",
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""Headers that belong to one connection (RFC 9110, 7.6.1) or that we set ourselves: never taken from a caller."""


class Origin(NamedTuple):
    """What a pooled connection is good for."""

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


def fields_of(request: Outgoing, target: Target) -> Headers:
    """The header fields of a request, ours first, without those of a caller that belong to one connection."""
    fields = [("host", target.host), ("accept-encoding", "identity"), *_end_to_end(request.headers)]
    if request.body or request.method not in ("GET", "HEAD"):
        fields.append(("content-length", str(len(request.body))))
    return tuple(fields)


def head_of(request: Outgoing, target: Target) -> bytes:
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


def _end_to_end(headers: Headers) -> Headers:
    return tuple(field for field in headers if field[0] not in _OURS)
