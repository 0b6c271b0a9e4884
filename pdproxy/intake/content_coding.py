"""Request bodies that a client has compressed: gzip, deflate and zstd, decompressed in steps and bounded on the way."""

import asyncio
import io
import sys
import zlib
from collections.abc import Callable, Iterator

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

from pdproxy.errors import ClientError

STEP_BYTES = 256 * 1024
"""Bytes that one step makes: a millisecond, after which the event loop serves others."""
_GZIP_OR_ZLIB = zlib.MAX_WBITS | 32
_WINDOW = {int(zstd.DecompressionParameter.window_log_max): 23}
"""8 MiB: what a decoder of HTTP content has to support (RFC 9659), and all that it allocates for a client."""


async def decompressed(body: bytes, coding: str, grow_to: Callable[[int], None]) -> bytes:
    """The body as it was before the client compressed it.

    Args:
        coding: the value of ``content-encoding``, which `check_coding` has taken.
        grow_to: called with the number of bytes so far; raises where they are too many.

    Raises:
        ClientError: 400 where the body is not what ``coding`` says; what ``grow_to`` raises.
    """
    whole = io.BytesIO()
    try:
        for piece in _DECODERS[coding.strip().lower()](body):
            grow_to(whole.tell() + len(piece))
            whole.write(piece)
            await asyncio.sleep(0)
    except (zlib.error, zstd.ZstdError, EOFError) as error:
        text = f"The body is not {coding[:40]}, or it is cut: {error}. Check the content-encoding header."
        raise ClientError(400, text, code="invalid_content_encoding") from None
    return whole.getvalue()


def is_compressed(coding: str | None) -> bool:
    """Whether a body with this ``content-encoding`` must be decompressed.

    Raises:
        ClientError: 415 for a coding that is not understood; ``accept-encoding`` names those that are.
    """
    if not coding or coding.strip().lower() == "identity":
        return False
    if coding.strip().lower() in _DECODERS:
        return True
    text = f"The content-encoding {coding[:40]!r} is not understood here: send {', '.join(NAMES)}, or none."
    raise ClientError(415, text, code="unsupported_content_encoding", headers=(("accept-encoding", ", ".join(NAMES)),))


def _inflated(body: bytes) -> Iterator[bytes]:
    """gzip and deflate. A gzip body may have several members, one after the other."""
    rest = body
    while rest:
        stream = zlib.decompressobj(_GZIP_OR_ZLIB)
        while not stream.eof:
            piece = stream.decompress(rest, STEP_BYTES)
            rest = stream.unconsumed_tail
            if not piece and not rest and not stream.eof:
                raise EOFError("it ends too early")
            yield piece
        rest = stream.unused_data


def _unzstd(body: bytes) -> Iterator[bytes]:
    """zstd, of one frame or of several."""
    rest = body
    while rest:
        stream = zstd.ZstdDecompressor(options=_WINDOW)
        while not stream.eof:
            yield stream.decompress(rest, STEP_BYTES)
            rest = b""
            if stream.needs_input and not stream.eof:
                raise EOFError("it ends too early")
        rest = stream.unused_data


_DECODERS: dict[str, Callable[[bytes], Iterator[bytes]]] = {
    "gzip": _inflated,
    "x-gzip": _inflated,
    "deflate": _inflated,
    "zstd": _unzstd,
}
NAMES = ("gzip", "deflate", "zstd")
