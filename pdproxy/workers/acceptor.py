"""Accepts clients' connections, and gives them to workers in turn."""

import asyncio
import socket
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from pdproxy.observe.labels import Refusal
from pdproxy.observe.refused_connections import OnRefused, uncounted
from pdproxy.workers.channel import MOST_AT_ONCE, Connection

BACKLOG = 2048
"""Connections that wait to be accepted, as uvicorn has it."""
PAUSE_SECONDS = 0.02
"""Before a connection is offered again that no worker took, or another one accepted after an error."""


class Taker(Protocol):
    """A worker that may take a connection."""

    def take(self, kind: Connection, connection: socket.socket) -> bool:
        """Whether it took it."""


Worker = TypeVar("Worker", bound=Taker)


class Acceptor(Generic[Worker]):
    """Of one bound socket, from `open` to `close`. Without workers, and while none takes any, connections wait.

    ``on_taken``: called with the worker that took a connection. ``on_refused``: told of those that cannot be accepted.
    """

    def __init__(
        self, listener: socket.socket, on_taken: Callable[[Worker], None], on_refused: OnRefused = uncounted
    ) -> None:
        self._listener = listener
        self._on_taken, self._on_refused = on_taken, on_refused
        self._loop = asyncio.get_running_loop()
        self._workers: list[Worker] = []
        """The next one first."""
        self._untaken: socket.socket | None = None
        self._open = False

    def __len__(self) -> int:
        """Workers that get connections."""
        return len(self._workers)

    def open(self) -> None:
        """Listen."""
        self._listener.setblocking(False)
        self._listener.listen(BACKLOG)
        self._open = True
        self._read_on()

    def close(self) -> None:
        """Accept no more. Idempotent."""
        if self._open:
            self._loop.remove_reader(self._listener)
        self._open = False
        self._listener.close()
        if self._untaken is not None:
            self._untaken.close()
            self._untaken = None

    def add(self, worker: Worker) -> None:
        """Give it connections from now on."""
        self._workers.append(worker)
        self._read_on()

    def remove(self, worker: Worker) -> None:
        """Give it no more; nothing is done about one that gets none."""
        if worker in self._workers:
            self._workers.remove(worker)
        if self._open and not self._workers:
            self._loop.remove_reader(self._listener)

    def _read_on(self) -> None:
        if self._open and self._workers:
            self._loop.add_reader(self._listener, self._accept)
            if self._untaken is not None:
                self._accept()

    def _accept(self) -> None:
        for _ in range(MOST_AT_ONCE):
            try:
                connection = self._untaken or self._listener.accept()[0]
            except BlockingIOError:
                return
            except OSError as error:  # no descriptor is left, or the client is gone already
                self._on_refused(Refusal.NO_DESCRIPTOR, f"{error.strerror}")
                self._pause()
                return
            if not self._hand_out(connection):
                self._untaken = connection
                self._pause()
                return
            self._untaken = None
            connection.close()

    def _hand_out(self, connection: socket.socket) -> bool:
        """To the next worker; one that does not take it is passed over."""
        for _ in range(len(self._workers)):
            worker = self._workers.pop(0)
            self._workers.append(worker)
            if worker.take(Connection.CLIENT, connection):
                self._on_taken(worker)
                return True
        return False

    def _pause(self) -> None:
        self._loop.remove_reader(self._listener)
        self._loop.call_later(PAUSE_SECONDS, self._read_on)
