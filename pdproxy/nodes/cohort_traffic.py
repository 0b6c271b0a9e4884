"""How the requests of the last minutes were shared out among cohorts."""

from collections import Counter, deque

from pdproxy.clock import Clock

WINDOW = 300.0
"""Seconds for which a request counts."""
_STEP = 10.0
"""Seconds that are counted together."""


class CohortTraffic:
    """Requests by cohort, of those that have nodes: the pool says when a cohort has none any more."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._steps: deque[tuple[float, Counter[str]]] = deque()
        """When each began, in monotonic seconds, and its requests."""

    def record(self, cohort: str) -> None:
        """A request goes to a decode node of a cohort now."""
        now = self._clock.now()
        if not self._steps or now - self._steps[-1][0] >= _STEP:
            self._drop_old(now)
            self._steps.append((now, Counter()))
        self._steps[-1][1][cohort] += 1

    def forget(self, cohort: str) -> None:
        """It has no nodes any more."""
        for _, requests in self._steps:
            del requests[cohort]

    def recent(self) -> Counter[str]:
        """Of the last WINDOW seconds, by cohort."""
        self._drop_old(self._clock.now())
        return sum((requests for _, requests in self._steps), Counter())

    def _drop_old(self, now: float) -> None:
        while self._steps and now - self._steps[0][0] > WINDOW:
            self._steps.popleft()
