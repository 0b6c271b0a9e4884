"""Answers client requests with the nodes of the pool: the entry from intake, buffered answers, response headers, and
what is recorded of a request at its end: its outcome, its log line, its span, its latency."""

import asyncio
import functools
import logging
import time
from collections.abc import Mapping, Sequence

from opentelemetry import trace

from pdproxy.errors import ClientError, Fault, NodeFault
from pdproxy.legs.calls import ANSWER_BYTES, outlined_object, raise_if_aborted
from pdproxy.legs.parse import split
from pdproxy.legs.shape import shape
from pdproxy.legs.turns import PromptReader
from pdproxy.observe import gen_ai
from pdproxy.observe.labels import Outcome, Phase
from pdproxy.observe.rare_lines import LineBudget
from pdproxy.observe.request_metrics import OTHER, RequestLabels
from pdproxy.orchestration.client_errors import (
    BUG,
    UpstreamErrorResponse,
    answered_with,
    cancelled_outcome,
    final_error_in_stream,
    final_error_of,
    outcome_of,
    shutting_down_error,
    status_outcome,
)
from pdproxy.orchestration.context import OrchestrationContext
from pdproxy.orchestration.failure_record import FailureRecord
from pdproxy.orchestration.fanout import FanOut, gather_bounded, merge_answers
from pdproxy.orchestration.forward import ForwardRequest, forward
from pdproxy.orchestration.in_flight import Timeline
from pdproxy.orchestration.relay import Relay
from pdproxy.orchestration.resources import BackgroundTasks
from pdproxy.orchestration.upstream import UpstreamRequest
from pdproxy.request import ClientRequest, Endpoint, Headers, Json, LegForm, SubRequest, write_json
from pdproxy.response import ProxyResponse
from pdproxy.stream.chunks import rewrite_answer
from pdproxy.transport.port import HttpResponse, read_to_end
from pdproxy.usage import read_usage

_LOG = logging.getLogger("pdproxy.orchestration.access_log")
"""By this name operators find the log lines of requests."""
_LINES = {
    level: logging.LogRecord(_LOG.name, level, "", 0, "request ended", (), None).__dict__
    for level in (logging.INFO, logging.WARNING)
}
_NODES = (("prefill_node", Phase.PREFILL), ("decode_node", Phase.HANDOVER))
_MILLISECONDS = {phase: f"{phase}_ms" for phase in Phase}
_LONGEST_MODEL = 200
"""Characters of a model's name that a log line shows: a client can send any."""
_JSON_HEADER = ("content-type", "application/json")
_GENERATING = {endpoint.value: endpoint for endpoint in Endpoint}
_STREAM_HEADERS = (("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache"))
_OUTPUT_FIELD = {Endpoint.MESSAGES: "content", Endpoint.RESPONSES: "output"}
"""The list that every answer must have, where it is not ``choices``."""


_ANSWER_BROKEN = ClientError(
    502, "The node broke its answer off, and the client's connection was cut.", code="answer_broken"
)


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
        level = logging.INFO
        if outcome is Outcome.FAILED:
            level = logging.WARNING
            self._explain_failure()
        logged = _LOG.isEnabledFor(level)
        if logged or timeline.answer.traced:
            facts = self._facts(outcome)
            if logged:
                self._write_line(level, facts)
            if timeline.answer.traced:
                self._end_span(outcome, facts)

    def ended_by(self, error: BaseException) -> None:
        """As `end`, for a request that ends with an error before its answer has begun."""
        outcome = outcome_of(error, self._request.left)
        if outcome is not Outcome.CLIENT_GONE:
            self.timeline.answer.ended_with(final_error_of(error), self._working_node())
        self.end(outcome)

    def _explain_failure(self) -> None:
        """A stream that its reader closes before its end, while the client is there: the shutdown cancelled the
        reader, or a bug ended it, which is logged with its traceback."""
        answer = self.timeline.answer
        if answer.failure is None or answer.failure.error is None:
            task = asyncio.current_task()
            cancelled = task is not None and task.cancelling()
            error = shutting_down_error() if cancelled else ClientError(500, "An unexpected failure.", code=BUG)
            answer.ended_with(final_error_in_stream(error), self._working_node())

    def _working_node(self) -> str:
        """The node that works on the request, as far as it has come; "" for none."""
        return self.timeline.nodes.get(self.timeline.now, "")

    def _write_line(self, level: int, facts: Mapping[str, object]) -> None:
        """As `Logger.info` does with ``extra``, but what all lines have in common is found once, and names are not
        checked: these are the proxy's own."""
        request, record = self._request, object.__new__(logging.LogRecord)
        own = {"created": time.time(), "request_id": request.request_id, "endpoint": f"{request.endpoint}"}
        record.__dict__ = {**_LINES[level], **own, **facts, "model": request.model[:_LONGEST_MODEL]}
        _LOG.handle(record)

    def _record_latency(self, outcome: Outcome) -> None:
        took, server = self.timeline.took, self._context.metrics.server
        server.ended(self._labels, outcome, took[Phase.TOTAL])
        if outcome is Outcome.OK and self._request.stream and Phase.FIRST_TOKEN in took:
            tokens = self.timeline.answer.output_tokens()
            server.output_tokens(self._labels, tokens, took[Phase.TOTAL] - took[Phase.FIRST_TOKEN])

    def _facts(self, outcome: Outcome) -> dict[str, str | int | float]:
        """Outcome, nodes, plan, moves, and milliseconds in each phase, by names that say what they are.

        Never a body, a ticket or a key, of a client's or of its session.
        """
        timeline = self.timeline
        facts: dict[str, str | int | float] = {"outcome": f"{outcome}"}
        for field, phase in _NODES:
            if phase in timeline.nodes:
                facts[field] = timeline.nodes[phase]
        for role, affinity in timeline.affinities.items():
            facts[f"{role}_session"] = affinity.value
        if timeline.decision is not None:
            facts |= timeline.decision.facts()
        facts |= timeline.answer.facts()
        for phase, seconds in timeline.took.items():
            # To tenths; with a number of digits `round` takes five times as long.
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


