"""Answers client requests with the nodes of the pool: the entry from intake, whole answers, response headers."""

import functools
from collections.abc import Sequence

from pdproxy.errors import ClientError, Fault, NodeFault
from pdproxy.legs.calls import ANSWER_BYTES, kept_of, outlined_object, raise_if_aborted
from pdproxy.legs.parse import split
from pdproxy.legs.shape import shape
from pdproxy.legs.turns import PromptReader
from pdproxy.nodes.node import Node
from pdproxy.observe.labels import Outcome
from pdproxy.orchestration.client_errors import (
    UpstreamErrorResponse,
    answered_with,
    final_error_in_stream,
    final_error_of,
    outcome_of,
)
from pdproxy.orchestration.context import OrchestrationContext
from pdproxy.orchestration.fanout import FanOut, gather_bounded, merge_answers
from pdproxy.orchestration.forward import ForwardRequest, forward
from pdproxy.orchestration.recorder import Recorder
from pdproxy.orchestration.relay import Relay
from pdproxy.orchestration.request_record import AnswerRecord, RequestRecord, Route
from pdproxy.orchestration.upstream import UpstreamRequest
from pdproxy.planning.plan_types import Plan
from pdproxy.reasons import LocalReason, RouteReason
from pdproxy.request import ClientRequest, Endpoint, Headers, Json, LegForm, ReadPrompt, SubRequest, write_json
from pdproxy.response import ProxyResponse
from pdproxy.stream.chunks import rewrite_answer
from pdproxy.transport.port import HttpResponse, read_to_end
from pdproxy.usage import read_usage

_JSON_HEADER = ("content-type", "application/json")
_ALONE = frozenset({None, Route.LOCAL})
_GENERATING = {endpoint.value: endpoint for endpoint in Endpoint}
_STREAM_HEADERS = (("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache"))
_PLAIN = LegForm()
_OUTPUT_FIELD = {Endpoint.MESSAGES: "content", Endpoint.RESPONSES: "output"}
"""The list that every answer must have, where it is not ``choices``."""


_ANSWER_BROKEN = ClientError(
    502, "The node broke its answer off, and the client's connection was cut.", code="answer_broken"
)


class Orchestrator:
    """Answers requests with the nodes of the pool."""

    def __init__(self, context: OrchestrationContext) -> None:
        self._context = context
        self._recorder = Recorder(context)
        self._prompts = PromptReader()

    async def answer(self, request: ClientRequest) -> ProxyResponse:
        """The response to a request for a generating endpoint.

        A streamed response is returned as soon as its first event is here. An upstream error that is the client's own
        is a response with the node's status and body. Cancelling the awaiting task, or `aclose` on the response's
        stream, means that the client has gone: legs end, hand-overs are released, slots are given back.

        Raises:
            ClientError: no such model (404), nothing can serve it now (503), all tries failed (502), too late (504).
        """
        record = self._recorder.begin_record(request)
        try:
            upstreams = await self._upstreams(request, record)
            if request.stream:
                return await self._streamed(record, upstreams)
            if len(upstreams) == 1:
                body, _ = await _answer_of(upstreams[0])
            else:
                body = await _merged_answer(upstreams, self._context.config.fan_out)
        except UpstreamErrorResponse as error:
            self._recorder.ended_by(record, error)
            own = error.response
            return ProxyResponse(own.status, (*own.headers, *_own_headers(record)), own.body)
        except BaseException as error:
            self._recorder.ended_by(record, error)
            raise
        self._recorder.answer_began(record)
        self._recorder.end(record, Outcome.OK)
        return ProxyResponse(200, (_JSON_HEADER, *_own_headers(record), *_route_headers(record)), body)

    async def forward(self, request: ForwardRequest) -> ProxyResponse:
        """The response of one suitable node to a request that the proxy does not understand (embeddings, tokenize, …).

        Raises:
            ClientError: as `answer`.
        """
        path, endpoint = request.path.partition("?")[0], _GENERATING.get(request.path)
        record = RequestRecord(request.request_id, path, endpoint, request.model, request.api_key)
        failure = record.failure

        def ended(status: int, outcome: Outcome) -> None:
            broken = outcome is Outcome.FAILED and status < 400
            failure.error = final_error_in_stream(_ANSWER_BROKEN) if broken else answered_with(status)
            self._recorder.forwarded(record, outcome)

        try:
            return await forward(self._context, request, failure, ended)
        except BaseException as error:
            outcome = outcome_of(error, request.left)
            failure.error = None if outcome is Outcome.CLIENT_GONE else final_error_of(error)
            self._recorder.forwarded(record, outcome)
            raise

    def check_room(self, key: str) -> None:
        """Raise the `ClientError` 429 where a request of a key would be refused if it came now: the queue is full."""
        self._context.queue.check_room(key)

    def refused(self, request_id: str, path: str, endpoint: Endpoint | None, key: str, error: ClientError) -> None:
        """Count and log a request that was refused before it came here; ``key``: the name of its API key."""
        self._recorder.refused(RequestRecord(request_id, path, endpoint, "", key), error)

    async def expected_tokens(self, request: ClientRequest) -> tuple[int, int]:
        """About how many tokens a request's prompts have, and its answers will have. They are not read again for
        `answer`."""
        lengths, prompt, answers = self._context.in_flight.output_lengths, 0, 0
        request.prompts.extend(await self._read(request))
        for each in request.prompts:
            prompt += each.shape.prompt_tokens
            answers += each.shape.choices * lengths.expected(request.model, each.shape.longest)
        return prompt, answers

    async def _streamed(self, record: AnswerRecord, upstreams: list[UpstreamRequest]) -> ProxyResponse:
        on_end = functools.partial(self._recorder.end, record)
        single = len(upstreams) == 1
        stream = Relay(self._context, upstreams[0], on_end) if single else FanOut(self._context, upstreams, on_end)
        try:
            await stream.start()
        except BaseException:
            await stream.aclose()
            raise
        self._recorder.answer_began(record)
        return ProxyResponse(200, (*_STREAM_HEADERS, *_own_headers(record), *_route_headers(record)), stream)

    async def _upstreams(self, request: ClientRequest, record: AnswerRecord) -> list[UpstreamRequest]:
        """One for each prompt."""
        context, name, upstreams = self._context, request.request_id, []
        prompts = [*request.prompts] or await self._read(request)
        request.prompts.clear()
        bodies = request.held.parts([prompt.body for prompt in prompts])
        for index, (prompt, held) in enumerate(zip(prompts, bodies, strict=True)):
            own_name = f"{name}-{index}" if len(prompts) > 1 else name
            sub_request = SubRequest(request, held, prompt.shape, own_name, index, prompt.text)
            prompt_record = record.further_prompt() if index else record.first
            upstreams.append(UpstreamRequest(context, sub_request, prompt_record))
        self._recorder.understood(record, [upstream.sub_request for upstream in upstreams])
        return upstreams

    async def _read(self, request: ClientRequest) -> list[ReadPrompt]:
        """The prompts of a request, each read as far as plans need it."""
        endpoint, prompts = request.endpoint, []
        for body in split(endpoint, request.body):
            facts = await self._prompts.read(body)
            text = None if self._context.prefix_source is None else facts.text
            prompts.append(ReadPrompt(body, shape(endpoint, body, facts, request.fields), text))
        return prompts


