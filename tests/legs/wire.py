"""A transport that gives a scripted answer and records requests."""

from collections.abc import AsyncIterator

from pdproxy.request import Headers
from pdproxy.response import ChunkSink, Sink
from pdproxy.transport.port import HttpRequest, HttpResponse, Timeouts


class Answer:
    """A scripted response."""

    def __init__(self, status: int, headers: Headers, pieces: list[bytes]) -> None:
        self.status = status
        self.headers = headers
        self.pieces = pieces
        self.closed = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece

    async def pipe_to(self, sink: Sink, chunk_sink: ChunkSink | None = None) -> None:
        pass

    async def aclose(self) -> None:
        self.closed += 1


class Wire:
    """Gives every request the same answer, and records the requests."""

    def __init__(self, status: int, body: bytes, headers: Headers = (("content-type", "application/json"),)) -> None:
        self.answer = Answer(status, headers, [body[:7], body[7:]])
        self.requests: list[HttpRequest] = []
        self.timeouts: list[Timeouts] = []

    async def send(self, request: HttpRequest, timeouts: Timeouts) -> HttpResponse:
        self.requests.append(request)
        self.timeouts.append(timeouts)
        return self.answer

    async def aclose(self) -> None:
        pass
