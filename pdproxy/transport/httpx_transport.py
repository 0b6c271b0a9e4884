"""HTTP/1.1 to nodes by httpx: for preflight and `check`, and the reference that `h1_client` is compared with.

Of httpx only its transport is used: no cookies, no redirects, no content coding, no proxies of the environment. Each
request has a connection of its own: requests are rare here, an idle connection may be closed just when it is used, what
a server sends beyond its response would be taken for the next one, and a call that is cancelled right after it
connected would leave its connection in the pool.

Where httpx's errors become `NodeFault`, the one place for them:

::

    before the head     ConnectError, ConnectTimeout, UnicodeError (a name that IDNA cannot encode)  → REFUSED
                          … because we have no socket left                                           → BUSY
                        PoolTimeout (we have no connection left)                                     → BUSY
                        ReadTimeout, WriteTimeout                                                    → HEADERS_TIMEOUT
    in the body         ReadTimeout, and whatever other time-out                                     → STALL
    at any time         all else: what broke, what is no HTTP, what httpx never raises here          → RESET
"""

import asyncio
import contextlib
import functools
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine

import httpx

from pdproxy.errors import Fault, NodeFault, untraced
from pdproxy.request import Headers
from pdproxy.response import ChunkSink, Sink
from pdproxy.transport.faults import timeout_fault, while_connecting, while_exchanging
from pdproxy.transport.h1_messages import Target, fields_of, request_head, target_of
from pdproxy.transport.port import HttpRequest, HttpResponse, Timeouts

ERRORS: tuple[type[Exception], ...] = (httpx.HTTPError, httpx.InvalidURL, httpx.CookieConflict, httpx.StreamError)
"""The roots of httpx's exceptions."""
_SENDING: tuple[type[Exception], ...] = (*ERRORS, UnicodeError)
_CONNECTING = (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError, httpx.UnsupportedProtocol, UnicodeError)


class HttpxTransport:
    """See `port.Transport`."""

    def __init__(self, ssl_context: ssl.SSLContext) -> None:
        self._ssl_context = ssl_context
        self._open: set[httpx.AsyncHTTPTransport] = set()

    def trust(self, ssl_context: ssl.SSLContext) -> None:
        """Check the certificates of https nodes by this from now on."""
        self._ssl_context = ssl_context

    @property
    def connections(self) -> int:
        """How many connections are open, or being opened."""
        return len(self._open)

    async def send(self, request: HttpRequest, timeouts: Timeouts) -> HttpResponse:
        """See `port.Transport.send`.

        Raises:
            NodeFault: REFUSED, BUSY, RESET, HEADERS_TIMEOUT.
            ValueError: the request cannot be written as HTTP: a line break in a header, not a URL.
        """
        target = target_of(request.url)
        request_head(request, target)  # refuses what cannot be written
        due = asyncio.get_running_loop().time() + timeouts.whole
        phases = _Phases(timeouts, due)
        connection = httpx.AsyncHTTPTransport(verify=self._ssl_context, trust_env=False)
        self._open.add(connection)
        try:
            async with phases.limit:
                response = await connection.handle_async_request(_request(request, target, phases))
        except BaseException as error:
            await self._close(connection)
            if isinstance(error, TimeoutError):
                raise phases.fault(target.host) from error
            if isinstance(error, _SENDING):
                raise before_the_head(error, target.host) from error
            raise
        return HttpxResponse(response, timeouts, due, target.host, functools.partial(self._close, connection))

    async def aclose(self) -> None:
        """Close every connection."""
        for connection in tuple(self._open):
            await self._close(connection)

    async def _close(self, connection: httpx.AsyncHTTPTransport) -> None:
        self._open.discard(connection)
        with contextlib.suppress(*ERRORS):
            await connection.aclose()


