"""Instructions of a request that depend on nothing but the code: no machine is too busy to count them.

Nodes and client are in this process, and requests go one after the other: a node sends the next token of a stream when
the client has the one before. So no two are ever read at once, as they are where the proxy is slow.
"""

import asyncio
import re
import signal
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from deploy.bench.load import Client, Loaded, Plan
from deploy.bench.node import BACKLOG, Book, Connection, Pacer, Writes, addresses
from deploy.bench.peers import Peer, Ports
from deploy.bench.rounds import BenchError
from deploy.bench.script import Line, expected, request
from deploy.local.paths import ROOT, RUNS
from deploy.local.ports import free_ports
from deploy.local.supervise import Part, Supervisor, inherited

PATIENCE = 300.0
"""Seconds for a start, for requests, and for an end: a proxy runs some fifty times slower here."""
WHILE = 1.0
_TOTAL = re.compile(r"I\s+refs:\s+([\d,]+)")


class Lockstep(Pacer):
    """Steps of answers: the first one at once, each other one when the client has read something; or after a while,
    for a proxy asks things by itself when it starts."""

    def __init__(self) -> None:
        self._left: list[tuple[asyncio.WriteTransport, list[Writes]]] = []
        self._timer: asyncio.TimerHandle | None = None

    def play(self, transport: asyncio.WriteTransport, steps: tuple[Writes, ...]) -> None:
        """Begin with the next turn of the loop."""
        self._left.append((transport, [step for step in reversed(steps) if step]))
        asyncio.get_running_loop().call_soon(self.advance)

    def advance(self) -> None:
        """The next step of each answer."""
        going = [(transport, steps) for transport, steps in self._left if steps and not transport.is_closing()]
        for transport, steps in going:
            for piece in steps.pop():
                transport.write(piece)
        self._left = [answer for answer in going if answer[1]]
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(WHILE, self.advance) if self._left else None


class LockstepClient(Client):
    """One connection, which has the nodes go on when it has read something."""

    def __init__(self, plan: Plan, loaded: Loaded, lockstep: Lockstep) -> None:
        super().__init__(plan, loaded)
        self._lockstep = lockstep

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._lockstep.advance()


class Counted(NamedTuple):
    """Counts of a whole process: instructions, the pieces in which answers came, and the seconds that these took."""

    instructions: int
    pieces: int = 0
    seconds: float = 0.0


async def counted(peer: Peer, line: Line, requests: int, idle: float = 0.0, pairs: int = 1) -> Counted:
    """A proxy's start, one request that shows that it is ready, these, some idle seconds, and its end. ``pairs``: how
    many nodes of each role there are, each at an address of its own.

    Raises:
        BenchError: the proxy was not ready, or an answer was wrong.
    """
    lockstep = Lockstep()
    ports = Ports(*free_ports(4))
    nodes = [await _node(lockstep, port, pairs) for port in (ports.prefill, ports.decode)]
    with TemporaryDirectory(dir=RUNS) as folder, Supervisor(Path(folder), PATIENCE) as supervisor:
        counts = Path(folder) / "counts"
        valgrind = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
        command = [*valgrind, f"--log-file={counts}", *peer.command(ports), *_more_nodes(ports, pairs)]
        part = supervisor.start(peer.name, command, inherited(), ROOT)
        await _ready(part, ports.clients, lockstep)
        loaded = await _ask(ports.clients, line, requests, lockstep) if requests else Loaded()
        await asyncio.sleep(idle)
        part.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(part.process.wait, PATIENCE)
        found = _TOTAL.search(counts.read_text(encoding="utf-8"))
    for node in nodes:
        node.close()
    if found is None or loaded.complete != requests:
        raise BenchError(f"{peer.name}: {loaded.complete} of {requests} answers were right: {loaded.flaws}")
    return Counted(int(found[1].replace(",", "")), loaded.pieces, loaded.seconds)


async def _node(lockstep: Lockstep, port: int, count: int) -> asyncio.Server:
    book, loop = Book(), asyncio.get_running_loop()
    return await loop.create_server(lambda: Connection(book, lockstep), addresses(count), port, backlog=BACKLOG)


def _more_nodes(ports: Ports, pairs: int) -> list[str]:
    """The flags that name all nodes but the first ones."""
    names = [
        (("--prefill", f"http://{address}:{ports.prefill}"), ("--decode", f"http://{address}:{ports.decode}"))
        for address in addresses(pairs)[1:]
    ]
    return [word for pair in names for flag in pair for word in flag]


async def _ready(part: Part, port: int, lockstep: Lockstep) -> None:
    until, loaded = time.monotonic() + PATIENCE, Loaded()
    while loaded.complete != 1:
        part.require_alive()
        if time.monotonic() > until:
            raise BenchError(f"{part.name} was not ready in time: {loaded.flaws}\n{part.last_lines()}")
        await asyncio.sleep(0.5)
        try:
            loaded = await _ask(port, Line.COMPLETIONS, 1, lockstep)
        except OSError:
            continue


async def _ask(port: int, line: Line, requests: int, lockstep: Lockstep) -> Loaded:
    plan, loaded, began = Plan(line, expected(line), request(line), requests), Loaded(), time.monotonic()
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(PATIENCE):
        _, client = await loop.create_connection(lambda: LockstepClient(plan, loaded, lockstep), "127.0.0.1", port)
        await client.ended
    loaded.seconds = time.monotonic() - began
    return loaded
