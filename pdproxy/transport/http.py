"""HTTP/1.1 to nodes: `HttpTransport`, the implementation of `port.Transport` that carries requests.

Written on asyncio protocols and httptools because the CPU time of a request is what a proxy costs: a general client
library spends more on one exchange than all of the rest of the proxy. `httpx_transport` uses one for what is asked
seldom, and tests hold the two against each other.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator

from pdproxy.clock import Clock
from pdproxy.errors import Fault, NodeFault
from pdproxy.request import Headers
from pdproxy.sink import Sink
from pdproxy.transport.connection import Connection
from pdproxy.transport.faults import CONNECTING, while_connecting
from pdproxy.transport.pool import Pool
from pdproxy.transport.port import Incoming, Outgoing, Patience
from pdproxy.transport.wire import Origin, Target, head_of, target_of

STALE = 2.0
"""Seconds of idling from which a lost connection may have been closed by the peer's keep-alive timer before it read
our request. Servers' timers are longer than this; a connection that was lost sooner was lost with the request."""


class HttpTransport:
    """Pooled keep-alive connections; no redirects, no proxies, no cookies.

    Args:
        clock: tells how long a pooled connection was idle.
        ssl_context: for https nodes; None uses the system's authorities.
    """

    def __init__(self, clock: Clock, ssl_context: ssl.SSLContext | None = None) -> None:
        self._ssl_context = ssl_context
        self._pool = Pool(clock)

    @property
    def connections(self) -> int:
        """How many connections are open, in use or idle."""
        return len(self._pool)

    async def send(self, request: Outgoing, patience: Patience) -> Incoming:
        """See `port.Transport.send`. Read an answer to its end, and its connection serves the next request.

        Raises:
            NodeFault: REFUSED, RESET, HEADERS_TIMEOUT.
            ValueError: the request cannot be written as HTTP: a line break in a header, not a URL.
        """
        target = target_of(request.url)
        head = head_of(request, target)
        due = asyncio.get_running_loop().time() + patience.whole
        pooled = self._pool.take(target.origin)
        if pooled is not None:
            try:
                return await self._exchange(pooled, request, head, patience, due)
            except NodeFault as fault:
                if not _went_stale(pooled, fault):
                    raise
        fresh = await self._connect(target, min(patience.connect, patience.whole))
        return await self._exchange(fresh, request, head, patience, due)

    async def aclose(self) -> None:
        """Close every connection, those in use too: their readers get RESET."""
        self._pool.close()
        await asyncio.sleep(0)  # aborted transports close their sockets in the loop's next turn

    async def _exchange(
        self, connection: Connection, request: Outgoing, head: bytes, patience: Patience, due: float
    ) -> Incoming:
        connection.begin(request.method, head, request.body, due)
        try:
            await connection.head(patience.headers)
        except BaseException:
            connection.cut()
            raise
        return Received(connection, self._pool, patience)

    async def _connect(self, target: Target, seconds: float) -> Connection:
        loop = asyncio.get_running_loop()
        origin = target.origin
        try:
            async with asyncio.timeout(seconds):
                _, connection = await loop.create_connection(
                    lambda: Connection(origin, self._pool.forget), origin.host, origin.port, ssl=self._tls(origin)
                )
        except CONNECTING as error:
            raise while_connecting(error, target.host) from error
        self._pool.add(connection)
        return connection

    def _tls(self, origin: Origin) -> ssl.SSLContext | None:
        if origin.scheme == "http":
            return None
        if self._ssl_context is None:
            self._ssl_context = ssl.create_default_context()
        return self._ssl_context


class Received:
    """An answer whose head is here; see `port.Incoming`."""

    def __init__(self, connection: Connection, pool: Pool, patience: Patience) -> None:
        self._connection = connection
        self._pool = pool
        self._stall = patience.stall
        self._wait = patience.stall if patience.first is None else patience.first
        self._closed = False
        self.status: int = connection.answer.status
        self.headers: Headers = connection.answer.headers

    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives; pieces that arrived together come together."""
        return self

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._closed:
            raise StopAsyncIteration
        piece = await self._connection.piece(self._wait)
        if not piece:
            raise StopAsyncIteration
        self._wait = self._stall
        return piece

    async def pipe_to(self, sink: Sink) -> None:
        """See `port.Incoming.pipe_to`."""
        if not self._closed:
            await self._connection.pipe_to(sink, self._stall)

    async def read(self, limit: int) -> bytes:
        """The whole body; see `port.Incoming.read`."""
        pieces: list[bytes] = []
        size = 0
        async for piece in self:
            pieces.append(piece)
            size += len(piece)
            if size > limit:
                raise NodeFault(Fault.INVALID_BODY, f"the body is longer than {limit} bytes", status=self.status)
        return b"".join(pieces)

    async def aclose(self) -> None:
        """Give the connection back if the answer has ended, else cut it."""
        if not self._closed:
            self._closed = True
            self._pool.give_back(self._connection)


def _went_stale(connection: Connection, fault: NodeFault) -> bool:
    """The peer most likely closed the idle connection before our request reached it: nothing of it was read."""
    return fault.fault is Fault.RESET and connection.answer.silent and connection.idled >= STALE
