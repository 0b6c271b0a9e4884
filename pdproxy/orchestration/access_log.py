"""What is recorded of a request at its end: its outcome, its log line, its usage."""

import logging
from collections.abc import Callable

from pdproxy.legs.usage import Usage
from pdproxy.observe.labels import Outcome, Phase, Tokens
from pdproxy.observe.logs import request_ended
from pdproxy.orchestration.context import OrchestrationContext
from pdproxy.orchestration.in_flight import Route, Timeline
from pdproxy.orchestration.resources import BackgroundTasks, HandOver
from pdproxy.orchestration.sub_request import SubRequest
from pdproxy.request import ClientRequest

_log = logging.getLogger(__name__)
_LONGEST_MODEL = 200
"""Characters of a model's name that a log line shows: a client can send any."""


class RequestLog:
    """Open, and shown as on the way, until `end` is called for the first time."""

    def __init__(self, context: OrchestrationContext, request: ClientRequest) -> None:
        self._context = context
        self._request = request
        self._open = True
        self.timeline = Timeline(context.clock, context.metrics, request.arrived)
        context.live.begin(request, self.timeline)

    def end(self, outcome: Outcome) -> None:
        """The request has ended."""
        if not self._open:
            return
        self._open = False
        request, timeline = self._request, self.timeline
        outcome = cancelled_outcome(request.left) if outcome is Outcome.CLIENT_GONE else outcome
        timeline.end()
        self._context.live.end(request, outcome)
        self._context.metrics.request_ended(request.endpoint, outcome)
        facts = {"endpoint": request.endpoint.value, "model": request.model[:_LONGEST_MODEL], **_nodes(timeline)}
        request_ended(_log, outcome, request.request_id, timeline.took, facts)


def _nodes(timeline: Timeline) -> dict[str, str]:
    """Prefill and decode node, as far as it came."""
    told = {"prefill_node": Phase.PREFILL, "decode_node": Phase.HANDOVER}
    return {name: timeline.nodes[phase] for name, phase in told.items() if phase in timeline.nodes}


def cancelled_outcome(left: Callable[[], bool]) -> Outcome:
    """How a request ended that was cut short: by its client, or by us (at the end of a shutdown's patience)."""
    return Outcome.CLIENT_GONE if left() else Outcome.FAILED


def error_outcome(status: int) -> Outcome:
    """How a request ended that got an error status."""
    return Outcome.CLIENT_ERROR if status < 500 and status != 429 else Outcome.FAILED


def record_usage(
    context: OrchestrationContext,
    background_tasks: BackgroundTasks,
    sub_request: SubRequest,
    hand_over: HandOver | None,
    usage: Usage,
) -> bool:
    """Count tokens, and whether the ticket was of use; True where the node computed the prompt all the same.

    What it did not read is released.
    """
    recomputed = hand_over is not None and usage.recomputed
    context.metrics.tokens(Tokens.PROMPT, usage.prompt or 0)
    context.metrics.tokens(Tokens.COMPLETION, usage.completion or 0)
    cached = _cached(hand_over, usage, recomputed=recomputed)
    context.metrics.tokens(Tokens.CACHED, cached)
    context.live.hits.count(_route(hand_over, recomputed=recomputed), usage.prompt or 0, cached)
    if hand_over is not None and recomputed:
        context.metrics.recomputed()
        _log.warning("request %s: the decode node computed the prompt again", sub_request.name)
        background_tasks.release(hand_over.node, sub_request.request.model, hand_over.name, sub_request.headers)
    return recomputed


def _cached(hand_over: HandOver | None, usage: Usage, *, recomputed: bool) -> int:
    if hand_over is None or recomputed:
        return usage.cached or 0
    return hand_over.cached_tokens or 0


def _route(hand_over: HandOver | None, *, recomputed: bool) -> Route:
    if hand_over is None:
        return Route.LOCAL
    return Route.RECOMPUTED if recomputed else Route.DISAGGREGATED
