"""What the orchestrator hands back to intake: a response whose body is whole or arrives in pieces."""

import abc
import dataclasses
from typing import Self

from pdproxy.request import Headers
from pdproxy.sink import Sink


class ResponseStream(abc.ABC):
    """A body that arrives in pieces; each piece may go to the client as it is.

    Iteration never raises because of a node: what goes wrong after the first byte arrives as an error event followed by
    a clean end. Whoever holds the stream must `aclose` it, on every exit; iterating to the end, or leaving the
    iteration by an exception, does so by itself.
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

    async def pipe_to(self, sink: Sink) -> None:  # noqa: B027  # nothing is what most streams can do
        """Between two pieces: write to ``sink`` at once what arrives, as long as no piece asks for a decision."""

    @abc.abstractmethod
    async def _advance(self) -> bytes:
        """What comes next; may be empty.

        Raises:
            StopAsyncIteration: nothing more does.
        """

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Client gone, or done: end the legs, release what they hold. Idempotent; never raises."""


@dataclasses.dataclass(frozen=True, slots=True)
class ProxyResponse:
    """A response for the client.

    Attributes:
        status: the HTTP status.
        headers: lower-case names, `content-type` among them; no `content-length`.
        body: whole, or arriving.
    """

    status: int
    headers: Headers
    body: bytes | ResponseStream
