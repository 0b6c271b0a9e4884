"""Sockets are read together, in slices, and keep nothing else waiting for long."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop

from pdproxy.transport.coalesced_reads import COALESCE_SECONDS, READ_BYTES, SLICE_SECONDS, CoalescedReads
from tests.events.publisher import until


class Reader:
    """Keeps all that was read, and the turn of the event loop in which it was. Its clock goes on by work alone."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.log: list[tuple[str, bytes]] = []
        self.turns: list[int] = []
        self.reads = CoalescedReads(lambda: self._now)
        self._now, self._seconds, self._turn = 0.0, seconds, 0
        self._counting = asyncio.get_running_loop().call_soon(self._next_turn)

    def add(self, name: str, one: socket.socket, then: Callable[[], None] = lambda: None) -> None:
        """Read this socket, which takes so many seconds each time."""

        def on_bytes(data: bytes) -> None:
            self.log.append((name, data))
            self.turns.append(self._turn)
            self._now += self._seconds
            then()

        self.reads.add(one.fileno(), on_bytes)

    async def has_read(self, number: int) -> None:
        await until(lambda: len(self.log) >= number)

    def stop(self) -> None:
        self._counting.cancel()

    def _next_turn(self) -> None:
        self._turn += 1
        self._counting = asyncio.get_running_loop().call_soon(self._next_turn)


@contextlib.contextmanager
def reader(seconds: float = 0.0) -> Iterator[Reader]:
    made = Reader(seconds)
    try:
        yield made
    finally:
        made.stop()


@contextlib.contextmanager
def pairs(number: int) -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """Ends that are read, and those that send to them."""
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(number):
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            made.append((stack.enter_context(ours), stack.enter_context(theirs)))
        yield made


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_what_arrives_within_a_while_is_read_in_one_turn() -> None:
    with pairs(3) as sockets, reader() as read:
        began = asyncio.get_running_loop().time()
        for name, (ours, theirs) in zip("abc", sockets, strict=True):
            read.add(name, ours)
            theirs.send(name.encode())
        await read.has_read(3)
        assert sorted(read.log) == [("a", b"a"), ("b", b"b"), ("c", b"c")]
        assert len(set(read.turns)) == 1
        assert asyncio.get_running_loop().time() - began >= 0.9 * COALESCE_SECONDS  # timers may come a moment early


async def test_many_reads_let_others_in_between() -> None:
    with pairs(4) as sockets, reader(SLICE_SECONDS / 2) as read:
        for ours, theirs in sockets:
            theirs.send(b"x")
            read.add("any", ours)
        await read.has_read(4)
        first, second = read.turns[0], read.turns[2]
        assert read.turns == [first, first, second, second]
        assert second > first


async def test_more_than_one_read_takes_is_read_in_its_order_and_so_is_what_comes_later() -> None:
    with pairs(1) as ((ours, theirs),), reader() as read:
        read.add("a", ours)
        sent = b"".join(number.to_bytes(4) for number in range(READ_BYTES))
        sending = asyncio.create_task(asyncio.to_thread(theirs.sendall, sent))
        await until(lambda: sum(len(data) for _, data in read.log) == len(sent))
        await sending
        assert b"".join(data for _, data in read.log) == sent
        assert max(len(data) for _, data in read.log) <= READ_BYTES
        theirs.send(b"later")
        await until(lambda: read.log[-1] == ("a", b"later"))


async def test_the_end_of_a_connection_is_told_and_others_are_read_on() -> None:
    with pairs(2) as ((ended, theirs), (ours, others)), reader() as read:
        read.add("ended", ended, lambda: read.reads.remove(ended.fileno()))
        read.add("other", ours)
        theirs.close()
        await until(lambda: ("ended", b"") in read.log)
        others.send(b"x")
        await until(lambda: ("other", b"x") in read.log)
        assert len(read.log) == 2


async def test_a_connection_that_was_reset_has_ended() -> None:
    errors = list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        theirs, _ = server.accept()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        ours.setblocking(False)
        with reader() as read:
            read.add("reset", ours, lambda: read.reads.remove(ours.fileno()))
            theirs.close()
            await read.has_read(1)
            assert (read.log, errors) == ([("reset", b"")], [])


async def test_one_that_is_removed_by_another_one_is_not_read() -> None:
    with pairs(2) as ((first, one), (second, other)), reader() as read:
        read.add("first", first, lambda: read.reads.remove(second.fileno()))
        read.add("second", second, lambda: read.reads.remove(first.fileno()))
        one.send(b"x")
        other.send(b"x")
        await read.has_read(1)
        await asyncio.sleep(3 * COALESCE_SECONDS)
        ((name, _),) = read.log
        left = second if name == "first" else first
        assert left.recv(10) == b"x"


async def test_an_error_is_told_to_the_loop_and_keeps_nothing_else_from_being_read() -> None:
    errors = list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    with pairs(3) as sockets, reader() as read:
        names = list[str]()
        for name, (ours, theirs) in zip("abc", sockets, strict=True):
            read.add(name, ours, (lambda: names.remove("nothing")) if name == "b" else lambda: None)
            theirs.send(b"x")
        await read.has_read(3)
        await until(lambda: len(errors) == 1)
        assert sorted(name for name, _ in read.log) == ["a", "b", "c"]
        assert [type(context["exception"]) for context in errors] == [ValueError]


@pytest.mark.parametrize("waits", [False, True])
async def test_nothing_stays_open_once_there_are_no_sockets(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while nothing has come nor while what came waits to be read; and it may begin again."""
    with pairs(1) as ((ours, theirs),), reader() as read:
        before = open_files()
        read.add("a", ours)
        assert open_files() == before + 1
        timers = list[asyncio.TimerHandle]()
        if waits:
            loop = asyncio.get_running_loop()
            later = loop.call_later

            def much_later(_: float, *args: Any) -> asyncio.TimerHandle:
                timers.append(later(3600, *args))
                return timers[-1]

            with monkeypatch.context() as patch:
                patch.setattr(loop, "call_later", much_later)
                theirs.send(b"x")
                for _ in range(10):
                    await asyncio.sleep(0)
            assert len(timers) == 1
        read.reads.remove(ours.fileno())
        read.reads.remove(ours.fileno())
        assert all(timer.cancelled() for timer in timers)
        await asyncio.sleep(2 * COALESCE_SECONDS)
        assert (open_files(), read.log) == (before, [])
        read.add("again", ours)
        theirs.send(b"y")
        await read.has_read(1)
        assert read.log == [("again", b"xy" if waits else b"y")]
        read.reads.remove(ours.fileno())


ON_UVLOOP = (
    test_what_arrives_within_a_while_is_read_in_one_turn,
    test_many_reads_let_others_in_between,
    test_more_than_one_read_takes_is_read_in_its_order_and_so_is_what_comes_later,
    test_the_end_of_a_connection_is_told_and_others_are_read_on,
    test_an_error_is_told_to_the_loop_and_keeps_nothing_else_from_being_read,
)


@pytest.mark.parametrize("case", ON_UVLOOP)
def test_case_on_uvloop(case: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(case())
