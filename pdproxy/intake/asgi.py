"""The shapes of ASGI that intake speaks: the few types, reading a body, sending a reply."""

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from pdproxy.errors import ClientError
from pdproxy.request import Headers, header

JSON = ("content-type", "application/json")
"""The header of a JSON body."""

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class ClientGone(Exception):
    """The client closed its connection before it got its answer."""


def headers_of(scope: Scope) -> Headers:
    """The request's headers, names in lower case."""
    return tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])


async def read_body(
    receive: Receive, headers: Headers, limit: int, reach: Callable[[int], None] | None = None
) -> bytes:
    """The request's whole body; ``reach`` is told how much of it is here, and may raise.

    Raises:
        ClientError: 413 when it is longer than ``limit`` bytes; 415 when it is compressed.
        ClientGone: the client left while sending.
    """
    refuse_codings(headers)
    if int(header(headers, "content-length") or 0) > limit:
        raise too_large(limit)
    pieces, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > limit:
            raise too_large(limit)
        if reach is not None:
            reach(size)
        if not message.get("more_body", False):
            return b"".join(pieces)


def refuse_codings(headers: Headers) -> None:
    """Only plain bodies: a compressed one could grow past any limit.

    Raises:
        ClientError: 415.
    """
    coding = header(headers, "content-encoding")
    if coding and coding.strip().lower() != "identity":
        raise ClientError(415, f"Send the body without content-encoding: {coding[:40]!r} is not accepted here.")


def too_large(limit: int) -> ClientError:
    """413, with the limit."""
    return ClientError(
        413,
        f"The body is longer than the {limit} bytes that this server accepts: shorten the prompt.",
        code="request_too_large",
        # What is left of the body would otherwise be read as the next request.
        headers=(("connection", "close"),),
    )


async def send_head(send: Send, status: int, headers: Iterable[tuple[str, str]]) -> None:
    """The response's first half."""
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    await send({"type": "http.response.start", "status": status, "headers": raw})


async def send_whole(send: Send, status: int, headers: Iterable[tuple[str, str]], body: bytes) -> None:
    """A response in one piece."""
    await send_head(send, status, (*headers, ("content-length", str(len(body)))))
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ClientError, body: bytes, request_id: str) -> None:
    """The error with its status and headers; ``body`` is in the shape of the endpoint's API."""
    headers = (JSON, ("x-pdproxy-request-id", request_id), ("x-request-id", request_id), *error.headers)
    await send_whole(send, error.status, headers, body)
