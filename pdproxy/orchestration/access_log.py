"""What is recorded of a request at its end: its outcome, its log line, its usage."""

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence

from pdproxy.errors import ClientError
from pdproxy.observe.labels import Outcome, Phase, Tokens
from pdproxy.orchestration.client_errors import REJECTED, UpstreamErrorResponse
from pdproxy.orchestration.context import OrchestrationContext
from pdproxy.orchestration.in_flight import Route, StreamMove, Timeline
from pdproxy.orchestration.resources import BackgroundTasks, HandOver
from pdproxy.request import ClientRequest, SubRequest
from pdproxy.usage import Usage

_LOG = logging.getLogger(__name__)
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
        self._context.metrics.keys.request_ended(request.api_key, outcome)
        nodes = {"prefill_node": timeline.nodes.get(Phase.PREFILL), "decode_node": timeline.nodes.get(Phase.HANDOVER)}
        facts: dict[str, object] = {"endpoint": request.endpoint.value, "model": request.model[:_LONGEST_MODEL]}
        facts |= {field: node for field, node in nodes.items() if node is not None}
        facts |= {f"{role}_session": affinity.value for role, affinity in timeline.affinities.items()}
        if timeline.decision is not None:
            facts |= timeline.decision.facts()
        facts |= move_facts(timeline.moves)
        request_ended(_LOG, outcome, request.request_id, timeline.took, facts)


def move_facts(moves: Sequence[StreamMove]) -> dict[str, str | int | float]:
    """Of a stream that went on at other nodes: how often, how, and its longest stall; empty for any other."""
    if not moves:
        return {}
    ways = "+".join(dict.fromkeys(each.move.value for each in moves))
    stall = max(each.stall for each in moves)
    return {"moves": len(moves), "moved": ways, "stall_ms": round(stall * 1000, 1)}


def request_ended(
    logger: logging.Logger,
    outcome: Outcome,
    request_id: str,
    timeline: Mapping[Phase, float],
    facts: Mapping[str, object],
) -> None:
    """Log the one line of a request.

    Args:
        timeline: seconds spent in each phase.
        facts: endpoint, model, nodes. Never a body, a ticket or a key, of a client's or of its session.
    """
    if logger.isEnabledFor(logging.INFO):
        spent = {f"{phase}_ms": round(seconds * 1000, 1) for phase, seconds in timeline.items()}
        logger.info("request ended", extra={"request_id": request_id, "outcome": outcome.value, **facts, **spent})


def outcome_of(error: BaseException, left: Callable[[], bool]) -> Outcome:
    """How a request ended that raised an error."""
    match error:
        case ClientError(status=429, kind=kind) if kind == REJECTED:
            return Outcome.REJECTED
        case ClientError(status=status):
            return status_outcome(status)
        case UpstreamErrorResponse(response=response):
            return status_outcome(response.status)
        case asyncio.CancelledError():
            return cancelled_outcome(left)
        case _:
            return Outcome.FAILED


def cancelled_outcome(left: Callable[[], bool]) -> Outcome:
    """The outcome of a cancelled request: its client has left, or we gave it up at the end of a shutdown."""
    return Outcome.CLIENT_GONE if left() else Outcome.FAILED


def status_outcome(status: int) -> Outcome:
    """The outcome of a request that was answered with this status."""
    if status < 400:
        return Outcome.OK
    return Outcome.CLIENT_ERROR if status < 500 and status != 429 else Outcome.FAILED


def record_tokens(context: OrchestrationContext, sub_request: SubRequest, usage: Usage) -> None:
    """Put the tokens of a leg's usage on the metrics, and on the account of its key."""
    request, metrics = sub_request.request, context.metrics
    prompt, completion, cached = usage.prompt or 0, usage.completion or 0, usage.cached or 0
    for kind, tokens in ((Tokens.PROMPT, prompt), (Tokens.COMPLETION, completion), (Tokens.CACHED, cached)):
        metrics.tokens(kind, tokens)
        metrics.keys.tokens(request.api_key, kind, tokens)
    request.on_usage(prompt, completion)


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
    route, cached = Route.LOCAL, usage.cached
    if hand_over is not None:
        recomputed = usage.recomputed(hand_over.node.tail_tokens)
        route = Route.RECOMPUTED if recomputed else Route.DISAGGREGATED
        cached = usage.cached if recomputed else hand_over.answer.cached_tokens
    record_tokens(context, sub_request, dataclasses.replace(usage, cached=cached))
    if usage.completion:
        length = usage.completion / sub_request.shape.choices
        context.in_flight.output_lengths.seen(sub_request.request.model, length)
    context.in_flight.cache_stats[route].add(usage.prompt or 0, cached or 0)
    if hand_over is None or route is not Route.RECOMPUTED:
        return False
    context.metrics.recomputed()
    _LOG.warning("request %s: the decode node computed the prompt again", sub_request.name)
    background_tasks.release(hand_over.node, sub_request.request.model, hand_over.hand_over_id, sub_request.headers)
    return True
