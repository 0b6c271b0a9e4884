"""ZMTP 3, the bytes that ZMQ sends over TCP: one end of one connection, in bounded memory. Pure: no sockets, no clock.

    greeting (64 bytes, both sides) ─► READY command (both sides) ─► messages of one or more frames, PING and PONG

Only the NULL mechanism is spoken, which is what libzmq uses unless told otherwise (https://rfc.zeromq.org/spec/23 and
/37). libzmq itself cannot be bounded: ZMQ_MAXMSGSIZE limits a frame, and a message may have any number of frames.
Here a message has a limit as a whole, and it is enforced by what a frame's header announces, before its bytes come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

MOST_FRAMES = 8
"""Frames of a message. Ours have three at most."""
LONGEST_COMMAND = 1024
LONGEST_HEADER = 9

_MORE, _LONG, _COMMAND = 1, 2, 4
_GREETING_BYTES = 64
_SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"
_MECHANISM = b"NULL".ljust(20, b"\0")
_GREETING = _SIGNATURE + b"\x03\x00" + _MECHANISM + bytes(32)


class ZmtpFault(StrEnum):
    """Why a peer's bytes are not read any further."""

    NOT_ZMTP = "not_zmtp"
    TOO_LONG = "too_long"


class Zmtp:
    """One end of a connection.

    `receive` takes bytes in pieces of any size, `next_message` gives whole messages. What must be sent is in `pieces`,
    in order; the sender removes it. `peer`: the properties in the peer's READY, by name in lower case; None before it.
    Once `fault` is set nothing more is read or kept.

    Args: `socket_type`, ours, as `b"ROUTER"`; `longest`, of a message, bytes of all its frames with their headers;
    `properties`, for our READY.
    """

    def __init__(self, socket_type: bytes, longest: int, properties: Mapping[bytes, bytes] | None = None) -> None:
        self._longest = longest
        self._ready = _ready({b"socket-type": socket_type, b"identity": b"", **(properties or {})})
        self._buffer = bytearray()
        self._greeted = False
        self._frames: list[bytes] = []
        self._frame_bytes = 0
        self.pieces: list[bytes] = [_GREETING]
        self.peer: Mapping[bytes, bytes] | None = None
        self.fault: ZmtpFault | None = None

    @property
    def buffered(self) -> int:
        """Bytes of an unfinished message that are kept."""
        return len(self._buffer) + self._frame_bytes

    def receive(self, data: bytes | memoryview) -> None:
        """Bytes from the peer. Follow with `next_message` until that returns None, or memory grows."""
        if self.fault is None:
            self._buffer += data

    def next_message(self) -> tuple[bytes, ...] | None:
        """The frames of the next whole message; None when more bytes are needed, or after a fault."""
        while self.fault is None and (self._greeted or self._read_greeting()):
            frame = self._read_frame()
            if frame is None:
                return None
            flags, body = frame
            if flags & _COMMAND:
                self._on_command(body)
            elif self.peer is None:
                self._fail(ZmtpFault.NOT_ZMTP)
            else:
                self._frames.append(body)
                self._frame_bytes += len(body) + LONGEST_HEADER
                if not flags & _MORE:
                    message, self._frames, self._frame_bytes = tuple(self._frames), [], 0
                    return message
        return None

    def send(self, frames: Sequence[bytes]) -> None:
        """Append a message to `pieces`. The frames are not copied."""
        for at, frame in enumerate(frames):
            self.pieces += [_header(_MORE if at < len(frames) - 1 else 0, len(frame)), frame]

    def _read_greeting(self) -> bool:
        start = bytes(self._buffer[:_GREETING_BYTES])
        if not _may_be_greeting(start):
            self._fail(ZmtpFault.NOT_ZMTP)
            return False
        if len(start) < _GREETING_BYTES:
            return False
        del self._buffer[:_GREETING_BYTES]
        self._greeted = True
        self.pieces.append(self._ready)
        return True

    def _read_frame(self) -> tuple[int, bytes] | None:
        """Flags and body of the next frame that was received in full."""
        buffer = self._buffer
        flags = buffer[0] if buffer else 0
        header = LONGEST_HEADER if flags & _LONG else 2
        if flags & ~(_MORE | _LONG | _COMMAND) or (flags & _COMMAND and flags & _MORE):
            self._fail(ZmtpFault.NOT_ZMTP)
            return None
        if len(buffer) < header:
            return None
        size = int.from_bytes(buffer[1:header], "big")
        if not self._fits(flags, size):
            self._fail(ZmtpFault.TOO_LONG)
            return None
        if len(buffer) < header + size:
            return None
        body = bytes(memoryview(buffer)[header : header + size])
        del buffer[: header + size]
        return flags, body

    def _fits(self, flags: int, size: int) -> bool:
        if flags & _COMMAND:
            return size <= LONGEST_COMMAND
        return len(self._frames) < MOST_FRAMES and self._frame_bytes + size + LONGEST_HEADER <= self._longest

    def _on_command(self, command: bytes) -> None:
        name, rest = _split(command)
        if name == b"READY" and self.peer is None:
            self.peer = _properties(rest)
            if self.peer is None:
                self._fail(ZmtpFault.NOT_ZMTP)
        elif name == b"PING" and self.peer is not None and len(rest) >= 2:
            body = b"\x04PONG" + rest[2:18]
            self.pieces += [_header(_COMMAND, len(body)), body]
        elif name != b"PONG" or self.peer is None:
            self._fail(ZmtpFault.NOT_ZMTP)

    def _fail(self, fault: ZmtpFault) -> None:
        self.fault = fault
        self._buffer.clear()
        self._frames, self._frame_bytes = [], 0


def _may_be_greeting(start: bytes) -> bool:
    """Whether `start`, up to 64 bytes, is the beginning of a greeting of version 3 or later with NULL security."""
    return (
        start[:1] in (b"", b"\xff")
        and start[9:10] in (b"", b"\x7f")
        and (len(start) <= len(_SIGNATURE) or start[10] >= 3)
        and _MECHANISM.startswith(start[12:32])
    )


def _header(flags: int, size: int) -> bytes:
    if size < 256:
        return bytes((flags, size))
    return bytes((flags | _LONG,)) + size.to_bytes(8, "big")


def _ready(properties: Mapping[bytes, bytes]) -> bytes:
    encoded = b"".join(
        bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value for name, value in properties.items()
    )
    body = b"\x05READY" + encoded
    return _header(_COMMAND, len(body)) + body


def _split(text: bytes) -> tuple[bytes, bytes]:
    """A name that is preceded by its length in one byte, and what follows it."""
    length = text[0] if text else 0
    return text[1 : 1 + length], text[1 + length :]


def _properties(text: bytes) -> dict[bytes, bytes] | None:
    """The properties of a READY command by name; None where they do not fill it exactly."""
    found = {}
    while text:
        name, rest = _split(text)
        size = int.from_bytes(rest[:4], "big")
        if not name or len(rest) < 4 + size:
            return None
        found[name.lower()] = rest[4 : 4 + size]
        text = rest[4 + size :]
    return found
