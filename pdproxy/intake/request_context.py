"""One HTTP request and its response over ASGI: its body and the bound on all bodies, a client that disconnects."""

import asyncio
import ctypes
import dataclasses
import io
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Self

import msgspec

from pdproxy.errors import ClientError
from pdproxy.intake.content_coding import is_compressed
from pdproxy.observe.labels import Rejection
from pdproxy.observe.metrics import Metrics
from pdproxy.orchestration.client_errors import error_body, error_event, node_error_event, rejected_error
from pdproxy.request import Endpoint, Headers, header
from pdproxy.response import Exchange

JSON_HEADER = ("content-type", "application/json")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class ClientGone(Exception):
    """The client closed its connection before it got its answer."""


def headers_of(scope: Scope) -> Headers:
    """The request's headers, names in lower case."""
    return tuple([(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]])


async def read_body(receive: Receive, limit: int, grow_to: Callable[[int], None]) -> bytes:
    """The request's whole body.

    Args:
        limit: in bytes.
        grow_to: called with the number of bytes that have arrived; may raise.

    Raises:
        ClientError: 413 when it is longer than ``limit``.
        ClientGone: the client left while sending.
    """
    body, size = None, 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece: bytes = message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise too_large(limit)
        grow_to(size)
        more = message.get("more_body", False)
        if body is None and not more:
            return piece
        body = body or io.BytesIO()  # to join megabytes at the end would keep all others from the event loop
        body.write(piece)
        if not more:
            return body.getvalue()


def accept_body(body: bytes, limit: int, grow_to: Callable[[int], None]) -> bytes:
    """As `read_body`, for one that is here as a whole."""
    if len(body) > limit:
        raise too_large(limit)
    grow_to(len(body))
    return body


def check_head(headers: Headers, limit: int) -> None:
    """Raises ClientError: 413 where the head tells of a body longer than ``limit``, 415 where of one that is compressed
    in a way that is not understood."""
    is_compressed(header(headers, "content-encoding"))
    if promised_length(headers) > limit:
        raise too_large(limit)


def promised_length(headers: Headers) -> int:
    """The length of the body that a head tells; 0 where it tells none. The server has checked that it is a number."""
    return int(header(headers, "content-length") or 0)


SMALL_BODY = 64 * 1024
"""Bytes: a body that is refused from its head has come by then, or is read and dropped, and its connection stays."""


def unread(error: ClientError, headers: Headers) -> ClientError:
    """The error for a request whose body was not read: it closes the connection, unless that body is small.

    A client that waits for 100 (Continue) may send the body after all or not (RFC 9110, 10.1.1): what comes next on the
    connection cannot be told.
    """
    known = header(headers, "transfer-encoding") is None and header(headers, "expect") is None
    if (known and promised_length(headers) <= SMALL_BODY) or any(name == "connection" for name, _ in error.headers):
        return error
    return dataclasses.replace(error, headers=(*error.headers, ("connection", "close")))


TRIM_FROM = 64 * 1024 * 1024
"""Bytes of bodies that must have been held before free memory is given back to the system."""
TRIM_SECONDS = 1.0
"""From the moment when most of them are not needed any more."""