class Orchestrator:
    """Answers requests with the nodes of the pool."""

    def __init__(self, context: OrchestrationContext, background_tasks: BackgroundTasks) -> None:
        self._context = context
        self._background_tasks = background_tasks
        self._refusals = LineBudget(context.clock)
        self._prompts = PromptReader()

    async def answer(self, request: ClientRequest) -> ProxyResponse:
        """The response to a request for a generating endpoint.

        A streamed response is returned as soon as its first event is here. An upstream error that is the client's own
        is a response with the node's status and body. Cancelling the awaiting task, or `aclose` on the response's
        stream, means that the client has gone: legs end, hand-overs are released, slots are given back.

        Raises:
            ClientError: no such model (404), nothing can serve it now (503), all tries failed (502), too late (504).
        """
        log = RequestLog(self._context, request)
        try:
            return await self._answer(request, log)
        except UpstreamErrorResponse as error:
            log.ended_by(error)
            own = error.response
            return ProxyResponse(own.status, (*own.headers, *_own_headers(request, log.timeline)), own.body)
        except BaseException as error:
            log.ended_by(error)
            raise

    async def forward(self, request: ForwardRequest) -> ProxyResponse:
        """The response of one suitable node to a request that the proxy does not understand (embeddings, tokenize, …).

        Raises:
            ClientError: as `answer`.
        """
        failure = FailureRecord()

        def ended(status: int, outcome: Outcome) -> None:
            broken = outcome is Outcome.FAILED and status < 400
            failure.error = final_error_in_stream(_ANSWER_BROKEN) if broken else answered_with(status)
            self._forwarded(request, outcome, failure)

        try:
            return await forward(self._context, request, failure, ended)
        except BaseException as error:
            outcome = outcome_of(error, request.left)
            failure.error = None if outcome is Outcome.CLIENT_GONE else final_error_of(error)
            self._forwarded(request, outcome, failure)
            raise

    def check_room(self, key: str) -> None:
        """Raise the `ClientError` 429 where a request of a key would be refused if it came now: the queue is full."""
        self._context.queue.check_room(key)

    def refused(self, request_id: str, path: str, endpoint: Endpoint | None, key: str, error: ClientError) -> None:
        """Count and log a request that was refused before it came here; ``key``: the name of its API key, "" for none.

        Strangers can send any number of such: their lines are bounded.
        """
        # Here each 429 is the proxy's own; from the orchestrator on, it may be a node's.
        outcome = Outcome.REJECTED if error.status == 429 else status_outcome(error.status)
        self._context.metrics.request_ended(endpoint, "", outcome)
        self._context.metrics.keys.request_ended(key, outcome)
        if outcome is Outcome.REJECTED:
            self._context.in_flight.recent.turned_away(self._context.clock.now(), endpoint or "", key)
        level = logging.WARNING if outcome is Outcome.FAILED else logging.INFO
        unwritten = self._refusals.take()
        if unwritten is not None:
            told = {"request_id": request_id, "endpoint": path, "outcome": f"{outcome}", "key": key}
            more = {"lines_left_out": unwritten} if unwritten else {}
            failure = FailureRecord(error=final_error_of(error))
            _LOG.log(level, "request refused", extra={**told, **failure.facts(), **more})

    async def expected_tokens(self, request: ClientRequest) -> tuple[int, int]:
        """About how many tokens a request's prompts have, and its answers will have."""
        endpoint, model, lengths = request.endpoint, request.model, self._context.in_flight.output_lengths
        prompt = answers = 0
        for each in split(endpoint, request.body):
            form = shape(endpoint, each, await self._prompts.facts(endpoint, each), request.fields)
            prompt += form.prompt_tokens
            answers += form.choices * lengths.expected(model, form.longest)
        return prompt, answers

    def _forwarded(self, request: ForwardRequest, outcome: Outcome, failure: FailureRecord) -> None:
        endpoint = _GENERATING.get(request.path)
        self._context.metrics.request_ended(endpoint, request.model, outcome)
        self._context.metrics.keys.request_ended(request.api_key, outcome)
        if outcome is not Outcome.OK:
            level = logging.WARNING if outcome is Outcome.FAILED else logging.INFO
            own = {"request_id": request.request_id, "endpoint": request.path.partition("?")[0]}
            told = {"outcome": f"{outcome}", **failure.facts(), "model": request.model[:_LONGEST_MODEL]}
            _LOG.log(level, "request ended", extra={**own, **told})

    async def _answer(self, request: ClientRequest, log: RequestLog) -> ProxyResponse:
        upstreams = await self._upstreams(request, log)
        if request.stream:
            return await self._streamed(request, log, upstreams)
        body = await _buffered_body(upstreams, self._context.config.fan_out)
        log.first_byte()
        log.end(Outcome.OK)
        headers = (_JSON_HEADER, *_own_headers(request, log.timeline), *_route_headers(upstreams, log.timeline))
        return ProxyResponse(200, headers, body)

    async def _streamed(
        self, request: ClientRequest, log: RequestLog, upstreams: list[UpstreamRequest]
    ) -> ProxyResponse:
        single = len(upstreams) == 1
        stream = Relay(self._context, upstreams[0], log.end) if single else FanOut(self._context, upstreams, log.end)
        try:
            await stream.start()
        except BaseException:
            await stream.aclose()
            raise
        log.first_byte()
        headers = (*_STREAM_HEADERS, *_own_headers(request, log.timeline), *_route_headers(upstreams, log.timeline))
        return ProxyResponse(200, headers, stream)

    async def _upstreams(self, request: ClientRequest, log: RequestLog) -> list[UpstreamRequest]:
        """One for each prompt; the first one's phases stand for the request's."""
        context, endpoint, name = self._context, request.endpoint, request.request_id
        bodies = split(endpoint, request.body)
        upstreams = []
        for index, (body, held) in enumerate(zip(bodies, request.held.parts(bodies), strict=True)):
            timeline = log.timeline
            if index:
                timeline = Timeline(context.clock, context.metrics, request.arrived, log.timeline.answer)
            own_name = f"{name}-{index}" if len(bodies) > 1 else name
            facts = await self._prompts.facts(endpoint, body)
            text = None if context.prefix_source is None else facts.text
            sub_request = SubRequest(request, held, shape(endpoint, body, facts, request.fields), own_name, index, text)
            upstreams.append(UpstreamRequest(context, self._background_tasks, sub_request, timeline))
        log.begin(len(upstreams), upstreams[0].sub_request.shape.choices)
        return upstreams


