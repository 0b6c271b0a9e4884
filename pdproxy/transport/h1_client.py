"""HTTP/1.1 to nodes with pooled connections: `H1Transport`, the implementation of `port.Transport` for requests.

Written on asyncio protocols and httptools because the CPU time of a request is what a proxy costs: a general client
library spends more on one exchange than all of the rest of the proxy. `httpx_transport` uses one for health checks and
the like, and tests compare the two.
"""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Literal

import msgspec

from pdproxy.clock import Clock
from pdproxy.errors import NodeFault
from pdproxy.request import Headers
from pdproxy.response import ChunkSink, Sink
from pdproxy.transport.faults import CONNECTING, while_connecting
from pdproxy.transport.h1_connection import H1Connection
from pdproxy.transport.h1_messages import Origin, Target, request_head, target_of
from pdproxy.transport.port import HttpRequest, HttpResponse, Timeouts

_LOG = logging.getLogger(__name__)

KEEP = 4.0
"""Seconds that a connection may idle: less than the 5 s after which a vLLM server closes it
(VLLM_HTTP_TIMEOUT_KEEP_ALIVE), so that a request seldom meets a connection that is being closed. One that does is sent
again (`H1Transport.send`)."""
_MOST = 256
"""Idle connections kept for one origin."""


class ConnectionPool:
    """Idle connections by origin, the freshest first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._idle: dict[Origin, list[H1Connection]] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self.open: set[H1Connection] = set()
        """In use or idle."""

    def take(self, origin: Origin) -> H1Connection | None:
        """An idle connection that, as far as one can tell, still stands."""
        stack = self._idle.get(origin, [])
        while stack:
            connection = stack.pop()
            idled = self._clock.now() - connection.idle_since
            if not connection.lost and idled < KEEP and connection.quiet:
                return connection
            connection.abort()
        return None

    def add(self, connection: H1Connection) -> None:
        """Add a fresh connection, so that `close` closes it."""
        if not connection.lost:
            self.open.add(connection)

    def give_back(self, connection: H1Connection) -> None:
        """Keep a connection for the next request if it can carry one, else close it."""
        stack = self._idle.setdefault(connection.origin, [])
        if len(stack) >= _MOST or connection not in self.open or not connection.is_reusable:
            connection.abort()
            return
        connection.rest()
        connection.idle_since = self._clock.now()
        stack.append(connection)
        if self._sweeper is None:
            self._sweep_later()

    def forget(self, connection: H1Connection) -> None:
        """Drop a connection that is closed."""
        self.open.discard(connection)
        stack = self._idle.get(connection.origin)
        if stack is not None and connection in stack:
            stack.remove(connection)

    def close(self) -> None:
        """Close every connection, those in use too."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for connection in tuple(self.open):
            connection.abort()
        self._idle.clear()
        self.open.clear()

    def _sweep_later(self) -> None:
        self._sweeper = asyncio.get_running_loop().call_later(KEEP, self._sweep)

    def _sweep(self) -> None:
        self._sweeper = None
        now = self._clock.now()
        for stack in tuple(self._idle.values()):
            for connection in tuple(stack):
                if now - connection.idle_since >= KEEP:
                    stack.remove(connection)
                    connection.abort()
        self._idle = {origin: stack for origin, stack in self._idle.items() if stack}
        if self._idle:
            self._sweep_later()


_REQUEST_TIMEOUT = 408


