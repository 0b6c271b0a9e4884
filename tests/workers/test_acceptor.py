"""Connections given to workers in turn."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from pdproxy.server.server import bind
from pdproxy.workers.acceptor import Acceptor
from pdproxy.workers.channel import Connection

SOON = 20.0


class FakeWorker:
    """Takes connections while it is ``willing``."""

    def __init__(self, *, willing: bool = True) -> None:
        self.willing = willing
        self.taken = 0

    def take(self, kind: Connection, connection: socket.socket) -> bool:
        self.taken += self.willing
        return self.willing


class Clients:
    """An open acceptor, and clients that connect to it. ``taken``: connections that any worker has."""

    def __init__(self) -> None:
        self._listener = bind("127.0.0.1", 0, "listen.port")
        self._sockets: list[socket.socket] = []
        self.taken = 0
        self.acceptor: Acceptor[FakeWorker] = Acceptor(self._listener, self._on_taken)
        self.acceptor.open()

    def _on_taken(self, _: FakeWorker) -> None:
        self.taken += 1

    def connect(self, number: int) -> None:
        self._sockets += [socket.create_connection(self._listener.getsockname()) for _ in range(number)]

    async def until_taken(self, number: int) -> None:
        async with asyncio.timeout(SOON):
            while self.taken < number:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    def close(self) -> None:
        self.acceptor.close()
        for each in self._sockets:
            each.close()


@pytest.fixture
async def clients() -> AsyncIterator[Clients]:
    made = Clients()
    yield made
    made.close()


async def test_each_gets_as_many(clients: Clients) -> None:
    workers = [FakeWorker() for _ in range(3)]
    for worker in workers:
        clients.acceptor.add(worker)
    clients.connect(30)
    await clients.until_taken(30)
    assert [worker.taken for worker in workers] == [10, 10, 10]


async def test_one_that_takes_none_is_passed_over(clients: Clients) -> None:
    workers = [FakeWorker(willing=False), FakeWorker()]
    for worker in workers:
        clients.acceptor.add(worker)
    clients.connect(4)
    await clients.until_taken(4)
    assert [worker.taken for worker in workers] == [0, 4]


async def test_connections_wait_until_one_can_be_taken(clients: Clients) -> None:
    worker = FakeWorker(willing=False)
    clients.acceptor.add(worker)
    clients.connect(1)
    await asyncio.sleep(0.05)
    assert clients.taken == 0
    worker.willing = True
    await clients.until_taken(1)
    clients.connect(2)
    await clients.until_taken(3)
    assert worker.taken == 3


async def test_without_a_worker_they_wait_for_the_next(clients: Clients) -> None:
    first, second = FakeWorker(), FakeWorker()
    clients.acceptor.add(first)
    clients.acceptor.remove(first)
    clients.connect(2)
    await asyncio.sleep(0.02)
    assert (len(clients.acceptor), clients.taken) == (0, 0)
    clients.acceptor.add(second)
    await clients.until_taken(2)
    assert (first.taken, second.taken) == (0, 2)


async def test_closed_while_one_waits(clients: Clients) -> None:
    clients.acceptor.add(FakeWorker(willing=False))
    clients.connect(1)
    await asyncio.sleep(0.01)
    clients.acceptor.close()
    await asyncio.sleep(0.05)
    assert clients.taken == 0
