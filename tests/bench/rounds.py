"""Rounds of load, the peers in turn: what else the machine does meets all of them alike."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from deploy.local.paths import ROOT, VENV
from deploy.local.ports import free_ports
from deploy.local.supervise import Part, Supervisor, inherited
from tests.bench.cpu import seconds_of_tree
from tests.bench.load import Loaded
from tests.bench.peers import Peer, Ports
from tests.bench.report import Figure
from tests.bench.script import Line

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
    """A peer that is up."""

    name: str
    port: int
    part: Part


def start(
    supervisor: Supervisor, peers: Sequence[Peer], effort: Effort, ready_seconds: float = READY_SECONDS
) -> list[Running]:
    """Two nodes, and the peers in front of them, each having answered a first request rightly."""
    prefill, decode, *ports = free_ports(2 + 2 * len(peers))
    python, environment = str(VENV / "bin" / "python"), inherited()
    for name, port in (("prefill", prefill), ("decode", decode)):
        command = [python, "-m", "tests.bench.node", f"{port}", f"{effort.step_ms}"]
        supervisor.start(f"node-{name}", command, environment, ROOT)
    up = []
    for peer, clients, operators in zip(peers, ports[0::2], ports[1::2], strict=True):
        command = peer.command(Ports(clients, operators, prefill, decode))
        up.append(Running(peer.name, clients, supervisor.start(peer.name, command, environment, ROOT)))
    for running in up:
        _await_ready(supervisor, running, ready_seconds)
    return up


def measure(running: Sequence[Running], lines: Sequence[Line], effort: Effort) -> Iterator[Figure]:
    """Each line's rounds; before them one that does not count."""
    for line in lines:
        for peer in running:
            ask(peer, line, effort.streams, effort.streams)
        for _ in range(effort.rounds):
            for peer in running:
                yield _round(peer, line, effort)


def _round(peer: Running, line: Line, effort: Effort) -> Figure:
    before = seconds_of_tree(peer.part.process.pid)
    loaded = ask(peer, line, effort.requests, effort.streams)
    time.sleep(SETTLE_SECONDS)
    used = seconds_of_tree(peer.part.process.pid) - before
    return Figure(line, peer.name, 1000 * used / effort.requests, loaded.pieces / effort.requests)


def ask(peer: Running, line: Line, requests: int, streams: int) -> Loaded:
    """So many requests, so many at once; raises BenchError where one is not answered rightly."""
    loaded = _load(peer.port, line, requests, streams)
    peer.part.require_alive()
    if loaded.complete != requests or loaded.failed:
        raise BenchError(f"{peer.name}: {loaded.complete} of {requests} answers were right: {loaded.flaws}")
    return loaded


def _load(port: int, line: Line, requests: int, streams: int) -> Loaded:
    command = [sys.executable, "-m", "tests.bench.load", f"{port}", line, f"{requests}", f"{streams}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchError(f"the load generator failed:\n{done.stderr[-2000:]}")
    return Loaded(**json.loads(done.stdout))


def _await_ready(supervisor: Supervisor, peer: Running, seconds: float) -> None:
    until = time.monotonic() + seconds
    while True:
        supervisor.require_all_alive()
        try:
            loaded = _load(peer.port, Line.COMPLETIONS, 1, 1)
            reason = "; ".join(loaded.flaws)
        except BenchError as error:
            loaded, reason = Loaded(), str(error)
        if loaded.complete == 1:
            return
        if time.monotonic() > until:
            raise BenchError(f"{peer.name} was not ready within {seconds:g} s: {reason}\n{peer.part.last_lines()}")
        time.sleep(0.5)
