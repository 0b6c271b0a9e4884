"""A client of ZMQ sockets: ZMTP 3 over one TCP connection, in bounded memory (https://rfc.zeromq.org/spec/23).

    greeting (64 bytes, both sides) ─► READY command (both sides) ─► messages of one or more frames, PING and PONG

libzmq itself cannot be bounded: its ZMQ_MAXMSGSIZE limits a frame, and a message may have any number of frames. Nor
does it take part in the event loop: it has threads of its own. A client needs little of the protocol: one peer, and
the NULL mechanism, which is what libzmq uses unless told otherwise.
"""

import asyncio
import contextlib
import enum
import socket
from collections.abc import Callable
from typing import Self, TypeAlias, cast

from pdproxy.errors import Fault, NodeFault
from pdproxy.transport.coalesced_reads import CoalescedReads

MOST_FRAMES = 16
"""Frames of a message; vLLM's have five at most."""
_LONGEST_COMMAND = 1024
_SHORT_HEADER, _LONG_HEADER = 2, 9
_MOST_BUFFERED = 256 * 1024
"""Bytes that wait in user space before the peer is made to wait, unless one frame has more."""

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


OnMessage: TypeAlias = Callable[[tuple[bytes, ...]], bool]
"""Called with the frames of a message; returns whether it wants the next one, too."""


