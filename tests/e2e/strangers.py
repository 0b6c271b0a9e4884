"""Attacks on a node's side channel: find its process, hold idle connections, open ports that never answer.

Floods are in `tests.connector.strangers`.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from connector.messages import HANDSHAKE
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


@contextmanager
def idle(port: int, count: int) -> Iterator[None]:
    """Hold so many connections and send nothing."""
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(closing(socket.create_connection((HOST, port), PATIENCE_S)))
        yield


@contextmanager
def black_holes(count: int) -> Iterator[list[int]]:
    """Ports that accept and never answer."""
    with ExitStack() as stack:
        yield [stack.enter_context(closing(socket.create_server((HOST, 0)))).getsockname()[1] for _ in range(count)]


def shake_hands(port: int) -> dict[str, Any]:
    """The answer to vLLM's handshake of a stranger, who has no key."""
    import zmq

    with zmq.Context() as context, context.socket(zmq.REQ) as stranger:
        stranger.linger = 0
        stranger.connect(f"tcp://{HOST}:{port}")
        stranger.send(msgspec.msgpack.encode((HANDSHAKE, 0, 0)))
        assert stranger.poll(int(1000 * PATIENCE_S)), f"no answer at port {port}"
        answer: dict[str, Any] = msgspec.msgpack.decode(stranger.recv_multipart()[0])
        return answer


def seconds(work: Callable[[], object]) -> float:
    """The seconds that the work takes."""
    begun = time.monotonic()
    work()
    return time.monotonic() - begun
