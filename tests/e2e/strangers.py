"""What strangers do to a node's side channel, and what it costs the node's process."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from connector.zmtp import Zmtp
from deploy.local.node import Node
from deploy.local.ports import HOST
from deploy.local.watchdog import descendants

PATIENCE_S = 30.0


def owner_of(node: Node) -> int:
    """The process of a node that listens on its side channel."""
    local = f":{node.spec.side_channel_port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]]
    (inode,) = [row[9] for row in rows if row[1].endswith(local) and row[3] == "0A"]
    for pid in descendants(node.part.process.pid):
        with contextlib.suppress(OSError):
            if f"socket:[{inode}]" in {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}:
                return pid
    raise AssertionError(f"nobody listens on {local}")


def memory_of(pid: int) -> int:
    """Resident bytes."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) * 1024


def greet(connection: socket.socket) -> Zmtp:
    """Make ZMTP's handshake; what is sent afterwards is the caller's."""
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
def flooded(port: int, data: bytes, connections: int = 4) -> Iterator[None]:
    """Send `data` to a side channel for ever, on some connections, and on new ones when those are closed."""
    over = threading.Event()

    def attack() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), closing(socket.create_connection((HOST, port), 5)) as connection:
                greet(connection)
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


@contextmanager
def idle(port: int, count: int) -> Iterator[None]:
    """Hold so many connections that say nothing."""
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(closing(socket.create_connection((HOST, port), PATIENCE_S)))
        yield


@contextmanager
def black_holes(count: int) -> Iterator[list[int]]:
    """Ports that accept and never answer."""
    with ExitStack() as stack:
        yield [stack.enter_context(closing(socket.create_server((HOST, 0)))).getsockname()[1] for _ in range(count)]


def seconds(work: Callable[[], object]) -> float:
    """How long something takes."""
    begun = time.monotonic()
    work()
    return time.monotonic() - begun
