"""Messages of an attacker without keys to a side channel on this host, and what they cost the serving process."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from connector.zmtp import Zmtp

HOST = "127.0.0.1"
PATIENCE_S = 60.0


def memory_of(pid: int) -> int:
    """Resident bytes."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) * 1024


def greet(connection: socket.socket) -> Zmtp:
    """Make ZMTP's handshake; our end of it."""
    zmtp = Zmtp(b"DEALER", 1 << 20)
    while zmtp.peer is None:
        connection.sendall(b"".join(zmtp.pieces))
        zmtp.pieces.clear()
        data = connection.recv(4096)
        if not data:
            raise ConnectionError("the side channel closed the connection")
        zmtp.receive(data)
        zmtp.next_message()
    connection.sendall(b"".join(zmtp.pieces))
    zmtp.pieces.clear()
    return zmtp


@contextmanager
def flooded(port: int, bytes_of: Callable[[Zmtp], bytes], connections: int = 4) -> Iterator[None]:
    """Send the same bytes without end on some connections, and on new ones when those are closed."""
    over = threading.Event()

    def attack() -> None:
        while not over.is_set():
            with (
                contextlib.suppress(OSError),
                closing(socket.create_connection((HOST, port), PATIENCE_S)) as connection,
            ):
                connection.settimeout(1)
                data = bytes_of(greet(connection))
                while not over.is_set():
                    connection.sendall(data)

    threads = [threading.Thread(target=attack) for _ in range(connections)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(PATIENCE_S)
