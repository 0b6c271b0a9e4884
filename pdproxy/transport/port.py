"""HTTP to nodes, as the rest of the proxy knows it.

Every failure is a `NodeFault`: REFUSED before the request was sent, or BUSY where we have no socket left for it; RESET
and STALL after; HEADERS_TIMEOUT in between. Status codes are not failures here: `legs` judges them.
"""

import math
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import msgspec
from opentelemetry import trace

from pdproxy.errors import Fault, NodeFault
from pdproxy.request import Headers
from pdproxy.response import ChunkSink, Sink


class Timeouts(msgspec.Struct, frozen=True):
    """How long each phase of one exchange may take, in seconds.

    Attributes:
        connect: until the connection stands (fault REFUSED when it does not).
        headers: from the request's last byte to the response head (fault HEADERS_TIMEOUT).
        stall: between two pieces of the body (fault STALL).
        first: from the head to the body's first piece (fault STALL); None is ``stall``. A node sends a stream's head
            at once, and its first event only when the prompt was computed.
        whole: for the exchange as a whole, however lively it is (the fault of the phase that it is in then).
    """

    connect: float = 5.0
    headers: float = 600.0
    stall: float = 120.0
    first: float | None = None
    whole: float = math.inf

    @property
    def first_piece(self) -> float:
        """The wait for the body's first piece."""
        return self.stall if self.first is None else self.first


class HttpRequest(msgspec.Struct, frozen=True):
    """One request to a node.

    Attributes:
        url: absolute.
        headers: without host, content-length and hop-by-hop ones.
        on_resend: called when the request is about to be sent a second time (`Transport.send`), for a caller that has
            to give back what the first copy may have taken.
        span: of the leg that the request opens, where that leg is traced.
    """

    method: str
    url: str
    headers: Headers = ()
    body: bytes = b""
    on_resend: Callable[[], None] | None = None
    span: trace.Span | None = None


class HttpResponse(Protocol):
    """A response whose head has arrived. Iterating yields its body. It must be closed (`aclose`) on every exit."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Headers: ...

    def __aiter__(self) -> AsyncIterator[bytes]:
        """The body as it arrives; pieces that arrived together may come as one.

        Raises:
            NodeFault: RESET when the body ends before its end, STALL when it stops, or lasts too long.
        """
        ...

    def take_whole(self) -> bytes | None:
        """The body, if it is here as a whole and nothing was read of it yet; None: it is to be read."""
        ...

    async def pipe_to(self, sink: Sink, chunk_sink: ChunkSink | None = None) -> None:
        """Between two reads: pass pieces to ``sink`` as they come, while it returns True.

        A read that begins and ends where a chunk does may be shown to ``chunk_sink`` first, which takes it only if it
        is one whole chunk, and not the last.

        Also returns when the body's last piece or its end is here, or when it failed: the next read shows
        which. May return at once. When it is cancelled, no piece is lost.
        """
        ...

    async def aclose(self) -> None:
        """Give the connection back if the body was read to its end, else cut it. Idempotent; never raises."""
        ...


class Transport(Protocol):
    """Sends requests to nodes over pooled connections."""

    async def send(self, request: HttpRequest, timeouts: Timeouts) -> HttpResponse:
        """The response, as soon as its head is here. A cancelled call leaves no connection behind.

        A request is sent once more, on a fresh connection, where a kept-alive one breaks under it: before the first
        byte of an answer, or with a 408, which servers say to an idle connection. Both tries share the deadlines. It is
        no fault, so it counts neither as a retry nor against the node. The request may be a POST that the node has
        begun to process (RFC 9110, 9.2.2): repeating it is safe for every call that is made to nodes. They compute an
        answer from their body and change nothing else; a node aborts the first copy when its connection ends; vLLM
        gives each copy an engine request id of its own; a release has the same effect once or twice. A
        prefill leg alone may leave something behind: the ticket of a first copy that ran to its end. It has the same
        hand-over id, so that ``on_resend`` and a release free it.

        Raises:
            NodeFault: REFUSED, BUSY, RESET, HEADERS_TIMEOUT.
        """
        ...

    async def aclose(self) -> None:
        """Close every connection."""
        ...


async def read_to_end(response: HttpResponse, limit: int) -> bytes:
    """The whole body of a response.

    Raises:
        NodeFault: as iterating an `HttpResponse`; INVALID_BODY when it is longer than ``limit`` bytes.
    """
    whole = response.take_whole()
    if whole is not None:
        if len(whole) > limit:
            raise _too_long(response, limit)
        return whole
    pieces: list[bytes] = []
    size = 0
    async for piece in response:
        pieces.append(piece)
        size += len(piece)
        if size > limit:
            raise _too_long(response, limit)
    return b"".join(pieces)


def _too_long(response: HttpResponse, limit: int) -> NodeFault:
    return NodeFault(Fault.INVALID_BODY, f"the body is longer than {limit} bytes", status=response.status)
