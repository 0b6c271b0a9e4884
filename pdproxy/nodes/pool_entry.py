"""One node in the pool: its state, what runs on it, and the slots of its legs. Only the pool changes an entry."""

import asyncio
import dataclasses
from collections.abc import Callable

from pdproxy.clock import Clock
from pdproxy.nodes.circuit_breaker import CircuitBreaker, CircuitState
from pdproxy.nodes.node import Node, NodeView, State

_STATE_BY_CIRCUIT = {
    CircuitState.CLOSED: State.UP, CircuitState.OPEN: State.DOWN, CircuitState.HALF_OPEN: State.PROBING
}  # fmt: skip


@dataclasses.dataclass(slots=True)
class PoolEntry:
    """What the pool keeps of one node.

    Attributes:
        node: with what the preflight found filled in.
        configured: as it was given to the pool.
        membership: JOINING, UP, DRAINING or REFUSED; the circuit counts only while it is UP.
        active: legs in flight.
        trials: of these, the ones that were sent to try a half-open circuit.
        misses: active health probes failed in a row.
        progressed_at: monotonic seconds when a leg last received something from the node.
        leaving: set when running streams should move elsewhere.
        idle: set while no leg is in flight.
        alarms: called when active health gives the node up.
    """

    node: Node
    circuit: CircuitBreaker
    configured: Node
    membership: State = State.JOINING
    active: int = 0
    trials: int = 0
    misses: int = 0
    progressed_at: float = float("-inf")
    reason: str = ""
    leaving: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    idle: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    alarms: set[Callable[[], None]] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        self.idle.set()

    def stay(self) -> None:
        """Streams that begin from now on need not leave. Those that run keep their event: it may still be set."""
        if self.leaving.is_set():
            self.leaving = asyncio.Event()

    def lost(self) -> bool:
        """Whether active health has given the node up."""
        return self.misses >= self.circuit.config.failures

    def state(self) -> State:
        """The state that plans are made from."""
        return _STATE_BY_CIRCUIT[self.circuit.state] if self.membership is State.UP else self.membership

    def view(self, now: float) -> NodeView:
        """The node as a snapshot shows it."""
        return NodeView(self.node, self.state(), self.active, self.circuit.share(now), self.trials, self.reason)


class Slot:
    """A leg's place on a node: must be released, on every exit. Also a context manager."""

    def __init__(self, entry: PoolEntry, clock: Clock, on_release: Callable[[PoolEntry, bool], None]) -> None:
        self._entry: PoolEntry | None = entry
        self._clock = clock
        self._on_release = on_release
        self._trial = entry.state() is State.PROBING
        self._alarm: Callable[[], None] | None = None

    def progress(self) -> None:
        """Something arrived from the node: active health then knows that a slow probe means busy, not dead. Cheap."""
        if self._entry is not None:
            self._entry.progressed_at = self._clock.now()

    def on_node_down(self, alarm: Callable[[], None] | None) -> None:
        """Call ``alarm`` each time that active health finds the node gone; None ends that."""
        if self._entry is None:
            return
        if self._alarm is not None:
            self._entry.alarms.discard(self._alarm)
        if alarm is not None:
            self._entry.alarms.add(alarm)
        self._alarm = alarm

    def release(self) -> None:
        """Give the place back. Idempotent; works after the node has left the pool."""
        self.on_node_down(None)
        entry, self._entry = self._entry, None
        if entry is not None:
            self._on_release(entry, self._trial)

    def __enter__(self) -> "Slot":
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()
