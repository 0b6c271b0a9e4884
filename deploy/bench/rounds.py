"""Rounds of load, the peers in turn: what else the machine does meets all of them alike."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from deploy.bench.cpu import processes, seconds_of_tree
from deploy.bench.latency import Timed
from deploy.bench.load import Loaded
from deploy.bench.peers import Peer, Ports
from deploy.bench.perf import InstructionCount, counting, is_allowed
from deploy.bench.report import Figure
from deploy.bench.script import Line
from deploy.local.paths import ROOT, VENV
from deploy.local.ports import free_ports
from deploy.local.supervise import Part, Supervisor, inherited

READY_SECONDS = 60.0
SETTLE_SECONDS = 0.3
"""After the last answer: what a proxy still does then belongs to the requests too."""


class BenchError(Exception):
    """There are no figures; the message says why."""


class Effort(NamedTuple):
    """How much is measured.

    Attributes:
        requests: in one round of one peer.
        streams: at once.
        step_ms: between two tokens of a stream.
    """

    rounds: int
    requests: int
    streams: int
    step_ms: float


class Running(NamedTuple):
    """A peer that is up, and the ports around it."""

    peer: Peer
    ports: Ports
    part: Part

    @property
    def name(self) -> str:
        return self.peer.name

    @property
    def port(self) -> int:
        return self.ports.clients


def start(
    supervisor: Supervisor, peers: Sequence[Peer], effort: Effort, ready_seconds: float = READY_SECONDS
) -> list[Running]:
    """Two nodes, and the peers in front of them, each having answered a first request rightly."""
    prefill, decode, *ports = free_ports(2 + 2 * len(peers))
    python, environment = str(VENV / "bin" / "python"), inherited()
    for name, port in (("prefill", prefill), ("decode", decode)):
        command = [python, "-m", "deploy.bench.node", f"{port}", f"{effort.step_ms}"]
        supervisor.start(f"node-{name}", command, environment, ROOT)
    up = []
    for peer, clients, operators in zip(peers, ports[0::2], ports[1::2], strict=True):
        around = Ports(clients, operators, prefill, decode)
        part = supervisor.start(peer.name.replace(" ", "-"), peer.command(around), environment, ROOT)
        up.append(Running(peer, around, part))
    for running in up:
        await_ready(supervisor, running, ready_seconds)
    return up


def measure(running: Sequence[Running], lines: Sequence[Line], effort: Effort) -> Iterator[Figure]:
    """Each line's rounds, each begun by another peer; before them one that does not count."""
    counts = is_allowed()
    for line in lines:
        for peer in running:
            ask(peer, line, effort.streams, effort.streams)
        for number in range(effort.rounds):
            for place in range(len(running)):
                yield _round(running[(number + place) % len(running)], line, effort, counts)


def _round(peer: Running, line: Line, effort: Effort, counts: bool) -> Figure:
    root, requests = peer.part.process.pid, effort.requests
    before = seconds_of_tree(root)
    with counting(processes(root)) if counts else contextlib.nullcontext(InstructionCount()) as instructions:
        loaded = ask(peer, line, requests, effort.streams)
        time.sleep(SETTLE_SECONDS)
    used = 1000 * (seconds_of_tree(root) - before) / requests
    million = None if instructions.value is None else instructions.value / requests / 1e6
    return Figure(line, peer.name, used, loaded.pieces / requests, million)


def one_at_a_time(running: Sequence[Running], line: Line, requests: int) -> dict[str, Timed]:
    """The results of the two legs called directly (``direct``), and of each peer, by its name.

    Raises:
        BenchError: an answer was wrong.
    """
    ports = running[0].ports
    words = [line, requests, ports.prefill, ports.decode, *(peer.port for peer in running)]
    timed = [Timed(**each) for each in _printed_by("deploy.bench.latency", *map(str, words))]
    return dict(zip(["direct", *(peer.name for peer in running)], timed, strict=True))


def ask(peer: Running, line: Line, requests: int, streams: int) -> Loaded:
    """So many requests, so many at once; raises BenchError where one is not answered rightly."""
    loaded = _load(peer.port, line, requests, streams)
    peer.part.require_alive()
    if loaded.complete != requests or loaded.failed:
        raise BenchError(f"{peer.name}: {loaded.complete} of {requests} answers were right: {loaded.flaws}")
    return loaded


def _load(port: int, line: Line, requests: int, streams: int) -> Loaded:
    return Loaded(**_printed_by("deploy.bench.load", f"{port}", line, f"{requests}", f"{streams}"))


def _printed_by(module: str, *words: str) -> Any:
    """The output of a load generator, as JSON."""
    done = subprocess.run([sys.executable, "-m", module, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchError(f"the load generator failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def await_ready(supervisor: Supervisor, peer: Running, seconds: float, line: Line = Line.COMPLETIONS) -> None:
    """Tell a proxy of its nodes where it has to be told, and ask until it answers rightly.

    Raises:
        BenchError: it did not within the seconds.
    """
    until, joined = time.monotonic() + seconds, False
    while True:
        supervisor.require_all_alive()
        try:
            if not joined:
                peer.peer.joins(peer.ports)
            joined = True
            loaded = _load(peer.port, line, 1, 1)
            reason = "; ".join(loaded.flaws)
        except (BenchError, OSError) as error:
            loaded, reason = Loaded(), str(error)
        if loaded.complete == 1:
            return
        if time.monotonic() > until:
            raise BenchError(f"{peer.name} was not ready within {seconds:g} s: {reason}\n{peer.part.last_lines()}")
        time.sleep(0.5)
