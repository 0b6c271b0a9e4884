"""Answers client requests with the nodes of the pool: the entry from intake, and the headers of the answer."""

import asyncio
from collections.abc import Sequence

from pdproxy.errors import ClientError
from pdproxy.legs.parse import split
from pdproxy.legs.shape import shape
from pdproxy.observe.labels import Outcome
from pdproxy.orchestration.access_log import RequestLog, error_outcome
from pdproxy.orchestration.buffered import buffered_body
from pdproxy.orchestration.client_errors import UpstreamErrorResponse
from pdproxy.orchestration.context import OrchestrationContext
from pdproxy.orchestration.fanout import FanOut
from pdproxy.orchestration.forward import ForwardRequest, forward
from pdproxy.orchestration.in_flight import Timeline
from pdproxy.orchestration.relay import Relay
from pdproxy.orchestration.resources import BackgroundTasks
from pdproxy.orchestration.upstream import UpstreamRequest
from pdproxy.request import ClientRequest, Headers, SubRequest
from pdproxy.response import ProxyResponse

_JSON_HEADER = ("content-type", "application/json")
_STREAM_HEADERS = (("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache"))


class Orchestrator:
    """Answers requests with the nodes of the pool."""

    def __init__(self, context: OrchestrationContext) -> None:
        self._context = context
        self._background_tasks = BackgroundTasks(context)

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
            log.end(error_outcome(error.response.status))
            own = error.response
            return ProxyResponse(own.status, (*own.headers, *_own_headers(request, log.timeline)), own.body)
        except ClientError as error:
            log.end(error_outcome(error.status))
            raise
        except asyncio.CancelledError:
            log.end(Outcome.CLIENT_GONE)
            raise
        except BaseException:
            log.end(Outcome.FAILED)
            raise

    async def forward(self, request: ForwardRequest) -> ProxyResponse:
        """The response of one suitable node to a request that the proxy does not understand (embeddings, tokenize, …).

        Raises:
            ClientError: as `answer`.
        """
        return await forward(self._context, request)

    @property
    def background_tasks(self) -> int:
        """Releases under way."""
        return len(self._background_tasks)

    async def aclose(self) -> None:
        """Wait, within the release deadline, for the releases that are still under way."""
        await self._background_tasks.aclose()

    async def _answer(self, request: ClientRequest, log: RequestLog) -> ProxyResponse:
        upstreams = self._upstreams(request, log)
        if request.stream:
            return await self._streamed(request, log, upstreams)
        body = await buffered_body(upstreams, self._context.config.fan_out)
        log.timeline.first_byte()
        log.end(Outcome.OK)
        return ProxyResponse(
            200, (_JSON_HEADER, *_own_headers(request, log.timeline), *_route_headers(upstreams)), body
        )

    async def _streamed(
        self, request: ClientRequest, log: RequestLog, upstreams: list[UpstreamRequest]
    ) -> ProxyResponse:
        stream: Relay | FanOut
        if len(upstreams) == 1:
            stream = Relay(self._context, upstreams[0], log.end)
        else:
            stream = FanOut(self._context, upstreams, log.end)
        try:
            await stream.start()
        except BaseException:
            await stream.aclose()
            raise
        log.timeline.first_byte()
        headers = (*_STREAM_HEADERS, *_own_headers(request, log.timeline), *_route_headers(upstreams))
        return ProxyResponse(200, headers, stream)

    def _upstreams(self, request: ClientRequest, log: RequestLog) -> list[UpstreamRequest]:
        """One for each prompt; the first one's phases stand for the request's."""
        context, sub_requests = self._context, _sub_requests(request)
        others = (Timeline(context.clock, context.metrics, log.timeline.start) for _ in sub_requests[1:])
        return [
            UpstreamRequest(context, self._background_tasks, sub_request, timeline)
            for sub_request, timeline in zip(sub_requests, (log.timeline, *others), strict=True)
        ]


def _sub_requests(request: ClientRequest) -> list[SubRequest]:
    """One for each prompt."""
    endpoint = request.endpoint
    bodies = split(endpoint, request.body)
    if len(bodies) == 1:
        return [SubRequest(request, bodies[0], shape(endpoint, bodies[0]), request.request_id)]
    names = (f"{request.request_id}-{index}" for index in range(len(bodies)))
    return [SubRequest(request, body, shape(endpoint, body), name) for body, name in zip(bodies, names, strict=True)]


def _own_headers(request: ClientRequest, timeline: Timeline) -> Headers:
    return (("x-pdproxy-request-id", request.request_id), ("server-timing", timeline.header()))


def _route_headers(upstreams: Sequence[UpstreamRequest]) -> Headers:
    """How the answer was computed; `x-pdproxy-recomputed` where it is known in time (not for streams)."""
    if all(upstream.hand_over is None for upstream in upstreams):
        return (("x-pdproxy-route", "local"),)
    route = ("x-pdproxy-route", "disaggregated")
    return (route, ("x-pdproxy-recomputed", "1")) if any(upstream.recomputed for upstream in upstreams) else (route,)
