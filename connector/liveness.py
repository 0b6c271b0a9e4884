"""Whether a node's processes run at all, which its API server can ask without a step of an engine (`alive_route`).

vLLM's `/health` is answered by the API server's process, and shows an engine core that died, but not one that is
stopped (SIGSTOP, a frozen container). So each engine core and worker listens on an abstract Unix socket of its own,
whose name has an id of the node in it that they inherit by the environment. The API server connects to each, and
waits for a byte.

That byte comes from libzmq: its I/O thread accepts, and sends the greeting of its protocol, without Python and so
without the GIL. So no long step, no compiler and no garbage collection delays it. The price: a process whose threads
wait for each other for ever, or for a GPU that hangs, answers too. Nothing else is sent or received on these sockets.

A process that has no such socket, or another network namespace, is not asked. Abstract sockets go with their process.
All processes of a network namespace can connect to them, and learn nothing but that this one runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Iterable
from pathlib import Path

import zmq

log = logging.getLogger("vllm.pdproxy.liveness")

RETRY = 0.1
"""Seconds until a socket is tried again whose backlog is full: nobody accepts there."""
LONGEST_MESSAGE = 64
SOCKETS = Path("/proc/net/unix")
_LISTENING = 0x10000
"""`__SO_ACCEPTCON`, in the flags of `SOCKETS`."""


class LivenessSocket:
    """This process's socket, from `open` to `close`; both may be called any number of times.

    A process needs one: where several are made (an engine core may be its own worker), only the first one listens.
    """

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._listener: zmq.Socket[bytes] | None = None

    def open(self) -> None:
        """Listen. Where that fails the process is just not asked: nothing is raised."""
        if self._context is not None or not self._node_id:
            return
        self._context = zmq.Context(io_threads=1)
        self._listener = self._context.socket(zmq.PUSH)  # of all types the one that takes no message in
        self._listener.setsockopt(zmq.MAXMSGSIZE, LONGEST_MESSAGE)
        self._listener.setsockopt(zmq.RCVHWM, 1)
        try:
            self._listener.bind(f"ipc://@{_prefix(self._node_id)}{os.getpid()}")
        except zmq.ZMQError as error:
            self.close()
            if error.errno != zmq.EADDRINUSE:
                log.warning("No proxy can ask whether this process runs: %s", error)

    def close(self) -> None:
        """Listen no more."""
        if self._listener is not None:
            self._listener.close(linger=0)
        if self._context is not None:
            self._context.term()
        self._context = self._listener = None


def listening(node_id: str, sockets: Path) -> list[str]:
    """The names of a node's sockets; none where the system does not tell."""
    try:
        lines = sockets.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return list(_names(lines, "@" + _prefix(node_id))) if node_id else []


def _names(lines: Iterable[str], start: str) -> Iterable[str]:
    for line in lines:
        words = line.split(" ", 7)  # address, references, protocol, flags, type, state, inode (padded), name
        name = line.rpartition(" ")[2]
        if name.startswith(start) and int(words[3], 16) & _LISTENING:
            yield name.removeprefix("@")


async def answers(name: str) -> bool:
    """Wait for a process to answer; False for one that has gone."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        while True:
            try:
                asking.connect(f"\0{name}")
                break
            except BlockingIOError:
                await asyncio.sleep(RETRY)
            except ConnectionRefusedError:
                return False
        try:
            return bool(await asyncio.get_running_loop().sock_recv(asking, 1))
        except ConnectionError:
            return False


def _prefix(node_id: str) -> str:
    return f"pdproxy-alive-{node_id}-"