class _Phases:
    """Limits the wait for the head as a whole: httpx limits each read, and many short ones would have no end."""

    def __init__(self, timeouts: Timeouts, due: float) -> None:
        self.timeouts = timeouts
        self.limit = asyncio.timeout_at(due)
        self._due = due

    async def trace(self, event: str, info: object) -> None:  # noqa: ARG002 - httpcore names it
        """Called by httpcore at each step of an exchange."""
        if event in ("http11.send_request_headers.started", "http11.send_request_body.complete"):
            self.limit.reschedule(min(asyncio.get_running_loop().time() + self.timeouts.headers, self._due))

    def fault(self, where: str) -> NodeFault:
        """The fault of a head that did not come in time."""
        overdue = asyncio.get_running_loop().time() >= self._due
        return timeout_fault(Fault.HEADERS_TIMEOUT, where, None if overdue else self.timeouts.headers)


class HttpxResponse:
    """See `port.HttpResponse`."""

    def __init__(
        self,
        response: httpx.Response,
        timeouts: Timeouts,
        due: float,
        where: str,
        close: Callable[[], Coroutine[None, None, None]],
    ) -> None:
        self._response = response
        self._pieces = response.aiter_raw()
        self._stall = timeouts.stall
        self._wait = timeouts.first_piece
        self._due = due
        self._where = where
        self._close = close
        self._failure: NodeFault | None = None
        self._ended = False
        self.status: int = response.status_code
        self.headers: Headers = tuple(
            (name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in response.headers.raw
        )

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._failure is not None:
            raise untraced(self._failure)
        if self._ended:
            raise StopAsyncIteration
        self._failure = NodeFault(Fault.RESET, f"{self._where}: closed by us")  # stays so if this read is cancelled
        try:
            piece = await self._next()
        except TimeoutError as error:
            self._failure = self._overdue()
            raise untraced(self._failure) from error
        except ERRORS as error:
            self._failure = in_the_body(error, self._where)
            raise untraced(self._failure) from error
        self._failure = None
        if piece is None:
            self._ended = True
            raise StopAsyncIteration
        self._wait = self._stall
        return piece

    async def _next(self) -> bytes | None:
        left = self._due - asyncio.get_running_loop().time()
        if left <= 0:  # a lively body may never give a time-out the chance to look
            raise TimeoutError
        async with asyncio.timeout(min(self._wait, left)):
            return await anext(self._pieces, None)

    def _overdue(self) -> NodeFault:
        overdue = asyncio.get_running_loop().time() >= self._due
        return timeout_fault(Fault.STALL, self._where, None if overdue else self._wait)

    def take_whole(self) -> bytes | None:
        """Nothing: its pieces are read one by one."""
        return None

    async def pipe_to(self, sink: Sink, chunk_sink: ChunkSink | None = None) -> None:
        """Returns at once: every piece is left to iteration."""

    async def aclose(self) -> None:
        self._ended = True
        with contextlib.suppress(*ERRORS):
            await self._response.aclose()
        await self._close()


def before_the_head(error: Exception, where: str) -> NodeFault:
    """The fault of an exchange without a response head; see the module's docstring."""
    if isinstance(error, _CONNECTING):
        return while_connecting(_cause(error), where)
    if isinstance(error, httpx.PoolTimeout):
        return NodeFault(Fault.BUSY, f"{where}: no connection is free")
    if isinstance(error, httpx.TimeoutException):
        return timeout_fault(Fault.HEADERS_TIMEOUT, where)
    return while_exchanging(_cause(error), where)


def in_the_body(error: Exception, where: str) -> NodeFault:
    """The fault of a body that broke off."""
    if isinstance(error, httpx.TimeoutException):
        return timeout_fault(Fault.STALL, where)
    return while_exchanging(_cause(error), where)


def _request(request: HttpRequest, target: Target, phases: _Phases) -> httpx.Request:
    """The request exactly as it is to be sent: httpx adds nothing to it."""
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields_of(request, target)]
    timeout = {"connect": phases.timeouts.connect}
    extensions = {"timeout": timeout, "trace": phases.trace, "target": target.path.encode("latin-1")}
    return httpx.Request(request.method, request.url, headers=headers, content=request.body, extensions=extensions)


def _cause(error: Exception) -> Exception:
    """The operating system's error below httpx's, which says more, if there is one. Of several tries, the last."""
    below: BaseException | None = error
    while below is not None:
        found = below
        below = found.exceptions[-1] if isinstance(found, BaseExceptionGroup) else found.__cause__ or found.__context__
    return found if isinstance(found, OSError) else error
