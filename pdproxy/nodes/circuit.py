"""When a node is left alone, and how it comes back: a state machine that is told the time.

::

    CLOSED ──`failures` node faults in a row──> OPEN ──cool-down──> HALF_OPEN ──a success──> CLOSED (slow start)
       ^                                          ^                     │
       └── a success sets the count to 0          └──── a fault ────────┘   (each time twice the cool-down)
"""

import dataclasses
import enum

from pdproxy.errors import Fault

NODE_FAULTS = frozenset(
    {Fault.REFUSED, Fault.RESET, Fault.HEADERS_TIMEOUT, Fault.STALL, Fault.SERVER_ERROR, Fault.INVALID_BODY}
)
"""The faults that speak against a node. The others are the client's doing, or a node that is healthy and full."""

SMALLEST_SHARE = 0.1
"""Where slow start begins: never 0, or a fresh node would get nothing to show itself with."""


class Phase(enum.StrEnum):
    """The three phases of a circuit."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclasses.dataclass(frozen=True, slots=True)
class CircuitRules:
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
class Circuit:
    """A circuit at one moment. Every method answers with the circuit that follows.

    Attributes:
        failures: node faults in a row, while closed.
        openings: how often it opened without a calm time (closed and past slow start) in between.
        moved_at: monotonic seconds of the last change of phase.
    """

    rules: CircuitRules
    phase: Phase = Phase.CLOSED
    failures: int = 0
    openings: int = 0
    moved_at: float = float("-inf")

    def failed(self, now: float) -> "Circuit":
        """A node fault was seen. While open it says nothing new: it began before."""
        match self.phase:
            case Phase.OPEN:
                return self
            case Phase.HALF_OPEN:
                return self.opened(now)
            case Phase.CLOSED:
                counted = dataclasses.replace(self, failures=self.failures + 1)
                return counted.opened(now) if counted.failures >= self.rules.failures else counted

    def succeeded(self, now: float) -> "Circuit":
        """A request went well. While open that is no proof: it may have begun long before."""
        match self.phase:
            case Phase.OPEN:
                return self
            case Phase.HALF_OPEN:
                return dataclasses.replace(self, phase=Phase.CLOSED, failures=0, moved_at=now)
            case Phase.CLOSED:
                return self._calm(now)

    def opened(self, now: float) -> "Circuit":
        """Open, whatever it was; the cool-down starts now."""
        return dataclasses.replace(self, phase=Phase.OPEN, failures=0, openings=self.openings + 1, moved_at=now)

    def at(self, now: float) -> "Circuit":
        """What the passing of time makes of it: an open circuit becomes half open after its cool-down."""
        if self.phase is Phase.OPEN and now - self.moved_at >= self.cool_down():
            return dataclasses.replace(self, phase=Phase.HALF_OPEN, moved_at=now)
        return self

    def cool_down(self) -> float:
        """Seconds that it stays open this time."""
        doublings = min(max(self.openings - 1, 0), 16)
        return min(self.rules.cool_down * 2.0**doublings, max(self.rules.longest_cool_down, self.rules.cool_down))

    def share(self, now: float) -> float:
        """The part of the node's weight that may be used now, SMALLEST_SHARE to 1."""
        if self.phase is not Phase.CLOSED or self.rules.slow_start <= 0:
            return 1.0
        return min(1.0, max(SMALLEST_SHARE, (now - self.moved_at) / self.rules.slow_start))

    def _calm(self, now: float) -> "Circuit":
        if not self.failures and not self.openings:
            return self
        openings = self.openings if self.share(now) < 1.0 else 0
        return dataclasses.replace(self, failures=0, openings=openings)
