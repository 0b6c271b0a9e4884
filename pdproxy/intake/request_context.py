"""One HTTP request and its response over ASGI, and the watch for a client that disconnects."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from types import TracebackType
from typing import Any, Self

from pdproxy.errors import ClientError
from pdproxy.intake import paths
from pdproxy.orchestration.client_errors import error_body, error_event
from pdproxy.request import Endpoint, Headers, header
from pdproxy.response import Sink

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


class TrackedSend:
    """ASGI's send, which remembers whether the response has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

    async def __call__(self, message: Message) -> None:
        self.begun = True
        await self._send(message)


@dataclasses.dataclass(frozen=True, slots=True)
class RequestContext:
    """A request's head, and the two halves of its connection.

    Attributes:
        query: with its question mark, or "".
        request_id: for logs and the response.
        sink: for pieces of the response's body that need not wait for their turn, where the server has one.
    """

    method: str
    path: str
    query: str
    headers: Headers
    request_id: str
    receive: Receive
    send: TrackedSend
    sink: Sink | None = None

    async def refuse(self, error: ClientError) -> None:
        """Send an error in the shape of the endpoint's API.

        Not once the response has begun: then only cutting the connection says that it is broken.
        """
        if not self.send.begun:
            await send_error(self.send, error, error_body(self._endpoint, error), self.request_id)

    async def break_off(self, error: ClientError) -> None:
        """End a stream of events that cannot go on."""
        event = error_event(self._endpoint, error)
        await self.send({"type": "http.response.body", "body": event})

    @property
    def _endpoint(self) -> Endpoint:
        return paths.GENERATING.get(self.path, Endpoint.COMPLETIONS)


class DisconnectWatcher:
    """Cancels the task it was entered in when the client leaves.

    Used as an async context manager after the body was read; leaving the context ends the watch. A cancellation that
    the client caused comes out as `ClientGone`; any other stays what it is.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False
        self._watch: asyncio.Task[None] | None = None

    def left(self) -> bool:
        """The client has gone."""
        return self._gone

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._watch = asyncio.create_task(self._wait_for_leave(task), name="presence")
        return self

    async def _wait_for_leave(self, task: asyncio.Task[object]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._watch is not None
        self._watch.cancel()
        if self._gone and kind is asyncio.CancelledError:
            task = asyncio.current_task()
            # Somebody else (shutdown) may have cancelled as well: then the cancellation stays.
            if task is not None and task.uncancel() == 0:
                raise ClientGone from None
