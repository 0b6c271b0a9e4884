"""Answers to clients of HTTP/1.0, which know no chunks."""

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class UnchunkedCycle(RequestResponseCycle):
    """An exchange whose answer, where its length is not known, ends with the connection (RFC 9112, 6.3).

    uvicorn has chunks for such an answer, whoever asked, and no seam for the class: `unchunked` makes one of its own.
    """

    open_ended = False

    async def send(self, message: ASGISendEvent) -> None:
        """As uvicorn's. It checks that a body is as long as was said: of an open one, each piece is."""
        if message["type"] == "http.response.start":
            self.open_ended = all(name != b"content-length" for name, _ in message.get("headers", ()))
            if self.open_ended:
                self.chunked_encoding = False
        elif self.open_ended and message["type"] == "http.response.body":
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


def unchunked(cycle: RequestResponseCycle) -> None:
    """Have an exchange answered without chunks; and without 100 (Continue), which HTTP/1.0 does not know either."""
    cycle.__class__ = UnchunkedCycle
    cycle.waiting_for_100_continue = False
