"""What the orchestrator hands back to intake."""

import dataclasses
from typing import Protocol

from pdproxy.request import Headers
from pdproxy.sink import Sink


class ReplyStream(Protocol):
    """A body that arrives in pieces; each piece may go to the client as it is.

    Iteration never raises because of a node: what goes wrong after the first byte arrives as an error event followed by
    a clean end. Whoever holds the stream must `aclose` it, on every exit; iterating to the end does so by itself.
    """

    def __aiter__(self) -> "ReplyStream": ...

    async def __anext__(self) -> bytes: ...

    async def pipe_to(self, sink: Sink) -> None:
        """Between two pieces: hand on at once what comes, as long as no piece asks for a decision. May do nothing."""
        ...

    async def aclose(self) -> None:
        """Client gone, or done: end the legs, release what they hold. Idempotent; never raises."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """A response for the client.

    Attributes:
        status: the HTTP status.
        headers: lower-case names, `content-type` among them; no `content-length`.
        body: whole, or arriving.
    """

    status: int
    headers: Headers
    body: bytes | ReplyStream
