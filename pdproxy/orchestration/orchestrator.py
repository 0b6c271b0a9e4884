"""Answers client requests with the nodes of the pool: the entry from intake, and the headers of the answer."""

import asyncio
import functools
from collections.abc import Sequence

from pdproxy.errors import ClientError
from pdproxy.legs.parse import split
from pdproxy.legs.shape import shape
from pdproxy.observe.labels import Outcome
from pdproxy.orchestration.access_log import RequestLog, error_outcome
from pdproxy.orchestration.buffered import read_buffered
from pdproxy.orchestration.client_errors import UpstreamErrorResponse
from pdproxy.orchestration.context import OrchestrationContext
from pdproxy.orchestration.fanout import FanOut, gather_bounded, merged_body
from pdproxy.orchestration.forward import ForwardRequest, forward
from pdproxy.orchestration.in_flight import Timeline
from pdproxy.orchestration.relay import Relay
from pdproxy.orchestration.resources import BackgroundTasks
from pdproxy.orchestration.response import ProxyResponse
from pdproxy.orchestration.sub_request import SubRequest
from pdproxy.orchestration.upstream import UpstreamRequest
from pdproxy.request import ClientRequest, Headers


class Orchestrator:
    """Answers requests with the nodes of the pool.

    Args:
        context: the transport, the pool, the metrics, the clock and the operator's terms.
    """

    def __init__(self, context: OrchestrationContext) -> None:
        self._context = context
        self._background_tasks = BackgroundTasks(context)

    async def answer(self, request: ClientRequest) -> ProxyResponse:
        """The reply to a request for a generating endpoint.

        A streamed reply comes back as soon as its first event is here. An upstream error that is the client's own comes
        back as a `ProxyResponse` with the node's status and body. Cancelling the awaiting task, or `aclose` on the
        response's stream, means that the client has gone: legs end, hand-overs are released, load is given back.

        Raises:
            ClientError: no such model (404), nothing can serve it now (503), all tries failed (502), too late (504).
        """
        log = RequestLog(self._context, request)
        try:
            return await self._answer(request, log)
        except UpstreamErrorResponse as answered:
            log.end(error_outcome(answered.reply.status))
            reply = answered.reply
            return ProxyResponse(reply.status, (*reply.headers, *own_headers(request, log.timeline)), reply.body)
        except ClientError as error:
            log.end(error_outcome(error.status))
            raise
        except asyncio.CancelledError:
            log.end(Outcome.CLIENT_GONE)
            raise
        except BaseException:
            log.end(Outcome.FAILED)
            raise

    async def forward(self, asked: ForwardRequest) -> ProxyResponse:
        """The reply of one suitable node to a request that the proxy does not understand (embeddings, tokenize, …).

        Raises:
            ClientError: as `answer`.
        """
        return await forward(self._context, asked)

    @property
    def background_tasks(self) -> int:
        """Releases under way."""
        return len(self._background_tasks)

    async def aclose(self) -> None:
        """Wait, within the release deadline, for the releases that are still under way."""
        await self._background_tasks.aclose()

    async def _answer(self, request: ClientRequest, log: RequestLog) -> ProxyResponse:
        sub_requests = _sub_requests(request)
        if len(sub_requests) > 1:
            return await (self._many_streams if request.stream else self._many)(request, sub_requests, log)
        return await (self._stream if request.stream else self._one)(request, sub_requests[0], log)

    async def _one(self, request: ClientRequest, sub_request: SubRequest, log: RequestLog) -> ProxyResponse:
        upstream = self._upstream(sub_request, log.timeline)
        answer = await read_buffered(upstream, sub_request)
        return self._completed(request, log, [upstream], answer.body)

    async def _many(self, request: ClientRequest, sub_requests: list[SubRequest], log: RequestLog) -> ProxyResponse:
        upstreams = self._upstreams(sub_requests, log)
        parts = [
            functools.partial(read_buffered, upstream, sub_request)
            for upstream, sub_request in zip(upstreams, sub_requests, strict=True)
        ]
        answers = await gather_bounded(parts, self._context.config.fan_out)
        return self._completed(request, log, upstreams, merged_body(answers))

    def _completed(
        self, request: ClientRequest, log: RequestLog, upstreams: list[UpstreamRequest], body: bytes
    ) -> ProxyResponse:
        log.timeline.first_byte()
        log.end(Outcome.OK)
        return ProxyResponse(200, buffered_headers(request, log.timeline, upstreams), body)

    async def _stream(self, request: ClientRequest, sub_request: SubRequest, log: RequestLog) -> ProxyResponse:
        upstream = self._upstream(sub_request, log.timeline)
        return await self._started(Relay(self._context, upstream, sub_request, log.end), request, log, [upstream])

    async def _many_streams(
        self, request: ClientRequest, sub_requests: list[SubRequest], log: RequestLog
    ) -> ProxyResponse:
        upstreams = self._upstreams(sub_requests, log)
        relays = [
            Relay(self._context, upstream, sub_request, _ignore_outcome)
            for upstream, sub_request in zip(upstreams, sub_requests, strict=True)
        ]
        fan = FanOut(relays, sub_requests[0].shape.choices, self._context.config.fan_out, log.end)
        return await self._started(fan, request, log, upstreams)

    async def _started(
        self, stream: Relay | FanOut, request: ClientRequest, log: RequestLog, upstreams: list[UpstreamRequest]
    ) -> ProxyResponse:
        try:
            await stream.start()
        except BaseException:
            await stream.aclose()
            raise
        log.timeline.first_byte()
        return ProxyResponse(200, stream_headers(request, log.timeline, upstreams), stream)

    def _upstreams(self, sub_requests: list[SubRequest], log: RequestLog) -> list[UpstreamRequest]:
        """The first prompt's phases stand for the request's."""
        others = (Timeline(self._context.clock, self._context.metrics, log.timeline.start) for _ in sub_requests[1:])
        return [
            self._upstream(sub_request, timeline)
            for sub_request, timeline in zip(sub_requests, (log.timeline, *others), strict=True)
        ]

    def _upstream(self, sub_request: SubRequest, timeline: Timeline) -> UpstreamRequest:
        return UpstreamRequest(self._context, self._background_tasks, sub_request, timeline)