async def _merged_answer(upstreams: Sequence[UpstreamRequest], width: int) -> bytes:
    """The one answer to several prompts, ``width`` of them at once at most. Closes all upstreams, on every exit."""
    answers = await gather_bounded([functools.partial(_answer_of, upstream) for upstream in upstreams], width)
    return write_json(merge_answers([answer for _, answer in answers]))


async def _answer_of(upstream: UpstreamRequest) -> tuple[bytes, Json]:
    """The answer to one prompt, as bytes (the node's own where nothing had to be changed) and parsed. Closes its
    upstream, on every exit."""
    endpoint = upstream.sub_request.endpoint
    try:
        raw, answer = await upstream.start(_as_asked, functools.partial(_read, endpoint))
        usage = read_usage(answer.get("usage"))
        if usage is not None:
            upstream.record_usage(usage)
        upstream.record.was_whole(answer)
        if upstream.keep is not None:
            upstream.keep.told(kept_of(answer))
    finally:
        await upstream.aclose()
    hand_over, route = upstream.hand_over, upstream.record.route
    cache_use = None if hand_over is None or route is Route.RECOMPUTED else hand_over.answer.cache_use
    seen = rewrite_answer(endpoint, answer, cache_use)
    return raw if seen == answer else write_json(seen), seen


def _as_asked(_: Node) -> LegForm:
    return _PLAIN


async def _read(endpoint: Endpoint, response: HttpResponse) -> tuple[bytes, dict[str, object]]:
    raw = await read_to_end(response, ANSWER_BYTES)
    answer, field = await outlined_object(raw), _OUTPUT_FIELD.get(endpoint, "choices")
    if not isinstance(answer.get(field), list):
        raise NodeFault(Fault.INVALID_BODY, f"the answer has no {field}")
    raise_if_aborted(endpoint, answer)
    return raw, answer


def _own_headers(record: AnswerRecord) -> Headers:
    return (("x-pdproxy-request-id", record.name), ("server-timing", record.server_timing()))


def _route_headers(record: AnswerRecord) -> Headers:
    """How the answer was computed; `x-pdproxy-recomputed` where it is known in time (not for streams)."""
    first, routes = record.first, {record.first.route, *[prompt.route for prompt in record.further]}
    if routes <= _ALONE:
        return (("x-pdproxy-route", _with_plan("local", first.local_reason, first.decision)),)
    reason = None if first.decision is None else first.decision.reason
    route = ("x-pdproxy-route", _with_plan("disaggregated", reason, first.decision))
    return (route, ("x-pdproxy-recomputed", "1")) if Route.RECOMPUTED in routes else (route,)


def _with_plan(route: str, reason: RouteReason | LocalReason | None, decision: Plan | None) -> str:
    """The route with its reason, which for a local answer is the log line's `local_reason`, and with what the plan took
    to be cached."""
    why = "" if reason is None else f"; reason={reason}"
    return f"{route}{why}" if decision is None else f"{route}{why}; {decision.cached_share()}"