class H1Transport:
    """Pooled keep-alive connections; no redirects, no proxies, no cookies.

    Args:
        ssl_context: for https nodes; True uses the system's authorities.
        on_resend: called for each request that is sent a second time.
    """

    def __init__(
        self,
        clock: Clock,
        ssl_context: ssl.SSLContext | Literal[True] = True,
        on_resend: Callable[[], None] = lambda: None,
    ) -> None:
        self._ssl_context: ssl.SSLContext | Literal[True] = ssl_context
        self._on_resend = on_resend
        self._pool = ConnectionPool(clock)

    def trust(self, ssl_context: ssl.SSLContext) -> None:
        """Check the certificates of https nodes by this from now on; connections that are open stay."""
        self._ssl_context = ssl_context

    @property
    def connections(self) -> int:
        """How many connections are open, in use or idle."""
        return len(self._pool.open)

    async def send(self, request: HttpRequest, timeouts: Timeouts) -> HttpResponse:
        """See `port.Transport.send`. The connection of a response that is read to its end serves the next request.

        Raises:
            NodeFault: REFUSED, BUSY, RESET, HEADERS_TIMEOUT.
            ValueError: the request cannot be written as HTTP: a line break in a header, not a URL.
        """
        target = target_of(request.url)
        head = request_head(request, target)
        began = asyncio.get_running_loop().time()
        due = began + timeouts.whole
        pooled = self._pool.take(target.origin)
        if pooled is None:
            return await self._send_on_fresh(target, request, head, timeouts, due)
        try:
            await pooled.exchange(request.method, head, request.body, timeouts, due)
        except NodeFault:
            left = min(timeouts.headers, pooled.resend_seconds)
            if not self._may_resend(left, due):
                raise
        else:
            response = H1Response(pooled, self._pool)
            if response.status != _REQUEST_TIMEOUT:
                return response
            left = timeouts.headers - (asyncio.get_running_loop().time() - began)
            if not self._may_resend(left, due):
                return response
            await response.aclose()
        self._note_resend(request, target)
        try:
            return await self._send_on_fresh(
                target, request, head, msgspec.structs.replace(timeouts, headers=left), due
            )
        except NodeFault as fault:
            fault.resent = True
            raise

    async def aclose(self) -> None:
        """Close every connection, those in use too: their readers get RESET."""
        self._pool.close()
        await asyncio.sleep(0)  # aborted transports close their sockets in the loop's next turn

    def _may_resend(self, left: float, due: float) -> bool:
        return left > 0.0 and asyncio.get_running_loop().time() < due

    def _note_resend(self, request: HttpRequest, target: Target) -> None:
        _LOG.debug("%s closed a kept-alive connection: %s is sent again", target.host, target.path)
        self._on_resend()
        if request.on_resend is not None:
            request.on_resend()

    async def _send_on_fresh(
        self, target: Target, request: HttpRequest, head: bytes, timeouts: Timeouts, due: float
    ) -> HttpResponse:
        left = due - asyncio.get_running_loop().time()
        fresh = await self._connect(target, min(timeouts.connect, left))
        await fresh.exchange(request.method, head, request.body, timeouts, due)
        return H1Response(fresh, self._pool)

    async def _connect(self, target: Target, seconds: float) -> H1Connection:
        loop = asyncio.get_running_loop()
        origin = target.origin
        tls = self._ssl_context if origin.scheme == "https" else None
        try:
            async with asyncio.timeout(seconds):
                _, connection = await loop.create_connection(
                    lambda: H1Connection(origin, self._pool.forget), origin.host, origin.port, ssl=tls
                )
        except CONNECTING as error:
            raise while_connecting(error, target.host) from error
        self._pool.add(connection)
        return connection


class H1Response:
    """See `port.HttpResponse`. Once it is closed, its connection serves another one: it is not touched any more."""

    __slots__ = ("_connection", "_pool", "headers", "status")

    def __init__(self, connection: H1Connection, pool: ConnectionPool) -> None:
        self._connection: H1Connection | None = connection
        self._pool = pool
        self.status: int = connection.answer.status
        self.headers: Headers = connection.answer.headers

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    def __anext__(self) -> Coroutine[None, None, bytes]:
        return _closed() if self._connection is None else self._connection.piece()

    def take_whole(self) -> bytes | None:
        connection = self._connection
        return None if connection is None or not connection.answer.ended else connection.answer.take()

    async def pipe_to(self, sink: Sink, chunk_sink: ChunkSink | None = None) -> None:
        if self._connection is not None:
            await self._connection.pipe_to(sink, chunk_sink)

    async def aclose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._pool.give_back(connection)


async def _closed() -> bytes:
    raise StopAsyncIteration
