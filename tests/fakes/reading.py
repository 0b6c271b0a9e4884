"""Reads a reply's stream as the front door does: a piece, then what can be had without being asked for, and again."""

import sys

from pdproxy.response import ResponseStream

AT_ONCE = 3
"""Pieces that are taken at once before a turn is asked for, as with a client that stops to take breath."""


async def follow(stream: ResponseStream, most: int = sys.maxsize) -> list[bytes]:
    """The pieces, to the stream's end or to one more than ``most``. The stream is closed."""
    pieces: list[bytes] = []

    def take(piece: bytes) -> bool:
        pieces.append(piece)
        return len(pieces) % (AT_ONCE + 1) != 0 and len(pieces) <= most

    try:
        async for piece in stream:
            if take(piece):
                await stream.pipe_to(take)
            if len(pieces) > most:
                break
    finally:
        await stream.aclose()
    return pieces
