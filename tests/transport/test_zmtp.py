"""The ZMQ client against sockets of libzmq, and against peers that are none."""

import asyncio
import contextlib
import functools
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
import uvloop
import zmq

from pdproxy.errors import Fault, NodeFault
from pdproxy.transport import coalesced_reads
from pdproxy.transport.coalesced_reads import CoalescedReads, OnBytes
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
    """A server that sends ``begun``, and ``rest`` once the event is set, and ends when its client does."""
    going, over = asyncio.Event(), asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING + READY + begun)
        await going.wait()
        writer.write(rest)
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()
        over.set()

    async with await asyncio.start_server(handle, HOST, 0) as server:
        yield server.sockets[0].getsockname()[1], going
        going.set()
        await asyncio.wait_for(over.wait(), 10)


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


class CheckedReads(CoalescedReads):
    """Fails where a socket was closed before it is removed: its descriptor may be another one's by then.

    Attributes:
        ends: how often the end of a connection was read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ends = 0

    def add(self, descriptor: int, on_bytes: OnBytes) -> None:
        def counted(data: bytes) -> None:
            self.ends += not data
            on_bytes(data)

        super().add(descriptor, counted)

    def remove(self, descriptor: int) -> None:
        os.fstat(descriptor)
        super().remove(descriptor)


class Receiver:
    """Keeps the messages that a connection delivers, until there are ``enough``."""

    def __init__(self, enough: int = 1000) -> None:
        self.messages: list[tuple[bytes, ...]] = []
        self.reads = CheckedReads()
        self._enough = enough

    def on_message(self, message: tuple[bytes, ...]) -> bool:
        self.messages.append(message)
        return len(self.messages) < self._enough

    def __call__(self, connection: ZmtpConnection) -> Coroutine[Any, Any, None]:
        """Deliver its messages."""
        return connection.deliver(self.on_message, self.reads)


async def test_messages_are_delivered_however_they_are_cut_until_no_more_are_wanted() -> None:
    sent = GREETING + READY + b"".join(frame(bytes((number,)) * 300) for number in range(4))
    async with peer(*(sent[at : at + 1] for at in range(len(sent)))) as port:
        connection, receiver = await opened(port), Receiver(enough=3)
        async with asyncio.timeout(5):
            await receiver(connection)
        assert receiver.messages == [(bytes((number,)) * 300,) for number in range(3)]
        assert await connection.receive() == (b"\x03" * 300,)
        connection.close()


async def test_connections_that_are_read_together_each_deliver_their_messages() -> None:
    sent = frame(b"one")
    async with halting_peer(b"", sent) as (port, going), halting_peer(b"", sent) as (other_port, other_going):
        receiver, connections = Receiver(enough=2), [await opened(each) for each in (port, other_port)]
        delivering = [asyncio.create_task(receiver(each)) for each in connections]
        await asyncio.sleep(0)
        going.set()
        other_going.set()
        await asyncio.wait(delivering, timeout=5, return_when=asyncio.FIRST_COMPLETED)
        assert receiver.messages == [(b"one",), (b"one",)]
        for connection in connections:
            connection.close()
        results = await asyncio.gather(*delivering, return_exceptions=True)
        faults = [result.fault for result in results if isinstance(result, NodeFault)]
        assert (faults, results.count(None)) == ([Fault.RESET], 1)


async def test_bytes_wait_for_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coalesced_reads, "COALESCE_SECONDS", 3600.0)
    async with halting_peer(b"", frame(b"one")) as (port, going):
        connection, receiver = await opened(port), Receiver()
        delivering = asyncio.create_task(receiver(connection))
        await asyncio.sleep(0)
        going.set()
        await asyncio.sleep(0.1)
        delivering.cancel()
        await asyncio.wait([delivering])
        assert receiver.messages == []
        assert await connection.receive() == (b"one",)
        connection.close()


async def test_a_connection_that_was_closed_is_read_no_more() -> None:
    async with halting_peer(frame(b"one"), frame(b"two")) as (port, going):
        connection, receiver = await opened(port), Receiver()
        delivering = asyncio.create_task(receiver(connection))
        await until(lambda: receiver.messages == [(b"one",)])
        going.set()
        connection.close()
        with pytest.raises(NodeFault) as fault:
            await delivering
        assert (fault.value.fault, receiver.messages) == (Fault.RESET, [(b"one",)])
        with pytest.raises(NodeFault):
            await receiver(connection)


async def test_a_connection_that_ends_is_read_once_more() -> None:
    async def handle(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING + READY + frame(b"one"))
        await until(lambda: bool(receiver.messages))
        writer.close()

    receiver = Receiver()
    async with await asyncio.start_server(handle, HOST, 0) as server:
        connection = await opened(server.sockets[0].getsockname()[1])
        with pytest.raises(NodeFault) as fault:
            await asyncio.wait_for(receiver(connection), 10)
        assert (fault.value.fault, receiver.messages, receiver.reads.ends) == (Fault.RESET, [(b"one",)], 1)
        connection.close()


@pytest.mark.parametrize("before", [0, 1000, 200_000, 262_000, 300_000])
async def test_a_long_message_is_delivered_whole(before: int) -> None:
    """Longer than one read, behind a shorter one."""
    sent = frame(b"x" * before) + frame(b"y" * 3_000_000) + frame(b"z")
    async with halting_peer(b"", sent) as (port, going):
        connection, receiver = await opened(port, longest=1 << 22), Receiver(enough=3)
        delivering = asyncio.create_task(receiver(connection))
        await asyncio.sleep(0)
        going.set()
        await asyncio.wait_for(delivering, 10)
        assert receiver.messages == [(b"x" * before,), (b"y" * 3_000_000,), (b"z",)]
        connection.close()


@pytest.mark.parametrize("delivery", ["none", "over", "cancelled"])
async def test_a_peer_that_is_not_read_is_made_to_wait(delivery: str) -> None:
    """Also one whose messages were delivered before."""
    sent, writers = 64 * 1024 * 1024, list[asyncio.StreamWriter]()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        writer.write(GREETING + READY + frame(b"x" * (1 << 20)) * (sent >> 20))
        with contextlib.suppress(OSError):
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(handle, HOST, 0) as server:
        connection = await opened(server.sockets[0].getsockname()[1], longest=1 << 21)
        receiver = Receiver(enough=1 if delivery == "over" else 1000)
        if delivery != "none":
            delivering = asyncio.create_task(receiver(connection))
            await until(lambda: len(receiver.messages) >= 1)
            if delivery == "cancelled":
                delivering.cancel()
            await asyncio.wait([delivering])
        await asyncio.sleep(0.5)
        assert writers[0].transport.get_write_buffer_size() > sent / 4
        for _ in range((sent >> 20) - len(receiver.messages)):
            async with asyncio.timeout(10):
                assert len((await connection.receive())[0]) == 1 << 20
        connection.close()


@pytest.mark.parametrize("at", range(0, len(MESSAGE), 7))
async def test_a_delivery_that_is_cancelled_loses_no_byte(at: int) -> None:
    async with halting_peer(MESSAGE[:at], MESSAGE[at:]) as (port, going):
        connection, receiver = await opened(port), Receiver(enough=1)
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await receiver(connection)
        going.set()
        async with asyncio.timeout(5):
            await receiver(connection)
        assert receiver.messages == [(b"one", b"x" * 300)]
        connection.close()


async def test_a_fault_of_the_peer_ends_the_delivery() -> None:
    async with halting_peer(frame(b"one"), frame(b"two") + b"\xf0\x00") as (port, going):
        connection, receiver = await opened(port), Receiver()
        delivering = asyncio.create_task(receiver(connection))
        await until(lambda: receiver.messages == [(b"one",)])
        going.set()
        with pytest.raises(NodeFault) as fault:
            await asyncio.wait_for(delivering, 5)
        assert (fault.value.fault, receiver.messages) == (Fault.INVALID_BODY, [(b"one",), (b"two",)])
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


ON_UVLOOP = (
    test_messages_come_whole_however_they_are_cut,
    test_messages_are_delivered_however_they_are_cut_until_no_more_are_wanted,
    test_connections_that_are_read_together_each_deliver_their_messages,
    test_a_connection_that_was_closed_is_read_no_more,
    functools.partial(test_a_long_message_is_delivered_whole, 262_000),
    functools.partial(test_a_peer_that_is_not_read_is_made_to_wait, "none"),
    functools.partial(test_a_peer_that_is_not_read_is_made_to_wait, "cancelled"),
    test_a_fault_of_the_peer_ends_the_delivery,
    test_a_ping_is_answered,
    test_a_message_without_an_end_is_bounded,
    test_a_peer_that_says_nothing_is_left_in_time,
    test_nobody_there_and_somebody_who_leaves,
)


@pytest.mark.parametrize("case", ON_UVLOOP)
def test_case_on_uvloop(case: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """The proxy runs on it. Its transports differ from asyncio's in the details."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(case())
