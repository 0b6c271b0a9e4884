"""Tells of requests from their records: log lines, metrics, spans, and the list of requests in flight.

When the first byte of an answer is there, it tells how long each phase took until then. It tells all else once, when
the request has ended.
"""

import asyncio
import logging
import time
from collections.abc import Sequence

from opentelemetry import trace

from pdproxy.errors import ClientError
from pdproxy.observe import gen_ai
from pdproxy.observe.labels import Outcome, Phase
from pdproxy.observe.rare_lines import LineBudget
from pdproxy.observe.request_metrics import OTHER, RequestSeries
from pdproxy.orchestration.client_errors import (
    BUG,
    TurnedAway,
    cancelled_outcome,
    final_error_in_stream,
    final_error_of,
    outcome_of,
    shutting_down_error,
    status_outcome,
)
from pdproxy.orchestration.context import OrchestrationContext
from pdproxy.orchestration.request_record import (
    AnswerRecord,
    Facts,
    RequestRecord,
    Route,
)
from pdproxy.request import ClientRequest, SubRequest
from pdproxy.usage import Usage

_LOG = logging.getLogger("pdproxy.orchestration.access_log")
"""By this name operators find the log lines of requests."""
_ENDED, _REFUSED = "request ended", "request refused"
_LINES = {
    (level, message): logging.LogRecord(_LOG.name, level, "", 0, message, (), None).__dict__
    for level in (logging.INFO, logging.WARNING)
    for message in (_ENDED, _REFUSED)
}


class Recorder:
    """Makes the record of each request, and tells of it. Nothing here waits."""

    def __init__(self, context: OrchestrationContext) -> None:
        self._clock = context.clock
        self._metrics = context.metrics
        self._in_flight = context.in_flight
        self._refusals = LineBudget(context.clock)

    def begin_record(self, request: ClientRequest) -> AnswerRecord:
        """A request to a generating endpoint is in flight, until its end. Its span is the one that is current now."""
        span = trace.get_current_span()
        if not span.is_recording():
            record = AnswerRecord.of(request, self._clock.now)
        else:
            record = AnswerRecord.of(request, self._clock.now, span)
            self._name_span(span, request)
        self._in_flight.add(record)
        return record

    def _name_span(self, span: trace.Span, request: ClientRequest) -> None:
        """By operation and model, and by the request's id, as the log line."""
        label = self._metrics.requests.models.label(request.model)
        span.update_name(gen_ai.span_name(request.endpoint, "" if label == OTHER else label))
        span.set_attributes(gen_ai.operation_attributes(request.endpoint, request.model))
        span.set_attribute("pdproxy.request_id", request.request_id)

    def understood(self, record: AnswerRecord, prompts: Sequence[SubRequest]) -> None:
        """The request asks for answers to these prompts."""
        record.choices = prompts[0].shape.choices
        if record.span is not None:
            request = record.request
            asked = gen_ai.request_attributes(request.body, record.choices, stream=request.stream)
            record.span.set_attributes(asked)

    def answer_began(self, record: AnswerRecord) -> None:
        """The first byte for the client is there."""
        took, arrived = record.first.took, record.request.arrived
        for phase, seconds in took.items():
            if phase is not Phase.DECODE:
                self._metrics.phases[phase].observe(seconds)
        took[Phase.FIRST_TOKEN] = seconds = self._clock.now() - arrived
        if record.request.stream:
            self._series_of(record).first_token.observe(seconds)

    def end(self, record: AnswerRecord, outcome: Outcome) -> None:
        """The request has ended. Later calls do nothing."""
        if record.failure.outcome is not None:
            return
        request, first, took = record.request, record.first, record.first.took
        if outcome is Outcome.CLIENT_GONE:
            outcome = cancelled_outcome(request.left)
        if outcome is Outcome.FAILED:
            _explain_failure(record)
        record.failure.outcome = outcome
        first.enter(first.phase)
        took[Phase.TOTAL] = first.entered - request.arrived
        self._observe_end(record, outcome)
        self._in_flight.end(record, first.entered, outcome)
        level = _level(outcome)
        if _LOG.isEnabledFor(level) or record.span is not None:
            facts = record.facts(outcome)
            _write_line(level, _ENDED, record, {**facts, "model": record.model[: gen_ai.LONGEST_MODEL]})
            if record.span is not None:
                _end_span(record.span, record, outcome, facts)

    def ended_by(self, record: AnswerRecord, error: BaseException) -> None:
        """As `end`, for a request that ends with an error before its answer has begun."""
        outcome = outcome_of(error, record.request.left)
        if outcome is not Outcome.CLIENT_GONE:
            record.failure.ended_with(final_error_of(error), record.working_node())
        self.end(record, outcome)

    def forwarded(self, record: RequestRecord, outcome: Outcome) -> None:
        """A request that one node answers has ended; a line is written where it did not go well."""
        self._count(record, outcome)
        if outcome is not Outcome.OK:
            facts = {"outcome": outcome.value, **record.failure.facts(), "model": record.model[: gen_ai.LONGEST_MODEL]}
            _write_line(_level(outcome), _ENDED, record, facts)

    def refused(self, record: RequestRecord, error: ClientError) -> None:
        """A request was refused before its body was understood, or for what its key has used.

        Strangers can send any number of such: their lines are bounded.
        """
        outcome = Outcome.REJECTED if isinstance(error, TurnedAway) else status_outcome(error.status)
        record.failure.ended_with(final_error_of(error))
        self._count(record, outcome)
        if outcome is Outcome.REJECTED:
            self._in_flight.recent.ended(record, self._clock.now(), outcome)
        unwritten = self._refusals.next_line()
        if unwritten is not None:
            facts: Facts = {"outcome": outcome.value, "key": record.key, **record.failure.facts()}
            if unwritten:
                facts["lines_left_out"] = unwritten
            _write_line(_level(outcome), _REFUSED, record, facts)

    def _count(self, record: RequestRecord, outcome: Outcome) -> None:
        """A request ended that no prompt was made of."""
        self._metrics.requests.alike(record.endpoint, record.model, stream=False).ended[outcome].inc()
        self._metrics.keys.series(record.key).ended[outcome].inc()

    def _observe_end(self, record: AnswerRecord, outcome: Outcome) -> None:
        series, key, took = self._series_of(record), self._metrics.keys.series(record.key), record.first.took
        series.ended[outcome].inc()
        key.ended[outcome].inc()
        for prompt in record.prompts:
            for leg in prompt.usages:
                series.add_tokens(leg.usage, key)
                self._note_usage(record, leg.usage, leg.route)
        if Phase.DECODE in took:
            self._metrics.phases[Phase.DECODE].observe(took[Phase.DECODE])
        series.seconds[outcome].observe(took[Phase.TOTAL])
        if outcome is Outcome.OK and record.request.stream and Phase.FIRST_TOKEN in took:
            series.streamed(record.output_tokens(), took[Phase.TOTAL] - took[Phase.FIRST_TOKEN])

    def _note_usage(self, record: AnswerRecord, usage: Usage, route: Route | None) -> None:
        """Tell of the tokens of a decode leg: the account of the key, what is known of answers."""
        record.request.on_usage(usage.prompt or 0, usage.completion or 0)
        if route is not None:
            self._in_flight.count_usage(record.model, route, usage, record.choices)
        if route is Route.RECOMPUTED:
            self._metrics.recomputed()

    def _series_of(self, record: AnswerRecord) -> RequestSeries:
        request = record.request
        return self._metrics.requests.alike(request.endpoint, request.model, stream=request.stream)


