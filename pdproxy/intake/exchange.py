"""One HTTP request and its response over ASGI: its head, what is sent back, and a client that disconnects meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from typing import Any

from pdproxy.errors import ClientError
from pdproxy.intake.auth import request_id
from pdproxy.intake.routes import GENERATING
from pdproxy.orchestration.client_errors import error_body, error_event, node_error_event
from pdproxy.request import Endpoint, Fields, Headers
from pdproxy.response import EXCHANGE_EXTENSION, Exchange

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


async def send_head(send: Send, status: int, headers: Iterable[tuple[str, str]]) -> None:
    """Begin a response."""
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    await send({"type": "http.response.start", "status": status, "headers": raw})


async def send_whole(send: Send, status: int, headers: Iterable[tuple[str, str]], body: bytes) -> None:
    """A response in one piece."""
    await send_head(send, status, (*headers, ("content-length", str(len(body)))))
    await send({"type": "http.response.body", "body": body})


class HttpExchange:
    """A request's head, its connection's two halves, and how far its response is.

    ``ids``: for requests without one of their own.

    Attributes:
        path: without a slash at its end: vLLM redirects to the path without it, and to serve that at once is one
            exchange less.
        headers: all, in their order.
        fields: the first value of each header, by its name in lower case.
        request_id: for logs and the response.
        endpoint: whose API errors follow; None for a path that is not a generating endpoint.
        server: what the server offers beside ``receive`` and ``send``.
        begun: the response has begun.
    """

    __slots__ = (
        "_gone", "_sees_all", "_send", "_task", "begun", "endpoint", "fields", "headers", "method", "path", "query",
        "receive", "request_id", "server",
    )  # fmt: skip

    def __init__(self, scope: Scope, receive: Receive, send: Send, ids: Iterator[str]) -> None:
        path: str = scope["path"]
        self.method: str = scope["method"]
        self.path = path = path.rstrip("/") if path[-1:] == "/" else path
        self.query: str = scope["query_string"].decode("latin-1")
        self.headers = headers = headers_of(scope)
        self.fields: Fields = dict(headers[::-1])
        self.request_id = request_id(self.fields, ids)
        self.endpoint = GENERATING.get(path)
        self.receive = receive
        self.server: Exchange = scope["extensions"][EXCHANGE_EXTENSION]
        self.begun = self._gone = False
        self._send = send
        self._sees_all = getattr(send, "__self__", None) is not self.server
        """Somebody between here and the server, such as a trace, sees messages: a response begins with one."""
        self._task: asyncio.Task[object] | None = None

    def send(self, message: Message) -> Awaitable[None]:
        """ASGI's ``send``, which is to be awaited."""
        self.begun = True
        return self._send(message)

    async def send_head(self, status: int, headers: Headers) -> None:
        """Send the head of a response."""
        self.begun = True
        if self._sees_all or not self.server.write_head(status, headers):
            await send_head(self._send, status, headers)

    async def send_whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a response in one piece."""
        self.begun = True
        if self._sees_all or not self.server.write_whole(status, headers, body):
            await send_whole(self._send, status, headers, body)

    async def send_piece(self, piece: bytes) -> None:
        """Send a piece of a response whose head is out, and wait while the client does not keep up."""
        sink = self.server.sink
        if sink is None:
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        elif not sink(piece):  # the client does not keep up, or has gone: ``send`` knows how to wait
            await self._send({"type": "http.response.body", "body": b"", "more_body": True})

    async def send_end(self) -> None:
        """Send the end of such a response."""
        if not self.server.write_end():
            await self._send({"type": "http.response.body", "body": b""})

    async def refuse(self, error: ClientError) -> None:
        """Send an error in the shape of the endpoint's API.

        Not once the response has begun: then only cutting the connection shows that it is broken.
        """
        if not self.begun:
            ids = (("x-pdproxy-request-id", self.request_id), ("x-request-id", self.request_id))
            body = error_body(self.endpoint or Endpoint.COMPLETIONS, error)
            await self.send_whole(error.status, (JSON_HEADER, *ids, *error.headers), body)

    async def end_with(self, body: bytes) -> None:
        """End an event stream that has no event yet with a node's error, which was to be an answer of its own."""
        event = node_error_event(self.endpoint or Endpoint.COMPLETIONS, body)
        await self.send({"type": "http.response.body", "body": event})

    async def break_off(self, error: ClientError) -> None:
        """End an event stream with an error event."""
        event = error_event(self.endpoint or Endpoint.COMPLETIONS, error)
        await self.send({"type": "http.response.body", "body": event})

    def watch_client(self) -> None:
        """Cancel the current task when the client leaves, until `unwatch_client`. The body must have been read."""
        self._task = asyncio.current_task()
        self.server.tell_when_left(self._on_left)

    def unwatch_client(self) -> None:
        """Cancel the task no more."""
        if self._task is not None:
            self._task = None
            self.server.tell_when_left(None)

    def cancelled_by_client(self) -> bool:
        """For a task that was cancelled, and is not watched any more: whether the client did it, and nobody else; then
        the cancellation is taken back."""
        task = asyncio.current_task()
        return self._gone and task is not None and task.uncancel() == 0  # a shutdown's cancellation stays

    def left(self) -> bool:
        """Whether the client has disconnected while it was watched."""
        return self._gone

    def _on_left(self) -> None:
        if self._task is not None:
            self._gone = True
            self._task.cancel()