def _sub_requests(request: ClientRequest) -> list[SubRequest]:
    """One for each prompt."""
    endpoint = request.endpoint
    bodies = split(endpoint, request.body)
    if len(bodies) == 1:
        return [SubRequest(request, bodies[0], shape(endpoint, bodies[0]), request.request_id)]
    names = (f"{request.request_id}-{index}" for index in range(len(bodies)))
    return [SubRequest(request, body, shape(endpoint, body), name) for body, name in zip(bodies, names, strict=True)]


def _ignore_outcome(outcome: Outcome) -> None:
    """One of several prompts has ended; the request's own end counts."""


JSON = "application/json"
EVENTS = "text/event-stream; charset=utf-8"


def own_headers(request: ClientRequest, timeline: Timeline) -> Headers:
    """The id, and where the time went."""
    return (("x-pdproxy-request-id", request.request_id), ("server-timing", timeline.header()))


def route_headers(upstreams: Sequence[UpstreamRequest]) -> Headers:
    """Which way the answer came; `x-pdproxy-recomputed` where it is known in time (not for streams)."""
    if all(upstream.hand_over is None for upstream in upstreams):
        return (("x-pdproxy-route", "local"),)
    way = ("x-pdproxy-route", "disaggregated")
    return (way, ("x-pdproxy-recomputed", "1")) if any(upstream.recomputed for upstream in upstreams) else (way,)


def stream_headers(request: ClientRequest, timeline: Timeline, upstreams: Sequence[UpstreamRequest]) -> Headers:
    """Of a stream."""
    return (
        ("content-type", EVENTS),
        ("cache-control", "no-cache"),
        *own_headers(request, timeline),
        *route_headers(upstreams),
    )


def buffered_headers(request: ClientRequest, timeline: Timeline, upstreams: Sequence[UpstreamRequest]) -> Headers:
    """Of an answer in one piece."""
    return (("content-type", JSON), *own_headers(request, timeline), *route_headers(upstreams))
