"""What is recorded of a request at its end: its outcome, its log line, its span, its latency, its usage."""

import asyncio
import logging
from collections.abc import Callable, Mapping

from opentelemetry import trace

from pdproxy.errors import ClientError
from pdproxy.observe import gen_ai
from pdproxy.observe.labels import Outcome, Phase, Tokens
from pdproxy.observe.request_metrics import OTHER, RequestLabels
from pdproxy.orchestration.answer_record import Route
from pdproxy.orchestration.client_errors import REJECTED, UpstreamErrorResponse
from pdproxy.orchestration.context import OrchestrationContext
from pdproxy.orchestration.in_flight import Timeline
from pdproxy.orchestration.resources import BackgroundTasks, HandOver
from pdproxy.request import ClientRequest, SubRequest
from pdproxy.usage import Usage

_LOG = logging.getLogger(__name__)
_NODES = (("prefill_node", Phase.PREFILL), ("decode_node", Phase.HANDOVER))
_MILLISECONDS = {phase: f"{phase}_ms" for phase in Phase}
_LONGEST_MODEL = 200
"""Characters of a model's name that a log line shows: a client can send any."""


class RequestLog:
    """Keeps a request in flight until the first call of `end`, which writes its metrics and its log line, and tells the
    span that was current when it began."""

    def __init__(self, context: OrchestrationContext, request: ClientRequest) -> None:
        self._context = context
        self._request = request
        self._open = True
        self._labels = RequestLabels(request.endpoint, context.metrics.models.label(request.model), request.stream)
        self._span = trace.get_current_span()
        self.timeline = Timeline(context.clock, context.metrics, request.arrived)
        if self._span.is_recording():
            self.timeline.answer.traced = True
            self._name_span()
        context.in_flight.begin(request, self.timeline)

    def begin(self, prompts: int, choices: int) -> None:
        """So many prompts, and so many choices for each, are asked for."""
        answer = self.timeline.answer
        answer.prompts, answer.choices = prompts, choices
        if answer.traced:
            request = self._request
            self._span.set_attributes(gen_ai.request_attributes(request.body, choices, stream=request.stream))

    def first_byte(self) -> None:
        """The first byte for the client is here."""
        self.timeline.first_byte()
        if self._request.stream:
            self._context.metrics.server.first_token(self._labels, self.timeline.took[Phase.FIRST_TOKEN])

    def end(self, outcome: Outcome) -> None:
        """The request has ended."""
        if not self._open:
            return
        self._open = False
        request, timeline = self._request, self.timeline
        outcome = cancelled_outcome(request.left) if outcome is Outcome.CLIENT_GONE else outcome
        timeline.end()
        self._context.in_flight.end(request, outcome)
        self._context.metrics.request_ended(request.endpoint, request.model, outcome)
        self._context.metrics.keys.request_ended(request.api_key, outcome)
        self._record_latency(outcome)
        logged = _LOG.isEnabledFor(logging.INFO)
        if logged or timeline.answer.traced:
            facts = self._facts(outcome)
            if logged:
                named: dict[str, object] = {"endpoint": request.endpoint.value, "model": request.model[:_LONGEST_MODEL]}
                request_ended(_LOG, request.request_id, named | facts)
            if timeline.answer.traced:
                self._end_span(outcome, facts)

    def _record_latency(self, outcome: Outcome) -> None:
        took, server = self.timeline.took, self._context.metrics.server
        server.ended(self._labels, outcome, took[Phase.TOTAL])
        if outcome is Outcome.OK and self._request.stream and Phase.FIRST_TOKEN in took:
            tokens = self.timeline.answer.output_tokens()
            server.output_tokens(self._labels, tokens, took[Phase.TOTAL] - took[Phase.FIRST_TOKEN])

    def _facts(self, outcome: Outcome) -> dict[str, str | int | float]:
        """Outcome, nodes, plan, moves, and milliseconds in each phase, by names that say what they are."""
        timeline = self.timeline
        facts: dict[str, str | int | float] = {"outcome": outcome.value}
        for field, phase in _NODES:
            if phase in timeline.nodes:
                facts[field] = timeline.nodes[phase]
        for role, affinity in timeline.affinities.items():
            facts[f"{role}_session"] = affinity.value
        if timeline.decision is not None:
            facts |= timeline.decision.facts()
        facts |= timeline.answer.facts()
        for (
            phase,
            seconds,
        ) in timeline.took.items():  # to tenths; with a number of digits `round` takes five times as long
            facts[_MILLISECONDS[phase]] = round(seconds * 10_000) / 10
        return facts

    def _name_span(self) -> None:
        """By operation and model, and by the request's id, as the log line."""
        request, label = self._request, self._labels.model
        self._span.update_name(gen_ai.span_name(request.endpoint, "" if label == OTHER else label))
        self._span.set_attributes(gen_ai.operation_attributes(request.endpoint, request.model))
        self._span.set_attribute("pdproxy.request_id", request.request_id)

    def _end_span(self, outcome: Outcome, facts: Mapping[str, str | int | float]) -> None:
        self._span.set_attributes({f"pdproxy.{name}": value for name, value in facts.items()})
        self._span.set_attributes(self.timeline.answer.attributes())
        if self._request.stream and Phase.FIRST_TOKEN in self.timeline.took:
            self._span.set_attribute(gen_ai.TIME_TO_FIRST_CHUNK, self.timeline.took[Phase.FIRST_TOKEN])
        if outcome is not Outcome.OK:
            self._span.set_attribute(gen_ai.ERROR_TYPE, outcome.value)
        if outcome is Outcome.FAILED:
            self._span.set_status(trace.StatusCode.ERROR)


