"""One client request, counted and logged when it ends: once, whichever way it ends."""

import logging

from pdproxy.drive.means import Means
from pdproxy.drive.timeline import Timeline
from pdproxy.observe.labels import Outcome, Phase
from pdproxy.request import ClientRequest

_log = logging.getLogger(__name__)


class Account:
    """Open until `end` is called for the first time."""

    def __init__(self, means: Means, request: ClientRequest) -> None:
        self._metrics = means.metrics
        self._request = request
        self._open = True
        self.timeline = Timeline(means.clock, means.metrics, request.arrived)

    def end(self, outcome: Outcome) -> None:
        """The request has ended."""
        if not self._open:
            return
        self._open = False
        total = self.timeline.total()
        self._metrics.request_ended(self._request.endpoint, outcome)
        self._metrics.phase_took(Phase.TOTAL, total)
        _log.info(
            "request %s %s %s: %s in %.3f s (%s)",
            self._request.request_id,
            self._request.endpoint,
            self._request.model,
            outcome,
            total,
            self.timeline.header(),
        )


def outcome_of(status: int) -> Outcome:
    """How a request ended that got an error status."""
    return Outcome.CLIENT_ERROR if status < 500 and status != 429 else Outcome.FAILED
