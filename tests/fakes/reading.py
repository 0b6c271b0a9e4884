"""Reads a response stream as the server does: one piece, then pieces that are there without waiting, and so on."""

import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing

from pdproxy.response import ResponseStream

AT_ONCE = 3
"""Pieces that are taken at once before the next await, as with a client that reads in bursts."""


async def pieces_of(stream: ResponseStream) -> AsyncGenerator[bytes, None]:
    """One piece after the other, without a sink."""
    while piece := await stream.read():
        yield piece


async def follow(stream: ResponseStream, most: int = sys.maxsize) -> list[bytes]:
    """The pieces, to the stream's end or to one more than ``most``. The stream is closed."""
    pieces: list[bytes] = []

    def take(piece: bytes) -> bool:
        pieces.append(piece)
        return len(pieces) % (AT_ONCE + 1) != 0 and len(pieces) <= most

    try:
        async with aclosing(pieces_of(stream)) as read:  # left open, the loop would close it later
            async for piece in read:
                if take(piece):
                    await stream.pipe_to(take)
                if len(pieces) > most:
                    break
    finally:
        await stream.aclose()
    return pieces
