"""When each phase of a request ended."""

from pdproxy.clock import Clock
from pdproxy.observe.labels import Phase
from pdproxy.observe.metrics import Metrics


class Timeline:
    """Phases follow each other; each mark ends one. A phase that is passed again adds to its time."""

    __slots__ = ("_clock", "_last", "_metrics", "start", "took")

    def __init__(self, clock: Clock, metrics: Metrics, arrived: float) -> None:
        self._clock = clock
        self._metrics = metrics
        self.start = arrived
        self._last = clock.now()
        self.took: dict[Phase, float] = {}

    def mark(self, phase: Phase) -> None:
        """The phase ends now."""
        now = self._clock.now()
        self.took[phase] = self.took.get(phase, 0.0) + now - self._last
        self._last = now

    def first(self) -> None:
        """The first byte for the client is here; counts every phase so far."""
        self.took[Phase.FIRST_TOKEN] = self._clock.now() - self.start
        for phase, seconds in self.took.items():
            self._metrics.phase_took(phase, seconds)

    def total(self) -> float:
        """Seconds since the request arrived."""
        return self._clock.now() - self.start

    def header(self) -> str:
        """The value of `Server-Timing`, in milliseconds."""
        return ", ".join(f"{phase};dur={seconds * 1000:.1f}" for phase, seconds in self.took.items())