class ZmtpConnection(asyncio.Protocol):
    """One connection, made by `open`. One task at a time may `receive`, or `deliver` messages. To be closed.

    Every fault is a `NodeFault`: REFUSED before the connection stands, RESET when it ends, HEADERS_TIMEOUT for a
    handshake that lasts too long, INVALID_BODY for what is no ZMTP, and for a message that is longer than allowed.

    Args:
        longest: bytes of a message, all frames together.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._transport: asyncio.Transport
        self._buffer, self._offset = b"", 0
        """Bytes in one piece, and where the unread ones among them begin."""
        self._chunks: list[bytes] = []
        """Those that came later."""
        self._unread = self._wanted = 0
        """Bytes that have come, and how many of them there must be before there is anything to read."""
        self._frames: list[bytes] = []
        """Those of the message that has begun to come."""
        self._length = 0
        """Bytes of these."""
        self._on_message: OnMessage | None = None
        self._reads: CoalescedReads | None = None
        """Reads the socket in place of the transport, while messages are delivered."""
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False

    @classmethod
    async def open(cls, host: str, port: int, socket_type: SocketType, seconds: float, longest: int) -> Self:
        """Connect, and exchange greetings within ``seconds``; ``longest``: bytes of a message, all frames together.

        Raises:
            NodeFault: as the class says.
        """
        try:
            async with asyncio.timeout(seconds):
                _, connection = await asyncio.get_running_loop().create_connection(lambda: cls(longest), host, port)
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
            self._transport.write(_header(_MORE if at < len(frames) - 1 else 0, len(frame)) + frame)

    async def receive(self) -> tuple[bytes, ...]:
        """The frames of the next message. Where this is cancelled, the next call continues: no byte is lost.

        Raises:
            NodeFault: RESET, INVALID_BODY.
        """
        while (message := self._next_message()) is None:
            await self._more()
        return message

    async def deliver(self, on_message: OnMessage, reads: CoalescedReads) -> None:
        """Call ``on_message`` with each message as it is parsed, until it returns False. A message wakes no task.

        ``reads`` reads the socket meanwhile, with those of other connections. Where this call is cancelled, or
        ``on_message`` ends it, the next call continues: no byte is lost.

        Raises:
            NodeFault: RESET, INVALID_BODY.
        """
        self._on_message = on_message
        try:
            self._deliver_pending()
            while self._on_message is not None:
                self._join_reads(reads)
                await self._arrival()
                self._deliver_pending()
        finally:
            self._on_message = None
            self._leave_reads()

    def close(self) -> None:
        """End the connection at once. Idempotent."""
        self._transport.abort()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name

    def data_received(self, data: bytes) -> None:
        self._append(data)
        if self._unread >= self._wanted:
            self._wake()
        if self._unread > max(_MOST_BUFFERED, self._wanted):
            self._transport.pause_reading()

    def eof_received(self) -> None:
        self.connection_lost(None)

    def connection_lost(self, _: Exception | None) -> None:
        self._leave_reads()  # the socket is closed when this returns
        self._ended = True
        self._wake()

    # -- reading

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _more(self) -> None:
        """Wait until more bytes have come: as many as are wanted, or the last ones. Raises NodeFault: RESET."""
        self._check_open()
        self._transport.resume_reading()
        await self._arrival()

    async def _arrival(self) -> None:
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        await waiter

    def _check_open(self) -> None:
        if self._ended or self._transport.is_closing():
            raise NodeFault(Fault.RESET, "the connection ended")

    def _append(self, data: bytes) -> None:
        self._chunks.append(data)
        self._unread += len(data)

    def _join_reads(self, reads: CoalescedReads) -> None:
        """Have the socket read with others, not by the transport. Raises NodeFault: RESET."""
        self._check_open()
        if self._reads is None:
            self._transport.pause_reading()
            reads.add(self._descriptor, self._on_bytes)
            self._reads = reads

    def _leave_reads(self) -> None:
        if self._reads is not None:
            self._reads.remove(self._descriptor)
            self._reads = None

    @property
    def _descriptor(self) -> int:
        return cast(int, self._transport.get_extra_info("socket").fileno())

    async def _shake_hands(self, socket_type: SocketType) -> None:
        for option in _KEEP_ALIVE:
            self._transport.get_extra_info("socket").setsockopt(*option)
        self._transport.write(_GREETING)
        while not self._has(_GREETING_BYTES):
            await self._more()
        greeting = self._consume(_GREETING_BYTES)
        if greeting[:1] != b"\xff" or greeting[9] != 0x7F or greeting[10] < 3 or greeting[12:32] != _MECHANISM:
            raise NodeFault(Fault.INVALID_BODY, "the peer does not speak ZMTP 3 without security")
        self._transport.write(_ready(socket_type))
        while (frame := self._next_frame()) is None:
            await self._more()
        flags, body = frame
        if not flags & _COMMAND or not body.startswith(b"\x05READY"):
            raise NodeFault(Fault.INVALID_BODY, "the peer sends something else than READY")

    def _deliver_pending(self) -> None:
        """Deliver every message that has arrived whole. Raises NodeFault: INVALID_BODY."""
        while self._on_message is not None and (message := self._next_message()) is not None:
            if not self._on_message(message):
                self._on_message = None

    def _on_bytes(self, data: bytes) -> None:
        """Deliver what has come whole. The task in `deliver` is woken only for a fault, and at the end."""
        self._append(data)
        self._ended, goes_on = not data, False
        if self._unread < self._wanted and not self._ended:
            return
        try:
            with contextlib.suppress(NodeFault):  # the task finds it again
                self._deliver_pending()
                goes_on = self._on_message is not None and not self._ended
        finally:
            if not goes_on:
                self._leave_reads()
                self._wake()

    def _next_message(self) -> tuple[bytes, ...] | None:
        """None where it has not come whole."""
        while (frame := self._next_frame()) is not None:
            flags, body = frame
            if flags & _COMMAND:
                self._on_command(body)
                continue
            self._frames.append(body)
            self._length += len(body)
            if not flags & _MORE:
                message, self._frames, self._length = tuple(self._frames), [], 0
                return message
        return None

    def _next_frame(self) -> tuple[int, bytes] | None:
        """Flags and body; None where it has not come whole."""
        if not self._has(_SHORT_HEADER):
            return None
        size, flags, length = _SHORT_HEADER, self._buffer[self._offset], self._buffer[self._offset + 1]
        if flags & _LONG:
            size = _LONG_HEADER
            if not self._has(size):
                return None
            length = int.from_bytes(self._buffer[self._offset + 1 : self._offset + size])
        self._check(flags, length)
        if not self._has(size + length):
            return None
        self._consume(size)
        return flags, self._consume(length)

    def _has(self, size: int) -> bool:
        """Whether so many unread bytes have arrived. If so, they are in one buffer; if not, `_wanted` is set."""
        if self._unread < size:
            self._wanted = size
            if not self._unread:
                self._buffer, self._offset = b"", 0
            return False
        if len(self._buffer) - self._offset < size:
            self._buffer, self._offset = b"".join((self._buffer[self._offset :], *self._chunks)), 0
            self._chunks.clear()
        return True

    def _consume(self, size: int) -> bytes:
        """The next bytes; they are read then."""
        start = self._offset
        self._offset += size
        self._unread -= size
        return self._buffer[start : self._offset]

    def _check(self, flags: int, length: int) -> None:
        """Raises NodeFault, INVALID_BODY, for a frame that is none, or too long."""
        if flags & ~(_MORE | _LONG | _COMMAND) or (flags & _COMMAND and length > _LONGEST_COMMAND):
            raise NodeFault(Fault.INVALID_BODY, "the peer sends something else than ZMTP")
        if not flags & _COMMAND and (len(self._frames) == MOST_FRAMES or length + self._length > self._longest):
            raise NodeFault(Fault.INVALID_BODY, f"a message is longer than {self._longest} bytes")

    def _on_command(self, command: bytes) -> None:
        """A PING carries two bytes of time-to-live and up to 16 that its PONG repeats; anything else is passed over."""
        if command.startswith(b"\x04PING"):
            pong = b"\x04PONG" + command[7:23]
            self._transport.write(_header(_COMMAND, len(pong)) + pong)


def _header(flags: int, size: int) -> bytes:
    return bytes((flags, size)) if size < 256 else bytes((flags | _LONG,)) + size.to_bytes(8)


def _ready(socket_type: SocketType) -> bytes:
    value = socket_type.encode()
    body = b"\x05READY" + b"\x0bSocket-Type" + len(value).to_bytes(4) + value
    return _header(_COMMAND, len(body)) + body