async def _buffered_body(upstreams: Sequence[UpstreamRequest], width: int) -> bytes:
    """The body for the client; at most ``width`` prompts are answered at once. Closes all upstreams, on every exit."""
    if len(upstreams) == 1:
        return (await _buffered_answer(upstreams[0]))[0]
    answers = await gather_bounded([functools.partial(_buffered_answer, upstream) for upstream in upstreams], width)
    return _encode(merge_answers([answer for _, answer in answers]))


async def _buffered_answer(upstream: UpstreamRequest) -> tuple[bytes, dict[str, object]]:
    """The answer to one prompt, as bytes (the node's own where nothing had to be changed) and parsed."""
    sub_request = upstream.sub_request
    try:
        raw, answer = await upstream.start(lambda _: LegForm(), functools.partial(_read, sub_request.endpoint))
        usage = read_usage(answer.get("usage"))
        if usage is not None:
            upstream.record_usage(usage)
        upstream.timeline.answer.was_whole(sub_request.index, answer)
    finally:
        await upstream.aclose()
    cached = None if upstream.hand_over is None or upstream.recomputed else upstream.hand_over.answer.cached_tokens
    seen = rewrite_answer(sub_request.endpoint, answer, cached)
    return raw if seen == answer else _encode(seen), seen


async def _read(endpoint: Endpoint, response: HttpResponse) -> tuple[bytes, dict[str, object]]:
    raw = await read_to_end(response, ANSWER_BYTES)
    answer, field = await outlined_object(raw), _OUTPUT_FIELD.get(endpoint, "choices")
    if not isinstance(answer.get(field), list):
        raise NodeFault(Fault.INVALID_BODY, f"the answer has no {field}")
    raise_if_aborted(endpoint, answer)
    return raw, answer


def _encode(answer: Json) -> bytes:
    return write_json(answer)


def _own_headers(request: ClientRequest, timeline: Timeline) -> Headers:
    return (("x-pdproxy-request-id", request.request_id), ("server-timing", timeline.header()))


def _route_headers(upstreams: Sequence[UpstreamRequest], timeline: Timeline) -> Headers:
    """How the answer was computed; `x-pdproxy-recomputed` where it is known in time (not for streams)."""
    decision = timeline.decision
    why = "" if decision is None else f"; {decision.summary()}"
    if all(upstream.hand_over is None for upstream in upstreams):
        return (("x-pdproxy-route", f"local{why}"),)
    route = ("x-pdproxy-route", f"disaggregated{why}")
    return (route, ("x-pdproxy-recomputed", "1")) if any(upstream.recomputed for upstream in upstreams) else (route,)
