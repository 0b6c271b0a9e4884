"""The ZMQ client against sockets of libzmq, and against peers that are none."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
import zmq

from pdproxy.errors import Fault, NodeFault
from pdproxy.transport.zmtp import MOST_FRAMES, SocketType, ZmtpConnection
from tests.events.publisher import until

HOST = "127.0.0.1"
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x06\x05READY"
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


@contextlib.asynccontextmanager
async def peer(*pieces: bytes, read: list[bytes] | None = None) -> AsyncIterator[int]:
    """A server that sends these pieces to whoever connects, and keeps what it is sent."""
    over = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
        with contextlib.suppress(OSError):
            await writer.drain()
            while data := await reader.read(65536):
                (read if read is not None else []).append(data)
        writer.close()
        over.set()

    server = await asyncio.start_server(handle, HOST, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        async with asyncio.timeout(10):
            await over.wait()


async def opened(port: int, longest: int = 1000, seconds: float = 5.0) -> ZmtpConnection:
    return await ZmtpConnection.open(HOST, port, SocketType.SUB, seconds, longest)


async def first_message(port: int) -> tuple[bytes, ...]:
    connection = await opened(port)
    try:
        return await connection.receive()
    finally:
        connection.close()


def frame(body: bytes, flags: int = 0) -> bytes:
    size = bytes((len(body),)) if len(body) < 256 else len(body).to_bytes(8)
    return bytes((flags | (2 if len(body) > 255 else 0),)) + size + body


async def test_a_router_of_libzmq_is_asked_and_answers() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port(f"tcp://{HOST}")
    connection = await ZmtpConnection.open(HOST, port, SocketType.DEALER, 5.0, 1 << 20)
    try:
        connection.send(b"", b"question", b"q" * 300)
        who, *frames = await asyncio.to_thread(router.recv_multipart)
        assert frames == [b"", b"question", b"q" * 300]
        router.send_multipart((who, b"", b"a" * 700_000))
        router.send_multipart((who, b"last"))
        assert await connection.receive() == (b"", b"a" * 700_000)
        assert await connection.receive() == (b"last",)
    finally:
        connection.close()
        router.close(linger=0)
        context.term()


async def test_messages_come_whole_however_they_are_cut() -> None:
    sent = GREETING + READY + frame(b"one", 1) + frame(b"x" * 400) + frame(b"")
    async with peer(*(sent[at : at + 1] for at in range(len(sent)))) as port:
        connection = await opened(port)
        assert await connection.receive() == (b"one", b"x" * 400)
        assert await connection.receive() == (b"",)
        connection.close()


@contextlib.asynccontextmanager
async def halting_peer(begun: bytes, rest: bytes) -> AsyncIterator[tuple[int, asyncio.Event]]:
    """A server that sends ``begun``, and ``rest`` once the event is set."""
    going = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING + READY + begun)
        await going.wait()
        writer.write(rest)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(handle, HOST, 0) as server:
        yield server.sockets[0].getsockname()[1], going
        going.set()


MESSAGE = frame(b"one", 1) + frame(b"\x04PING\x00\x10context", 4) + frame(b"x" * 300)


@pytest.mark.parametrize("at", [*range(34), 200])
async def test_a_wait_that_is_given_up_loses_no_byte(at: int) -> None:
    """However much of a message has come by then."""
    async with halting_peer(MESSAGE[:at], MESSAGE[at:]) as (port, going):
        connection = await opened(port)
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await connection.receive()
        going.set()
        async with asyncio.timeout(5):
            assert await connection.receive() == (b"one", b"x" * 300)
        connection.close()


async def test_a_ping_is_answered() -> None:
    read: list[bytes] = []
    async with peer(GREETING, READY, frame(b"\x04PING\x00\x10context", 4), frame(b"m"), read=read) as port:
        connection = await opened(port)
        assert await connection.receive() == (b"m",)
        await until(lambda: b"\x04PONGcontext" in b"".join(read))
        connection.close()


@pytest.mark.parametrize("flags", [0, 1])
async def test_a_message_is_bounded_as_a_whole_before_its_bytes_come(flags: int) -> None:
    async with peer(GREETING, READY, frame(b"x" * 600, 1), bytes((flags | 2,)) + (1 << 40).to_bytes(8)) as port:
        connection = await opened(port)
        with pytest.raises(NodeFault, match="longer than 1000 bytes") as fault:
            await connection.receive()
        assert fault.value.fault is Fault.INVALID_BODY
        connection.close()


async def test_a_message_without_an_end_is_bounded() -> None:
    async with peer(GREETING, READY, frame(b"", 1) * (MOST_FRAMES + 1)) as port:
        connection = await opened(port)
        with pytest.raises(NodeFault):
            await connection.receive()
        connection.close()


@pytest.mark.parametrize(
    "pieces",
    [
        (b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n".ljust(64),),
        (GREETING.replace(b"NULL\0", b"CURVE"),),
        (GREETING[:10] + b"\x01" + GREETING[11:],),
        (GREETING, frame(b"a message before READY")),
        (GREETING, frame(b"\x05ERROR", 4)),
        (GREETING, frame(b"\x05READY" + bytes(2000), 4)),
        (GREETING, READY, b"\xf0\x00"),
    ],
)
async def test_a_peer_that_speaks_something_else_is_left(pieces: tuple[bytes, ...]) -> None:
    async with peer(*pieces) as port:
        with pytest.raises(NodeFault) as fault:
            await first_message(port)
        assert fault.value.fault is Fault.INVALID_BODY


async def test_a_peer_that_says_nothing_is_left_in_time() -> None:
    async with peer() as port:
        with pytest.raises(NodeFault) as fault:
            await opened(port, seconds=0.05)
        assert fault.value.fault is Fault.HEADERS_TIMEOUT


async def test_nobody_there_and_somebody_who_leaves() -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), HOST, 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(NodeFault) as left:
        await opened(port)
    assert left.value.fault is Fault.RESET
    server.close()
    await server.wait_closed()
    with pytest.raises(NodeFault) as refused:
        await opened(port)
    assert refused.value.fault is Fault.REFUSED