def request_ended(logger: logging.Logger, request_id: str, facts: Mapping[str, object]) -> None:
    """Log the one line of a request.

    Args:
        facts: endpoint, model, outcome, nodes, times. Never a body, a ticket or a key, of a client's or of its session.
    """
    if logger.isEnabledFor(logging.INFO):
        # As `Logger.info` does with ``extra``, but for its check of each name: these are the proxy's own.
        record = logger.makeRecord(logger.name, logging.INFO, "", 0, "request ended", (), None)
        record.__dict__["request_id"] = request_id
        record.__dict__.update(facts)
        logger.handle(record)


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
        metrics.tokens(kind, request.model, tokens)
        metrics.keys.tokens(request.api_key, kind, tokens)
    request.on_usage(prompt, completion)


def record_usage(
    context: OrchestrationContext,
    background_tasks: BackgroundTasks,
    sub_request: SubRequest,
    hand_over: HandOver | None,
    usage: Usage,
) -> tuple[Route, Usage]:
    """Put a decode leg's usage on the metrics; which node computed the prompt, and the usage with what it had cached.

    A hand-over that was not read is released.
    """
    route, cached = Route.LOCAL, usage.cached
    if hand_over is not None:
        recomputed = usage.recomputed(hand_over.node.tail_tokens)
        route = Route.RECOMPUTED if recomputed else Route.DISAGGREGATED
        cached = usage.cached if recomputed else hand_over.answer.cached_tokens
    shown = Usage(usage.prompt, usage.completion, cached)
    record_tokens(context, sub_request, shown)
    if usage.completion:
        length = usage.completion / sub_request.shape.choices
        context.in_flight.output_lengths.seen(sub_request.request.model, length)
    context.in_flight.cache_stats[route].add(usage.prompt or 0, cached or 0)
    if hand_over is None or route is not Route.RECOMPUTED:
        return route, shown
    context.metrics.recomputed()
    _LOG.warning("request %s: the decode node computed the prompt again", sub_request.name)
    background_tasks.release(hand_over.node, sub_request.request.model, hand_over.hand_over_id, sub_request.headers)
    return route, shown
