"""What supervisor and worker tell each other over a socket pair: a byte each, with a connection where there is one.

The supervisor accepts the clients' connections and gives each worker every n-th. The ways in which workers accept by
themselves were tried with two workers and 64 connections at once: with a socket each (``SO_REUSEPORT``) one worker got
39 to 56 % of them, with one listening socket that both inherit 0 to 100 %. The supervisor's requests as operator go
the same way: one half of a new socket pair is the connection.
"""

import asyncio
import enum
import socket
from collections.abc import Callable


class Connection(bytes, enum.Enum):
    """Whose connection comes with the byte."""

    CLIENT = b"c"
    OPERATOR = b"o"


READY = b"r"
"""A worker's first byte, once it serves. Anything else that it says is the error that kept it from starting."""
MOST_AT_ONCE = 64
"""Connections taken in one turn of the event loop, so that running streams go on in between."""


def hand_over(channel: socket.socket, kind: Connection, connection: socket.socket) -> bool:
    """Give a connection to a worker; whether it could be: False for one that has ended, or does not read."""
    try:
        socket.send_fds(channel, [kind.value], [connection.fileno()])
    except OSError:  # ended, or its buffer is full: another one may take it
        return False
    return True


class Inbox:
    """The worker's end: calls ``on_connection`` for each connection, and ``on_closed`` once the supervisor is gone."""

    def __init__(
        self,
        channel: socket.socket,
        on_connection: Callable[[Connection, socket.socket], None],
        on_closed: Callable[[], None],
    ) -> None:
        self._channel = channel
        self._on_connection = on_connection
        self._on_closed = on_closed

    def open(self) -> None:
        """Tell the supervisor that connections may come, and read them."""
        self._channel.setblocking(False)
        asyncio.get_running_loop().add_reader(self._channel, self._read)
        self._channel.send(READY)

    def close(self) -> None:
        """Read no more."""
        asyncio.get_running_loop().remove_reader(self._channel)

    def _read(self) -> None:
        for _ in range(MOST_AT_ONCE):
            try:
                # One byte at a time: each brings its own connection.
                kind, descriptors, _, _ = socket.recv_fds(self._channel, 1, 1)
            except BlockingIOError:
                return
            except OSError:
                kind, descriptors = b"", []
            if not kind:
                self.close()
                self._on_closed()
                return
            for descriptor in descriptors:
                connection = socket.socket(fileno=descriptor)
                connection.setblocking(False)
                self._on_connection(Connection(kind), connection)
