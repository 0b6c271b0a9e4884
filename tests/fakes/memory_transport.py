"""Fake nodes behind the transport port, in memory: no sockets, no wall time. A timeout only moves the fake clock."""

import asyncio
from collections.abc import AsyncIterator, Iterable

from pdproxy.errors import Fault, NodeFault
from pdproxy.request import Headers
from pdproxy.response import ChunkSink, Sink
from pdproxy.transport.port import HttpRequest, HttpResponse, Timeouts
from tests.fakes.clock import FakeClock
from tests.fakes.faults import FaultKind
from tests.fakes.node import FakeNode, Script


class MemoryTransport:
    """Implements `pdproxy.transport.port.Transport` over fake nodes.

    Every await gives the loop a turn, so that concurrent requests interleave and a cancellation can come in between.
    """

    def __init__(self, nodes: Iterable[FakeNode], clock: FakeClock) -> None:
        self._nodes = {node.url: node for node in nodes}
        self._clock = clock
        self.open: set[MemoryResponse] = set()
        """Answers that are not closed yet."""

    def add(self, node: FakeNode) -> None:
        """One more node can be reached."""
        self._nodes[node.url] = node

    async def send(self, request: HttpRequest, timeouts: Timeouts) -> HttpResponse:
        """See the port."""
        origin, path = _split(request.url)
        node = self._nodes.get(origin)
        await asyncio.sleep(0)
        if node is None or node.refuses():
            raise NodeFault(Fault.REFUSED, f"{origin} refused")
        script = node.respond(path, request.body, request.headers)
        node.running += 1
        try:
            await asyncio.sleep(0)
            self._fail_before_head(script, timeouts)
        except BaseException:
            node.running -= 1
            node.cut += 1
            raise
        response = MemoryResponse(self, node, script, timeouts, self._clock)
        self.open.add(response)
        return response

    def _fail_before_head(self, script: Script, timeouts: Timeouts) -> None:
        if script.status != 0:
            return
        if script.kind is FaultKind.RESET:
            raise NodeFault(Fault.RESET, "reset before the head")
        self._clock.advance(timeouts.headers)
        raise NodeFault(Fault.HEADERS_TIMEOUT, "no head")

    async def aclose(self) -> None:
        """Nothing to close."""


class MemoryResponse:
    """An answer whose pieces come one a turn of the loop."""

    def __init__(
        self, transport: MemoryTransport, node: FakeNode, script: Script, timeouts: Timeouts, clock: FakeClock
    ) -> None:
        self._transport = transport
        self._node = node
        self._script = script
        self._timeouts = timeouts
        self._clock = clock
        self._due = clock.now() + timeouts.whole
        self._at = 0
        self._ended = False
        self._closed = False

    @property
    def status(self) -> int:
        return self._script.status

    @property
    def headers(self) -> Headers:
        return self._script.headers

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """See the port."""
        while self._at < len(self._script.pieces):
            await asyncio.sleep(0)
            if self._closed:
                raise NodeFault(Fault.RESET, "closed while it was read")
            self._at += 1
            yield self._script.pieces[self._at - 1]
        await asyncio.sleep(0)
        match self._script.kind:
            case FaultKind.RESET:
                raise NodeFault(Fault.RESET, "reset in the body")
            case FaultKind.STALL:
                first = None if self._script.pieces else self._timeouts.first
                wait = self._timeouts.stall if first is None else first
                self._clock.advance(min(wait, max(0.0, self._due - self._clock.now())))
                raise NodeFault(Fault.STALL, "the body stalled")
            case _:
                self._ended = True

    def take_whole(self) -> bytes | None:
        """Nothing: its pieces are read one by one."""
        return None

    async def pipe_to(self, sink: Sink, chunk_sink: ChunkSink | None = None) -> None:
        """See the port. The last piece is left to be read."""
        more = True
        while more and self._at < len(self._script.pieces) - 1:
            await asyncio.sleep(0)
            if self._closed:
                return
            self._at += 1
            more = sink(self._script.pieces[self._at - 1])

    async def aclose(self) -> None:
        """See the port."""
        if not self._closed:
            self._closed = True
            self._node.running -= 1
            self._node.cut += int(not self._ended)
            self._transport.open.discard(self)


def _split(url: str) -> tuple[str, str]:
    scheme, _, rest = url.partition("://")
    host, _, path = rest.partition("/")
    return f"{scheme}://{host}", "/" + path
