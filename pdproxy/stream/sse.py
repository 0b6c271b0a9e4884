"""Server-sent events: a stream's bytes cut into events, and one event read. No I/O.

The grammar is WHATWG HTML's "server-sent events": lines end in LF, CRLF or CR, an empty line ends an event, a line
that begins with a colon is a comment.
"""

import io
import re

import msgspec

from pdproxy.errors import Fault, NodeFault

EVENT_BYTES = 16 * 1024 * 1024
"""The longest event that is buffered; log-probabilities of a long prompt fit."""
LONG_REST = 64 * 1024
_LINE = re.compile(rb"\r\n|\r|\n")


class Event(msgspec.Struct, frozen=True, gc=False):
    """One event or comment block.

    Attributes:
        raw: the bytes as they came, the empty line at their end included.
        name: the ``event`` field.
        data: the ``data`` lines joined by LF; None where there are none (a comment, a keep-alive). With null in the
            place of a long prompt's ids where it is ``shortened``: see `chunks.short_event_of`.
    """

    raw: bytes
    name: bytes = b""
    data: bytes | None = None
    shortened: bool = False


class Framer:
    """Cuts a body that arrives in pieces into events and comments, as they came."""

    __slots__ = ("_last", "_long", "_size", "rest")

    def __init__(self) -> None:
        self.rest = b""
        """The bytes after the last whole event; not empty at the end of a body means that it was cut. For a long event
        only its beginning."""
        self._long: io.BytesIO | None = None
        """A long event so far. It grows in place: to join its pieces takes milliseconds where they are megabytes."""
        self._last = b""
        """Its last piece."""
        self._size = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that ``piece`` completes; a `NodeFault` where one grows beyond `EVENT_BYTES`."""
        if len(self.rest) > LONG_REST and not _may_end(self._last or self.rest, piece):
            self._wait(piece)
            return []
        block = self._joined(piece) if self.rest else piece
        events, self.rest = _cut(block)
        self._size = len(self.rest)
        self._check_size()
        return events

    def _wait(self, piece: bytes) -> None:
        """Joined with each piece anew, a long event would take a time that grows with the square of its length."""
        if self._long is None:
            self._long = io.BytesIO()
            self._long.write(self.rest)
        self._long.write(piece)
        self._last = piece
        self._size += len(piece)
        self._check_size()

    def _joined(self, piece: bytes) -> bytes:
        long, self._long, self._last = self._long, None, b""
        if long is None:
            return self.rest + piece
        long.write(piece)
        return long.getvalue()

    def _check_size(self) -> None:
        if self._size > EVENT_BYTES:
            raise NodeFault(Fault.INVALID_BODY, "an event of the stream has no end")


def _may_end(before: bytes, piece: bytes) -> bool:
    """Whether an event may end in, or just before, this piece."""
    return b"\n" in piece or b"\r" in piece or before.endswith(b"\r")


def _cut(block: bytes) -> tuple[list[bytes], bytes]:
    """The events of a block, and what comes after the last one."""
    if len(block) <= LONG_REST and block.find(b"\r") < 0:
        *events, rest = block.split(b"\n\n")
        return [event + b"\n\n" for event in events], rest
    ends = _ends_lf(block) if block.find(b"\r") < 0 else _ends_any(block)
    events = [block[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return events, block[ends[-1] :] if ends else block


def _ends_lf(block: bytes) -> list[int]:
    """Where events end, in a long block whose lines end in LF alone, as vLLM writes them: one character is found ten
    times faster than two."""
    ends: list[int] = []
    at = block.find(b"\n")
    while at >= 0:
        is_end = block.startswith(b"\n", at + 1)
        if is_end:
            ends.append(at + 2)
        at = block.find(b"\n", at + 1 + is_end)
    return ends


def _ends_any(block: bytes) -> list[int]:
    """Where events end, whatever ends their lines. A CR at the very end waits: LF may follow it."""
    ends: list[int] = []
    line_start = 0
    for match in _LINE.finditer(block):
        if match.end() == len(block) and match.group() == b"\r":
            break
        if match.start() == line_start:
            ends.append(match.end())
        line_start = match.end()
    return ends


def _is_one_line(block: bytes) -> bool:
    """Whether this is one event of one line, ended by LF: nearly all are."""
    return block.find(b"\n") == len(block) - 2 and block[-1:] == b"\n" and block.find(b"\r") < 0


def event_of(raw: bytes) -> Event:
    """One whole event, read."""
    if _is_one_line(raw):
        if raw.startswith(b"data: "):
            return Event(raw, b"", raw[6:-2])
        if raw.startswith(b":"):
            return Event(raw)
    name, lines = b"", []
    for line in _LINE.split(raw):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            lines.append(value)
        elif field == b"event":
            name = value
    return Event(raw, name, b"\n".join(lines) if lines else None)
