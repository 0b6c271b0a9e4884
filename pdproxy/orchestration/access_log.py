"""What is recorded of a request at its end: its outcome, its log line, its usage."""

import logging
from collections.abc import Callable

from pdproxy.observe.labels import Outcome, Phase, Tokens
from pdproxy.observe.logs import request_ended
from pdproxy.orchestration.context import OrchestrationContext
from pdproxy.orchestration.in_flight import Route, Timeline
from pdproxy.orchestration.resources import BackgroundTasks, HandOver
from pdproxy.request import ClientRequest, SubRequest
from pdproxy.usage import Usage

_log = logging.getLogger(__name__)
_LONGEST_MODEL = 200
"""Characters of a model's name that a log line shows: a client can send any."""


class RequestLog:
    """Keeps a request in flight until the first call of `end`, which writes its metrics and its log line."""

    def __init__(self, context: OrchestrationContext, request: ClientRequest) -> None:
        self._context = context
        self._request = request
        self._open = True
        self.timeline = Timeline(context.clock, context.metrics, request.arrived)
        context.in_flight.begin(request, self.timeline)

    def end(self, outcome: Outcome) -> None:
        """The request has ended."""
        if not self._open:
            return
        self._open = False
        request, timeline = self._request, self.timeline
        outcome = cancelled_outcome(request.left) if outcome is Outcome.CLIENT_GONE else outcome
        timeline.end()
        self._context.in_flight.end(request, outcome)
        self._context.metrics.request_ended(request.endpoint, outcome)
        facts = {"endpoint": request.endpoint.value, "model": request.model[:_LONGEST_MODEL], **_nodes(timeline)}
        request_ended(_log, outcome, request.request_id, timeline.took, facts)


def _nodes(timeline: Timeline) -> dict[str, str]:
    """Prefill and decode node, as far as the request came."""
    phases = {"prefill_node": Phase.PREFILL, "decode_node": Phase.HANDOVER}
    return {name: timeline.nodes[phase] for name, phase in phases.items() if phase in timeline.nodes}


def cancelled_outcome(left: Callable[[], bool]) -> Outcome:
    """The outcome of a cancelled request: its client has left, or we gave it up at the end of a shutdown."""
    return Outcome.CLIENT_GONE if left() else Outcome.FAILED


def error_outcome(status: int) -> Outcome:
    """The outcome of a request that was answered with an error status."""
    return Outcome.CLIENT_ERROR if status < 500 and status != 429 else Outcome.FAILED


def record_usage(
    context: OrchestrationContext,
    background_tasks: BackgroundTasks,
    sub_request: SubRequest,
    hand_over: HandOver | None,
    usage: Usage,
) -> bool:
    """Put a decode leg's usage on the metrics; whether the node had a ticket and computed the prompt all the same.

    A hand-over that was not read is released.
    """
    recomputed = hand_over is not None and usage.recomputed
    context.metrics.tokens(Tokens.PROMPT, usage.prompt or 0)
    context.metrics.tokens(Tokens.COMPLETION, usage.completion or 0)
    if hand_over is None:
        route, cached = Route.LOCAL, usage.cached
    elif recomputed:
        route, cached = Route.RECOMPUTED, usage.cached
    else:
        route, cached = Route.DISAGGREGATED, hand_over.answer.cached_tokens
    context.metrics.tokens(Tokens.CACHED, cached or 0)
    context.in_flight.cache_stats.count(route, usage.prompt or 0, cached or 0)
    if hand_over is not None and recomputed:
        context.metrics.recomputed()
        _log.warning("request %s: the decode node computed the prompt again", sub_request.name)
        background_tasks.release(hand_over.node, sub_request.request.model, hand_over.hand_over_id, sub_request.headers)
    return recomputed
