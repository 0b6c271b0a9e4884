"""The connections that are open, and which of them are idle."""

import asyncio
import select

from pdproxy.clock import Clock
from pdproxy.transport.connection import Connection
from pdproxy.transport.wire import Origin

KEEP = 4.0
"""Seconds that a connection may idle: less than the 5 s after which a vLLM server closes it
(VLLM_HTTP_TIMEOUT_KEEP_ALIVE), so that a request seldom meets a connection that is being closed."""
_MOST = 256
"""Idle connections kept for one origin."""


class Pool:
    """Idle connections by origin, the freshest first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._idle: dict[Origin, list[Connection]] = {}
        self._open: set[Connection] = set()
        self._sweeper: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """How many connections are open, in use or idle."""
        return len(self._open)

    @property
    def idle(self) -> int:
        """How many connections wait for a request."""
        return sum(map(len, self._idle.values()))

    def take(self, origin: Origin) -> Connection | None:
        """An idle connection that, as far as one can tell, still stands."""
        stack = self._idle.get(origin, [])
        while stack:
            connection = stack.pop()
            connection.idled = self._clock.now() - connection.idle_since
            if connection.idled < KEEP and not connection.lost and not _readable(connection.fileno):
                return connection
            connection.cut()
        return None

    def add(self, connection: Connection) -> None:
        """Know a fresh connection, so that `close` finds it."""
        if not connection.lost:
            self._open.add(connection)

    def give_back(self, connection: Connection) -> None:
        """Keep a connection for the next request if it is fit for one, else cut it."""
        stack = self._idle.setdefault(connection.origin, [])
        if connection not in self._open or not connection.fit or len(stack) >= _MOST:
            connection.cut()
            return
        connection.rest()
        connection.idle_since = self._clock.now()
        stack.append(connection)
        self._sweep_later()

    def forget(self, connection: Connection) -> None:
        """It is gone."""
        self._open.discard(connection)
        stack = self._idle.get(connection.origin)
        if stack is not None and connection in stack:
            stack.remove(connection)

    def close(self) -> None:
        """Cut every connection, those in use too."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for connection in tuple(self._open):
            connection.cut()
        self._idle.clear()
        self._open.clear()

    def _sweep_later(self) -> None:
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(KEEP, self._sweep)

    def _sweep(self) -> None:
        self._sweeper = None
        now = self._clock.now()
        for stack in tuple(self._idle.values()):
            for connection in tuple(stack):
                if now - connection.idle_since >= KEEP:
                    stack.remove(connection)
                    connection.cut()
        self._idle = {origin: stack for origin, stack in self._idle.items() if stack}
        if self._idle:
            self._sweep_later()


def _readable(fileno: int) -> bool:
    """Something waits to be read: on an idle connection that is the peer's goodbye, or nothing we asked for."""
    if fileno < 0:
        return True
    poll = select.poll()
    poll.register(fileno, select.POLLIN)
    return bool(poll.poll(0))
