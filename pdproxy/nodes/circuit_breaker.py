"""The circuit breaker of one node: how long it is avoided, and how it gets back to its full share. Pure.

    CLOSED     all requests of its share; right after it came back, a share that grows with slow start
    OPEN       none, until the cool-down has ended, which doubles with every trial that fails
    HALF_OPEN  one request on trial: if it goes well the circuit closes, if it fails it opens again

`Pool` owns the circuits. It opens one by `outlier` (legs failed) or because active health gave the node up. In the
second case the cool-down does not count: the node must join anew, and gets a new circuit.
"""

import dataclasses
import enum
import math

SMALLEST_SHARE = 0.1
"""Where slow start begins: at 0 a node that came back would never get a request."""
STEPS = 100
"""In which the share grows, so that it stays the same for a while and plans need not look at each node again."""
_ROUNDING = 1e-6
"""Above what floating-point numbers lose of a second, or of a step."""


class CircuitState(enum.StrEnum):
    """The three states of a circuit."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclasses.dataclass(frozen=True, slots=True)
class CircuitBreakerConfig:
    """When circuits open and close; times in seconds.

    Attributes:
        failures: refused connections, or health probes that fail, in a row that open it, >= 1.
        cool_down: the first time it stays open; doubles with every failed trial.
        longest_cool_down: where the doubling ends.
        slow_start: until a node that came back has its full share; 0 for at once.
    """

    failures: int = 3
    cool_down: float = 10.0
    longest_cool_down: float = 120.0
    slow_start: float = 30.0


@dataclasses.dataclass(frozen=True, slots=True)
class CircuitBreaker:
    """A circuit at one moment. Every event returns the circuit that follows it.

    Attributes:
        openings: how often it opened without a calm time (closed and past slow start) in between.
        changed_at: monotonic seconds of the last change of state.
    """

    config: CircuitBreakerConfig
    state: CircuitState = CircuitState.CLOSED
    openings: int = 0
    changed_at: float = float("-inf")

    def succeeded(self, now: float) -> "CircuitBreaker":
        """A leg succeeded. Of no effect while open: it may have begun long before."""
        if self.state is CircuitState.HALF_OPEN:
            return dataclasses.replace(self, state=CircuitState.CLOSED, changed_at=now)
        if self.state is CircuitState.OPEN or not self.openings or self.share(now) < 1.0:
            return self
        return dataclasses.replace(self, openings=0)

    def opened(self, now: float) -> "CircuitBreaker":
        """Open, whatever it was before; the cool-down starts now."""
        return dataclasses.replace(self, state=CircuitState.OPEN, openings=self.openings + 1, changed_at=now)

    def at(self, now: float) -> "CircuitBreaker":
        """An open circuit is half open after its cool-down."""
        if self.state is CircuitState.OPEN and now - self.changed_at >= self.cool_down():
            return dataclasses.replace(self, state=CircuitState.HALF_OPEN, changed_at=now)
        return self

    def cool_down(self) -> float:
        """Seconds that it stays open this time."""
        doublings = min(max(self.openings - 1, 0), 16)
        return min(self.config.cool_down * 2.0**doublings, max(self.config.longest_cool_down, self.config.cool_down))

    def share(self, now: float) -> float:
        """The part of the node's weight that may be used now, SMALLEST_SHARE to 1."""
        if self.state is not CircuitState.CLOSED or now - self.changed_at >= self.config.slow_start:
            return 1.0
        return max(SMALLEST_SHARE, self._steps(now) / STEPS)

    def constant_until(self, now: float) -> float:
        """Until then at least, state and share stay what they are, if nothing happens; in monotonic seconds."""
        if self.state is CircuitState.OPEN:
            return self.changed_at + self.cool_down() - _ROUNDING
        if self.state is not CircuitState.CLOSED or now - self.changed_at >= self.config.slow_start:
            return math.inf
        steps = self._steps(now)
        if steps == STEPS:
            return math.inf
        next_step = (steps + 1 - 2 * _ROUNDING) * self.config.slow_start / STEPS
        return self.changed_at + next_step - _ROUNDING

    def _steps(self, now: float) -> int:
        return math.floor(min(1.0, (now - self.changed_at) / self.config.slow_start) * STEPS + _ROUNDING)
