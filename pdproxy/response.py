"""A response for the client as a value, the sink that takes its pieces the moment they arrive, and what else our server
offers beside ASGI.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec

from pdproxy.request import Headers

Sink = Callable[[bytes], bool]
"""Takes a piece of a body, always. False: pass no more on, because the piece or the moment needs a decision.

Most pieces of a stream need none: passed on within the callback that read them from the node's socket, they cost no
task switch. What a sink raises is a bug: it ends the exchange that the piece came from.
"""
ChunkSink = Callable[[bytes], bool | None]
"""A sink for what was read from a node where that begins with a chunk of HTTP/1.1: None where it does not take it all,
and the read goes to the `Sink`."""

EXCHANGE_EXTENSION = "pdproxy.http.exchange"
"""The ASGI extension in which our server offers an `Exchange`, as ``exchange``."""


class Exchange(Protocol):
    """A request and its response: what a task of its own, a timer or a turn of the loop would have to find out.

    Attributes:
        sink: for pieces of a response whose head has been sent, in place of ASGI's ``send``; None where the client's
            HTTP has no chunks. It returns False where the client does not keep up or has gone: then ``send`` knows
            how to wait.
        chunk_sink: the same for a piece that is framed as one chunk already.
    """

    @property
    def sink(self) -> Sink | None: ...

    @property
    def chunk_sink(self) -> Sink | None: ...

    def take_body(self) -> bytes | None:
        """The request's body if it is here as a whole; None: ASGI's ``receive`` has it, piece by piece."""
        ...

    def write_head(self, status: int, headers: Headers) -> bool:
        """Write the head of a response whose length is not known, together with the first piece that the sink gets
        before the loop's next turn. False where that cannot be done: then nothing is written, and ``send`` knows how.
        """
        ...

    def write_whole(self, status: int, headers: Headers, body: bytes) -> bool:
        """Write a whole response at once; ``headers`` have no `content-length`. False as in `write_head`."""
        ...

    def write_end(self) -> bool:
        """Write the end of a response in pieces. False as in `write_head`."""
        ...

    def tell_when_left(self, on_left: Callable[[], None] | None) -> None:
        """Call ``on_left`` when the client disconnects before it has its response, maybe soon; None ends that."""
        ...


class ResponseStream(Protocol):
    """A body that arrives in pieces; each piece may go to the client as it is.

    The holder must `aclose` it on every exit. Nothing is raised because of a node: what goes wrong after the first byte
    arrives as an error event followed by a clean end.
    """

    async def read(self) -> bytes:
        """The next bytes; none when the body is complete: then nothing is held any more."""
        ...

    async def pipe_to(self, sink: Sink, chunk_sink: Sink | None = None) -> None:
        """Between two reads: write to ``sink`` what arrives, as long as no piece needs a decision; maybe nothing.

        What arrives as one chunk of HTTP/1.1 may go to ``chunk_sink``, framed as it is.
        """
        ...

    async def aclose(self) -> None:
        """End the legs and release what they hold. Idempotent; never raises."""
        ...


class ProxyResponse(msgspec.Struct, frozen=True):
    """A response for the client; ``headers`` have lower-case names and no `content-length`."""

    status: int
    headers: Headers
    body: bytes | ResponseStream