def give_back_memory() -> None:
    """Have the C library give free memory back to the system: of itself glibc keeps what lies between small objects."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # not every libc has it
    if trim is not None:
        trim(0)


class BodyBudget:
    """Bounds the bytes of request bodies that are held at once, of all requests together.

    Where there were many, and there are few again, memory is given back, in a thread: for some hundred megabytes it
    takes some 20 milliseconds.
    """

    def __init__(self, limit: int, metrics: Metrics) -> None:
        self._limit = limit
        self._metrics = metrics
        self._held = self._most = 0
        metrics.watch_bodies(lambda: self._held)

    def reserve(self, key: str, promised: int = 0) -> "Reservation":
        """For one request of an API key with this name; empty at first.

        ``promised``: the length that its head tells. It is not reserved, or slow clients would hold what they do not
        send; but what has no room now is not read at all.

        Raises:
            ClientError: as `take`.
        """
        self._require(promised, key)
        return Reservation(self, key)

    def take(self, size: int, key: str) -> None:
        """Hold so many bytes more; a negative number gives some back.

        Raises:
            ClientError: 429 with Retry-After: there is no room for them.
        """
        self._require(size, key)
        self._held += size
        if self._held > self._most:
            self._most = self._held
        elif self._most > TRIM_FROM and self._held < self._most // 4:
            self._most = self._held
            loop = asyncio.get_running_loop()
            loop.call_later(TRIM_SECONDS, loop.run_in_executor, None, give_back_memory)

    def _require(self, size: int, key: str) -> None:
        if size > 0 and self._held + size > self._limit:
            text = "The requests that are here take up all the room there is for them: try again later."
            close = ("connection", "close")  # the rest of the body would otherwise be read as the next request
            self._metrics.rejected(Rejection.BODIES_FULL, key)
            raise rejected_error(Rejection.BODIES_FULL, text, 1, close)


class Reservation:
    """The bytes that one request holds, until `close`."""

    def __init__(self, budget: BodyBudget, key: str) -> None:
        self._budget = budget
        self._key = key
        self._size = 0

    def grow_to(self, size: int) -> None:
        """The body has so many bytes by now.

        Raises:
            ClientError: as `BodyBudget.take`.
        """
        self._budget.take(size - self._size, self._key)
        self._size = size

    def close(self) -> None:
        """It holds none any more. Idempotent."""
        if self._size:
            self._budget.take(-self._size, self._key)
            self._size = 0


def too_large(limit: int) -> ClientError:
    """413."""
    return ClientError(
        413,
        f"The body is longer than the {limit} bytes that this server accepts: shorten the prompt.",
        code="request_too_large",
        headers=(("connection", "close"),),  # the rest of the body would otherwise be read as the next request
    )


async def send_head(send: Send, status: int, headers: Iterable[tuple[str, str]]) -> None:
    """Begin a response."""
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    await send({"type": "http.response.start", "status": status, "headers": raw})


async def send_whole(send: Send, status: int, headers: Iterable[tuple[str, str]], body: bytes) -> None:
    """A response in one piece."""
    await send_head(send, status, (*headers, ("content-length", str(len(body)))))
    await send({"type": "http.response.body", "body": body})


class TrackedSend:
    """ASGI's send, which remembers whether the response has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

    async def __call__(self, message: Message) -> None:
        self.begun = True
        await self._send(message)


class RequestContext(msgspec.Struct, frozen=True):
    """A request's head, and the two halves of its connection.

    Attributes:
        request_id: for logs and the response.
        endpoint: whose API errors follow; None for a path that is not a generating endpoint.
        exchange: what the server offers of it beside ``receive`` and ``send``.
    """

    method: str
    path: str
    query: str
    headers: Headers
    request_id: str
    receive: Receive
    send: TrackedSend
    exchange: Exchange
    endpoint: Endpoint | None = None

    async def refuse(self, error: ClientError) -> None:
        """Send an error in the shape of the endpoint's API.

        Not once the response has begun: then only cutting the connection shows that it is broken.
        """
        if not self.send.begun:
            ids = (("x-pdproxy-request-id", self.request_id), ("x-request-id", self.request_id))
            body = error_body(self.endpoint or Endpoint.COMPLETIONS, error)
            await send_whole(self.send, error.status, (JSON_HEADER, *ids, *error.headers), body)

    async def end_with(self, body: bytes) -> None:
        """End an event stream that has no event yet with a node's error, which was to be an answer of its own."""
        event = node_error_event(self.endpoint or Endpoint.COMPLETIONS, body)
        await self.send({"type": "http.response.body", "body": event})

    async def break_off(self, error: ClientError) -> None:
        """End an event stream with an error event."""
        event = error_event(self.endpoint or Endpoint.COMPLETIONS, error)
        await self.send({"type": "http.response.body", "body": event})


class DisconnectWatcher:
    """Cancels the task it was entered in when the client leaves.

    A context manager, entered after the body was read. A cancellation that the client caused is raised as `ClientGone`;
    any other stays what it is.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._gone = False
        self._task: asyncio.Task[object] | None = None

    def left(self) -> bool:
        """Whether the client has disconnected."""
        return self._gone

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        self._exchange.watch(self._on_left)
        return self

    def _on_left(self) -> None:
        if self._task is not None:
            self._gone = True
            self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        task, self._task = self._task, None
        self._exchange.watch(None)
        # A shutdown may have cancelled the task as well: then the cancellation stays.
        if self._gone and kind is asyncio.CancelledError and task is not None and task.uncancel() == 0:
            raise ClientGone from None
