"""One rank's probes of the paths to prefill engines from which reads failed. Pure but for its host: time is passed in.

A probe goes the way that a read goes, without a request and without blocks of the cache:

    the engine's metadata over the side channel ──► a handshake, where there is none ──► a small read from each rank
        of the engine that this rank reads from, into memory of the prober's own
    all reads done                                    passed
    a read failed                                     the connection was broken: once more, after a new handshake
    no way to read, or not over within `PROBE_WITHIN` failed

A small read that has not ended may still write to that memory. It is polled until it ends, and before that no other one
is posted to its engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from .peer_engines import CannotRead, MayRead, MetadataRequest, NotYet, Rank
from .peer_paths import Peer

PROBE_WITHIN = 4.0
"""Seconds; more than a TCP connection may take to be made (`config.TCP_LIMITS`)."""


@dataclass(frozen=True, slots=True)
class ProbeTarget:
    """Memory of one rank of a prefill engine that may be read: address, bytes, and the device as NIXL counts them."""

    address: int
    size: int
    device: int


class ProbeState(Enum):
    """How a small read stands."""

    UNDER_WAY = auto()
    DONE = auto()
    FAILED = auto()


class ProbeHost(Protocol):
    """The methods of a rank that a probe uses (`worker_base.WorkerBase`)."""

    def probe_request(self, peer: Peer) -> MetadataRequest:
        """Which workers of the engine this rank reads from."""

    def probe_step(self, request: MetadataRequest) -> MayRead | NotYet | CannotRead:
        """Take the first step to a read from there; say what comes next."""

    def probe_anew(self, engine_id: str, *, broken: bool) -> None:
        """Ask for the engine's metadata again; where its connection is broken, make another handshake."""

    def probe_agents(self, engine_id: str) -> Mapping[Rank, str]:
        """NIXL's agents of the engine; none before a handshake."""

    def begin_probe_handshake(self, peer: Peer) -> None:
        """Have vLLM make a handshake in the next step."""

    def post_probe(self, agent: str, target: ProbeTarget) -> int | None:
        """Post a small read; its handle, None where NIXL refuses it."""

    def poll_probe(self, handle: int) -> ProbeState:
        """How a small read stands; one that is over is released."""


@dataclass(slots=True)
class _Probe:
    peer: Peer
    request: MetadataRequest
    until: float
    again: bool = False


@dataclass(slots=True)
class _ProbeReads:
    """A probe's small reads that are not over. `failed`: one of them was."""

    engine_id: str
    handles: list[int] = field(default_factory=list)
    failed: bool = False


class PathProbes:
    """Every probe that this rank was ordered to make."""

    def __init__(self, host: ProbeHost) -> None:
        self._host = host
        self._open: dict[int, _Probe] = {}
        self._reads: dict[int, _ProbeReads] = {}
        self._targets: dict[str, Mapping[Rank, ProbeTarget]] = {}

    def start(self, orders: Mapping[int, Peer], now: float) -> None:
        """Probes are ordered, by number."""
        for number, peer in orders.items():
            self._open[number] = _Probe(peer, self._host.probe_request(peer), now + PROBE_WITHIN)
            self._host.probe_anew(peer.engine_id, broken=False)

    def probes(self, engine_id: str) -> bool:
        """Whether a probe of this engine is open."""
        return any(probe.peer.engine_id == engine_id for probe in self._open.values())

    def reading(self) -> set[str]:
        """Engines from which a small read is under way."""
        return {reads.engine_id for reads in self._reads.values()}

    def on_metadata(self, engine_id: str, targets: Mapping[Rank, ProbeTarget]) -> None:
        """The engine's memory that may be read is known."""
        if self.probes(engine_id):
            self._targets[engine_id] = targets

    def advance(self, now: float) -> dict[int, bool]:
        """Take the next steps; the probes that have ended, by number: whether they passed."""
        over = self._poll() if self._reads else {}
        ended = {}
        for number, probe in list(self._open.items()):
            passed = self._advance(number, probe, over.get(number), now)
            if passed is not None:
                ended[number] = passed
                del self._open[number]
        if not self._open:
            self._targets.clear()
        return ended

    def _poll(self) -> dict[int, bool]:
        """The probes whose small reads are over: whether all went well."""
        over = {}
        for number, reads in list(self._reads.items()):
            states = {handle: self._host.poll_probe(handle) for handle in reads.handles}
            reads.handles = [handle for handle, state in states.items() if state is ProbeState.UNDER_WAY]
            reads.failed |= ProbeState.FAILED in states.values()
            if not reads.handles:
                over[number] = not reads.failed
                del self._reads[number]
                if reads.failed:
                    self._host.probe_anew(reads.engine_id, broken=True)
        return over

    def _advance(self, number: int, probe: _Probe, over: bool | None, now: float) -> bool | None:
        """Whether the probe passed; None while it is open. `over`: how its small reads ended just now, if they did."""
        if over is True:
            return True
        if now >= probe.until:
            return False
        if over is False:
            return self._try_again(probe)
        if probe.peer.engine_id in self.reading():
            return None
        step = self._host.probe_step(probe.request)
        if isinstance(step, MayRead):
            return self._read(number, probe)
        return False if isinstance(step, CannotRead) else None

    def _read(self, number: int, probe: _Probe) -> bool | None:
        engine_id = probe.peer.engine_id
        agents, targets = self._host.probe_agents(engine_id), self._targets.get(engine_id, {})
        if not agents:
            self._host.begin_probe_handshake(probe.peer)
            return None
        for rank in probe.request.ranks:
            handle = self._host.post_probe(agents[rank], targets[rank]) if rank in agents and rank in targets else None
            if handle is None:
                self._host.probe_anew(engine_id, broken=True)
                return self._try_again(probe)
            self._reads.setdefault(number, _ProbeReads(engine_id)).handles.append(handle)
        return None

    def _try_again(self, probe: _Probe) -> bool | None:
        if probe.again:
            return False
        probe.again = True
        return None
