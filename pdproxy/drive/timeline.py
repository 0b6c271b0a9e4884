"""Where a request's time goes."""

from pdproxy.clock import Clock
from pdproxy.observe.labels import Phase
from pdproxy.observe.metrics import Metrics


class Timeline:
    """Phases follow each other, beginning with the plan; a phase that is entered again adds to its time.

    Attributes:
        start: monotonic seconds when the request arrived.
        began: when its plan began; it waited until then.
        now: the phase that it is in.
        took: seconds, of the phases that it has left.
        nodes: the node that works in a phase, by name, where one does.
    """

    __slots__ = ("_clock", "_entered", "_metrics", "began", "nodes", "now", "start", "took")

    def __init__(self, clock: Clock, metrics: Metrics, arrived: float) -> None:
        self._clock = clock
        self._metrics = metrics
        self.start = arrived
        self.began = self._entered = clock.now()
        self.now = Phase.PLAN
        self.took: dict[Phase, float] = {}
        self.nodes: dict[Phase, str] = {}

    def enter(self, phase: Phase, node: str = "") -> None:
        """The next phase begins."""
        moment = self._clock.now()
        self.took[self.now] = self.took.get(self.now, 0.0) + moment - self._entered
        self.now, self._entered = phase, moment
        if node:
            self.nodes[phase] = node

    def first(self) -> None:
        """The first byte for the client is here; counts every phase so far."""
        self.took[Phase.FIRST_TOKEN] = self._clock.now() - self.start
        for phase, seconds in self.took.items():
            if phase is not Phase.DECODE:
                self._metrics.phase_took(phase, seconds)

    def end(self) -> None:
        """The request has ended; counts what `first` could not know."""
        self.enter(self.now)
        self.took[Phase.TOTAL] = self._entered - self.start
        self._metrics.phase_took(Phase.TOTAL, self.took[Phase.TOTAL])
        if Phase.DECODE in self.took:
            self._metrics.phase_took(Phase.DECODE, self.took[Phase.DECODE])

    def so_far(self, phase: Phase) -> float:
        """Seconds spent in a phase until now."""
        running = self._clock.now() - self._entered if phase is self.now else 0.0
        return self.took.get(phase, 0.0) + running

    def header(self) -> str:
        """The value of `Server-Timing`, in milliseconds: the way to the first byte."""
        told = ((phase, seconds) for phase, seconds in self.took.items() if phase not in _AFTERWARDS)
        return ", ".join(f"{phase};dur={seconds * 1000:.1f}" for phase, seconds in told)


_AFTERWARDS = frozenset({Phase.DECODE, Phase.TOTAL})
