"""One client request, counted and logged when it ends: once, whichever way it ends."""

import logging
from collections.abc import Callable

from pdproxy.drive.means import Means
from pdproxy.drive.timeline import Timeline
from pdproxy.observe.labels import Outcome, Phase
from pdproxy.observe.logs import request_ended
from pdproxy.request import ClientRequest

_log = logging.getLogger(__name__)
_LONGEST_MODEL = 200
"""Characters of a model's name that a log line shows: a client can send any."""


class Account:
    """Open, and shown as on the way, until `end` is called for the first time."""

    def __init__(self, means: Means, request: ClientRequest) -> None:
        self._means = means
        self._request = request
        self._open = True
        self.timeline = Timeline(means.clock, means.metrics, request.arrived)
        means.live.begin(request, self.timeline)

    def end(self, outcome: Outcome) -> None:
        """The request has ended."""
        if not self._open:
            return
        self._open = False
        request, timeline = self._request, self.timeline
        outcome = cut(request.left) if outcome is Outcome.CLIENT_GONE else outcome
        timeline.end()
        self._means.live.end(request, outcome)
        self._means.metrics.request_ended(request.endpoint, outcome)
        facts = {"endpoint": request.endpoint.value, "model": request.model[:_LONGEST_MODEL], **_nodes(timeline)}
        request_ended(_log, outcome, request.request_id, timeline.took, facts)


def _nodes(timeline: Timeline) -> dict[str, str]:
    """Prefill and decode node, as far as it came."""
    told = {"prefill_node": Phase.PREFILL, "decode_node": Phase.HANDOVER}
    return {name: timeline.nodes[phase] for name, phase in told.items() if phase in timeline.nodes}


def cut(left: Callable[[], bool]) -> Outcome:
    """How a request ended that was cut short: by its client, or by us (at the end of a shutdown's patience)."""
    return Outcome.CLIENT_GONE if left() else Outcome.FAILED


def outcome_of(status: int) -> Outcome:
    """How a request ended that got an error status."""
    return Outcome.CLIENT_ERROR if status < 500 and status != 429 else Outcome.FAILED
