"""A client of ZMQ sockets: ZMTP 3 over one TCP connection, in bounded memory (https://rfc.zeromq.org/spec/23).

    greeting (64 bytes, both sides) ─► READY command (both sides) ─► messages of one or more frames, PING and PONG

libzmq itself cannot be bounded: its ZMQ_MAXMSGSIZE limits a frame, and a message may have any number of frames. Nor
does it take part in the event loop: it has threads of its own. A client needs little of the protocol: one peer, and
the NULL mechanism, which is what libzmq uses unless told otherwise.
"""

import asyncio
import enum
import socket
from typing import Self

from pdproxy.errors import Fault, NodeFault

MOST_FRAMES = 16
"""Frames of a message; vLLM's have five at most."""
_LONGEST_COMMAND = 1024
_BUFFER = 256 * 1024
"""Bytes that wait in user space before the peer is made to wait."""

_MORE, _LONG, _COMMAND = 1, 2, 4
_GREETING_BYTES = 64
_SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"
_MECHANISM = b"NULL".ljust(20, b"\0")
_GREETING = _SIGNATURE + b"\x03\x00" + _MECHANISM + bytes(32)
_SUBSCRIBE = b"\x01"

_KEEP_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""A peer whose host is gone is noticed within a minute, though nothing is ever sent to it."""


class SocketType(enum.StrEnum):
    """Our role towards the peer."""

    SUB = "SUB"
    """The role beside a PUB socket: it sends what was published since we subscribed."""
    DEALER = "DEALER"
    """The role beside a ROUTER socket: it answers what we send."""


class ZmtpConnection:
    """One connection, made by `open`. One task may `receive`. To be closed.

    Every fault is a `NodeFault`: REFUSED before the connection stands, RESET when it ends, HEADERS_TIMEOUT for a
    handshake that lasts too long, INVALID_BODY for what is no ZMTP, and for a message that is longer than allowed.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, longest: int) -> None:
        self._reader = reader
        self._writer = writer
        self._longest = longest
        self._frames: list[bytes] = []
        """Those of the message that has begun to come."""
        self._start = b""
        """The first two bytes of a frame whose length is still to come; empty where none is."""
        self._header: tuple[int, int] | None = None
        """Flags and length of the frame whose body is still to come."""

    @classmethod
    async def open(cls, host: str, port: int, socket_type: SocketType, seconds: float, longest: int) -> Self:
        """Connect, and exchange greetings within ``seconds``; ``longest``: bytes of a message, all frames together.

        Raises:
            NodeFault: as the class says.
        """
        try:
            async with asyncio.timeout(seconds):
                connection = cls(*await asyncio.open_connection(host, port, limit=_BUFFER), longest)
                try:
                    await connection._shake_hands(socket_type)
                except BaseException:
                    connection.close()
                    raise
                return connection
        except TimeoutError as error:
            raise NodeFault(Fault.HEADERS_TIMEOUT, f"no ZMTP handshake with port {port} in {seconds:g} s") from error
        except OSError as error:
            raise NodeFault(Fault.REFUSED, f"no connection to port {port}: {error.strerror or error}") from error

    def subscribe(self, topic: bytes) -> None:
        """Ask a PUB socket for all messages whose first frame begins with ``topic``."""
        self.send(_SUBSCRIBE + topic)

    def send(self, *frames: bytes) -> None:
        """Send a message, which must be small: it does not wait until the peer takes it."""
        for at, frame in enumerate(frames):
            self._writer.write(_header(_MORE if at < len(frames) - 1 else 0, len(frame)) + frame)

    async def receive(self) -> tuple[bytes, ...]:
        """The frames of the next message. Where this is cancelled, the next call continues: no byte is lost.

        Raises:
            NodeFault: RESET, INVALID_BODY.
        """
        while True:
            if self._header is None:
                self._header = await self._read_header()
            flags, length = self._header
            body = await self._read(length)
            self._header = None
            if flags & _COMMAND:
                self._on_command(body)
                continue
            self._frames.append(body)
            if not flags & _MORE:
                message, self._frames = tuple(self._frames), []
                return message

    def close(self) -> None:
        """End the connection at once. Idempotent."""
        self._writer.transport.abort()

    async def _shake_hands(self, socket_type: SocketType) -> None:
        for option in _KEEP_ALIVE:
            self._writer.get_extra_info("socket").setsockopt(*option)
        self._writer.write(_GREETING)
        greeting = await self._read(_GREETING_BYTES)
        if greeting[:1] != b"\xff" or greeting[9] != 0x7F or greeting[10] < 3 or greeting[12:32] != _MECHANISM:
            raise NodeFault(Fault.INVALID_BODY, "the peer does not speak ZMTP 3 without security")
        self._writer.write(_ready(socket_type))
        flags, length = await self._read_header()
        if not flags & _COMMAND or not (await self._read(length)).startswith(b"\x05READY"):
            raise NodeFault(Fault.INVALID_BODY, "the peer sends something else than READY")

    async def _read_header(self) -> tuple[int, int]:
        """Flags and length of the next frame, which is not too long."""
        self._start = self._start or await self._read(2)
        flags, length = self._start
        if flags & _LONG:
            length = int.from_bytes(bytes((length,)) + await self._read(7))
        self._start = b""
        if flags & ~(_MORE | _LONG | _COMMAND) or (flags & _COMMAND and length > _LONGEST_COMMAND):
            raise NodeFault(Fault.INVALID_BODY, "the peer sends something else than ZMTP")
        if not flags & _COMMAND and (
            len(self._frames) == MOST_FRAMES or length + sum(map(len, self._frames)) > self._longest
        ):
            raise NodeFault(Fault.INVALID_BODY, f"a message is longer than {self._longest} bytes")
        return flags, length

    async def _read(self, size: int) -> bytes:
        try:
            return await self._reader.readexactly(size)
        except (OSError, EOFError) as error:
            raise NodeFault(Fault.RESET, "the connection ended") from error

    def _on_command(self, command: bytes) -> None:
        """A PING carries two bytes of time-to-live and up to 16 that its PONG repeats; anything else is passed over."""
        if command.startswith(b"\x04PING"):
            pong = b"\x04PONG" + command[7:23]
            self._writer.write(_header(_COMMAND, len(pong)) + pong)


def _header(flags: int, size: int) -> bytes:
    return bytes((flags, size)) if size < 256 else bytes((flags | _LONG,)) + size.to_bytes(8)


def _ready(socket_type: SocketType) -> bytes:
    value = socket_type.encode()
    body = b"\x05READY" + b"\x0bSocket-Type" + len(value).to_bytes(4) + value
    return _header(_COMMAND, len(body)) + body
