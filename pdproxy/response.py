"""A response for the client as a value, and the sink that takes its pieces the moment they arrive."""

import abc
from collections.abc import Callable
from typing import Self

import msgspec

from pdproxy.request import Headers

Sink = Callable[[bytes], bool]
"""Takes a piece of a body, always. False: pass no more on, because the piece or the moment needs a decision.

Most pieces of a stream need none: passed on within the callback that read them from the node's socket, they cost no
task switch. What a sink raises is a bug: it ends the exchange that the piece came from.
"""

SINK_EXTENSION = "pdproxy.http.sink"
"""The ASGI extension in which the server offers, as ``sink``, a `Sink` for a response whose head has been sent.

It returns False where the client does not keep up or has gone: then ASGI's own ``send`` knows how to wait.
"""


class ResponseStream(abc.ABC):
    """A body that arrives in pieces; each piece may go to the client as it is.

    Iteration never raises because of a node: what goes wrong after the first byte arrives as an error event followed by
    a clean end. The holder must `aclose` the stream on every exit; iterating to the end, or leaving the iteration by an
    exception, does so by itself.
    """

    def __init__(self) -> None:
        self._ready = b""
        """What goes out next."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        try:
            while not self._ready:
                self._ready = await self._advance()
        except BaseException:
            await self.aclose()
            raise
        ready, self._ready = self._ready, b""
        return ready

    async def pipe_to(self, sink: Sink) -> None:  # noqa: B027  # a stream that cannot do it leaves all to iteration
        """Between two pieces: write to ``sink`` what arrives, as long as no piece needs a decision."""

    @abc.abstractmethod
    async def _advance(self) -> bytes:
        """The next bytes, which may be none; `StopAsyncIteration` when the body is complete."""

    @abc.abstractmethod
    async def aclose(self) -> None:
        """End the legs and release what they hold. Idempotent; never raises."""


class ProxyResponse(msgspec.Struct, frozen=True):
    """A response for the client; ``headers`` have lower-case names and no `content-length`."""

    status: int
    headers: Headers
    body: bytes | ResponseStream