def _level(outcome: Outcome) -> int:
    return logging.WARNING if outcome is Outcome.FAILED else logging.INFO


def _write_line(level: int, message: str, request: RequestRecord, facts: Facts) -> None:
    """As `Logger.log` does with ``extra``, but what all lines have in common is found once, names are not checked, for
    these are the proxy's own, and no filter is asked, for the logger has none."""
    if _LOG.isEnabledFor(level):
        line = object.__new__(logging.LogRecord)
        own = {"created": time.time(), "request_id": request.name, "endpoint": request.path}
        line.__dict__ = {**_LINES[level, message], **own, **facts}
        _LOG.callHandlers(line)


def _explain_failure(record: AnswerRecord) -> None:
    """A stream that its reader closes before its end, while the client is there: the shutdown cancelled the reader, or
    a bug ended it, which is logged with its traceback."""
    if record.failure.error is None:
        task = asyncio.current_task()
        cancelled = task is not None and task.cancelling()
        error = shutting_down_error() if cancelled else ClientError(500, "An unexpected failure.", code=BUG)
        record.failure.ended_with(final_error_in_stream(error), record.working_node())


def _end_span(span: trace.Span, record: AnswerRecord, outcome: Outcome, facts: Facts) -> None:
    span.set_attributes({f"pdproxy.{name}": value for name, value in facts.items()})
    span.set_attributes(record.attributes())
    if record.request.stream and Phase.FIRST_TOKEN in record.first.took:
        span.set_attribute(gen_ai.TIME_TO_FIRST_CHUNK, record.first.took[Phase.FIRST_TOKEN])
    if outcome is not Outcome.OK:
        span.set_attribute(gen_ai.ERROR_TYPE, outcome.value)
    if outcome is Outcome.FAILED:
        span.set_status(trace.StatusCode.ERROR)
