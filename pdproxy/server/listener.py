"""Accepts the connections of one port.

A connection for which this process has no descriptor left waits in the kernel's queue, and is counted. The event loops'
own servers do something else: uvloop's closes it and says nothing; asyncio's (Python 3.11) logged 45,000 lines within
two seconds for 255 of them.
"""

import asyncio
import errno
import socket
from collections.abc import Callable

from pdproxy.observe.labels import ConnectionRefusal
from pdproxy.observe.refused_connections import OnRefused

BACKLOG = 2048
"""Connections that wait to be accepted, as uvicorn has it."""
MOST_AT_ONCE = 64
"""Connections accepted in one turn of the event loop, so that running streams go on in between."""
PAUSE_SECONDS = 0.1
"""Before the next try where no descriptor was left: one that is given back is used as soon."""
_GONE = frozenset({errno.ECONNABORTED, errno.EPROTO, errno.EPERM})
"""The client has left the queue, or a firewall took it out: the next one may be fine."""


class Listener:
    """One socket that listens, from `open` to `close`.

    Args:
        bound: closed by `close`.
        take: called with each connection, which is its own from then on.
        on_refused: told of each time that none could be accepted.
    """

    def __init__(self, bound: socket.socket, take: Callable[[socket.socket], None], on_refused: OnRefused) -> None:
        self._bound = bound
        self._take = take
        self._on_refused = on_refused
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Accept connections."""
        self._bound.setblocking(False)
        self._read_on()

    def close(self) -> None:
        """Accept no more. Idempotent."""
        if self._pause is not None:
            self._pause.cancel()
        elif self._bound.fileno() >= 0:
            self._loop.remove_reader(self._bound)
        self._bound.close()

    def _read_on(self) -> None:
        self._pause = None
        self._loop.add_reader(self._bound, self._accept)

    def _accept(self) -> None:
        for _ in range(MOST_AT_ONCE):
            try:
                connection, _ = self._bound.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _GONE:
                    self._on_refused(ConnectionRefusal.NO_DESCRIPTOR, f"{error.strerror}")
                    self._loop.remove_reader(self._bound)
                    self._pause = self._loop.call_later(PAUSE_SECONDS, self._read_on)
                    return
            else:
                connection.setblocking(False)
                self._take(connection)
