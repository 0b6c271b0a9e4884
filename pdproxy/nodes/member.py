"""One node's place in the pool: what the pool remembers of it."""

import asyncio
import dataclasses
import enum
from collections.abc import Callable

from pdproxy.nodes.circuit import Circuit, Phase
from pdproxy.nodes.node import Node, NodeView, State


class Stage(enum.Enum):
    """Where the node stands apart from its circuit, which speaks only while it is SERVING."""

    JOINING = State.JOINING
    SERVING = State.UP
    DRAINING = State.DRAINING
    REFUSED = State.REFUSED


_STATE_OF_PHASE = {Phase.CLOSED: State.UP, Phase.OPEN: State.DOWN, Phase.HALF_OPEN: State.PROBING}


@dataclasses.dataclass(slots=True)
class Member:
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
    circuit: Circuit
    configured: Node
    stage: Stage = Stage.JOINING
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
        return _STATE_OF_PHASE[self.circuit.phase] if self.stage is Stage.SERVING else self.stage.value

    def view(self, now: float) -> NodeView:
        """The node as a snapshot shows it."""
        return NodeView(
            self.node, self.state(), self.active, share=self.circuit.share(now), trials=self.trials, reason=self.reason
        )
