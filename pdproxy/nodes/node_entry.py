"""What the pool keeps of one node: its circuit breaker, its load, and who observes its changes."""

import asyncio
import dataclasses
import enum
from collections.abc import Callable
from typing import Protocol

from pdproxy.errors import Fault
from pdproxy.nodes.node import Node, NodeView, Role, State
from pdproxy.observe.metrics import Metrics

NODE_FAULTS = frozenset(
    {Fault.REFUSED, Fault.RESET, Fault.HEADERS_TIMEOUT, Fault.STALL, Fault.SERVER_ERROR, Fault.INVALID_BODY}
)
"""The faults that speak against a node. The others are the client's doing, or a node that is healthy and full."""

SMALLEST_SHARE = 0.1
"""Where slow start begins: never 0, or a fresh node would get nothing to show itself with."""


class CircuitState(enum.StrEnum):
    """The three phases of a circuit."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclasses.dataclass(frozen=True, slots=True)
class CircuitBreakerConfig:
    """How patient a circuit is; times in seconds.

    Attributes:
        failures: node faults in a row that open it, >= 1.
        cool_down: the first time it stays open; doubles with every failed trial.
        longest_cool_down: where the doubling ends.
        slow_start: how long a node that came back takes to get its full share; 0 for at once.
    """

    failures: int = 3
    cool_down: float = 10.0
    longest_cool_down: float = 120.0
    slow_start: float = 30.0


@dataclasses.dataclass(frozen=True, slots=True)
class CircuitBreaker:
    """A circuit at one moment. Every method answers with the circuit that follows.

    Attributes:
        failures: node faults in a row, while closed.
        openings: how often it opened without a calm time (closed and past slow start) in between.
        moved_at: monotonic seconds of the last change of phase.
    """

    rules: CircuitBreakerConfig
    phase: CircuitState = CircuitState.CLOSED
    failures: int = 0
    openings: int = 0
    moved_at: float = float("-inf")

    def failed(self, now: float) -> "CircuitBreaker":
        """A node fault was seen. While open it says nothing new: it began before."""
        match self.phase:
            case CircuitState.OPEN:
                return self
            case CircuitState.HALF_OPEN:
                return self.opened(now)
            case CircuitState.CLOSED:
                counted = dataclasses.replace(self, failures=self.failures + 1)
                return counted.opened(now) if counted.failures >= self.rules.failures else counted

    def succeeded(self, now: float) -> "CircuitBreaker":
        """A request went well. While open that is no proof: it may have begun long before."""
        match self.phase:
            case CircuitState.OPEN:
                return self
            case CircuitState.HALF_OPEN:
                return dataclasses.replace(self, phase=CircuitState.CLOSED, failures=0, moved_at=now)
            case CircuitState.CLOSED:
                return self._calm(now)

    def opened(self, now: float) -> "CircuitBreaker":
        """Open, whatever it was; the cool-down starts now."""
        return dataclasses.replace(self, phase=CircuitState.OPEN, failures=0, openings=self.openings + 1, moved_at=now)

    def at(self, now: float) -> "CircuitBreaker":
        """What the passing of time makes of it: an open circuit becomes half open after its cool-down."""
        if self.phase is CircuitState.OPEN and now - self.moved_at >= self.cool_down():
            return dataclasses.replace(self, phase=CircuitState.HALF_OPEN, moved_at=now)
        return self

    def cool_down(self) -> float:
        """Seconds that it stays open this time."""
        doublings = min(max(self.openings - 1, 0), 16)
        return min(self.rules.cool_down * 2.0**doublings, max(self.rules.longest_cool_down, self.rules.cool_down))

    def share(self, now: float) -> float:
        """The part of the node's weight that may be used now, SMALLEST_SHARE to 1."""
        if self.phase is not CircuitState.CLOSED or self.rules.slow_start <= 0:
            return 1.0
        return min(1.0, max(SMALLEST_SHARE, (now - self.moved_at) / self.rules.slow_start))

    def _calm(self, now: float) -> "CircuitBreaker":
        if not self.failures and not self.openings:
            return self
        openings = self.openings if self.share(now) < 1.0 else 0
        return dataclasses.replace(self, failures=0, openings=openings)


class PoolObserver(Protocol):
    """Told of every change; must not block or raise."""

    def active(self, node: Node, count: int) -> None:
        """``count`` legs are in flight on ``node`` now."""
        ...

    def state(self, node: Node, state: State) -> None:
        """``node`` is in ``state`` now."""
        ...

    def circuit_moved(self, node: Node, to: CircuitState) -> None:
        """The node's circuit changed its phase."""
        ...

    def barred(self, prefill: str, decode: str, *, lifted: bool) -> None:
        """No ticket passes between these two nodes any more, or (``lifted``) tickets may pass again."""
        ...

    def gone(self, node: Node) -> None:
        """``node`` left the pool: forget its series."""
        ...


class NullPoolObserver:
    """Counts nothing."""

    def active(self, node: Node, count: int) -> None: ...

    def state(self, node: Node, state: State) -> None: ...

    def circuit_moved(self, node: Node, to: CircuitState) -> None: ...

    def barred(self, prefill: str, decode: str, *, lifted: bool) -> None: ...

    def gone(self, node: Node) -> None: ...


class MetricsPoolObserver:
    """Puts it all on the proxy's metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def active(self, node: Node, count: int) -> None:
        self._metrics.node_active(node.name, node.role, count)

    def state(self, node: Node, state: State) -> None:
        self._metrics.node_state(node.name, node.role, state)
        if node.role is Role.PREFILL and node.model:
            self._metrics.prefill_expected(node.model)

    def circuit_moved(self, node: Node, to: CircuitState) -> None:
        self._metrics.circuit_moved(node.name, to)

    def barred(self, prefill: str, decode: str, *, lifted: bool) -> None:
        if lifted:
            self._metrics.pair_allowed(prefill, decode)
        else:
            self._metrics.pair_barred(prefill, decode)

    def gone(self, node: Node) -> None:
        self._metrics.node_forgotten(node.name, node.role, State, CircuitState)


class Membership(enum.Enum):
    """Where the node stands apart from its circuit, which speaks only while it is SERVING."""

    JOINING = State.JOINING
    SERVING = State.UP
    DRAINING = State.DRAINING
    REFUSED = State.REFUSED


_STATE_OF_PHASE = {CircuitState.CLOSED: State.UP, CircuitState.OPEN: State.DOWN, CircuitState.HALF_OPEN: State.PROBING}


@dataclasses.dataclass(slots=True)
class NodeEntry:
    """Mutable; only the pool touches it.

    Attributes:
        node: with what the preflight found filled in.
        configured: as it was given to the pool.
        active: legs in flight.
        trials: of these, the ones that were sent to try a half-open circuit.
        misses: active health probes failed in a row.
        progressed_at: monotonic seconds when anything good was last heard from the node.
        leaving: set when running streams should move elsewhere.
        idle: set while no leg is in flight.
        alarms: called when active health gives the node up.
    """

    node: Node
    circuit: CircuitBreaker
    configured: Node
    stage: Membership = Membership.JOINING
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
        return self.misses >= self.circuit.rules.failures

    def state(self) -> State:
        """What planning may know of it."""
        return _STATE_OF_PHASE[self.circuit.phase] if self.stage is Membership.SERVING else self.stage.value

    def view(self, now: float) -> NodeView:
        """The node as a snapshot shows it."""
        return NodeView(
            self.node, self.state(), self.active, share=self.circuit.share(now), trials=self.trials, reason=self.reason
        )
