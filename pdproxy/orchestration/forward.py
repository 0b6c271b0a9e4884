"""Requests that the proxy does not understand: one node answers, byte for byte."""

import asyncio
import dataclasses
from collections.abc import Callable

from pdproxy.errors import ClientError, Fault, NodeFault
from pdproxy.failures import COUNTED_AT_ONCE, Moment, Step
from pdproxy.legs.calls import ANSWER_BYTES
from pdproxy.nodes.node import Node, Role
from pdproxy.observe.labels import Leg, Outcome
from pdproxy.orchestration.access_log import cancelled_outcome, error_outcome
from pdproxy.orchestration.client_errors import final_error, no_node_error, remaining_seconds, unknown_model_error
from pdproxy.orchestration.context import OrchestrationContext
from pdproxy.orchestration.response import ProxyResponse
from pdproxy.planning.plan import NoNode, PlanInput, UnknownModel, choose, models
from pdproxy.request import Headers, cancelled_by_client
from pdproxy.transport.port import HttpRequest, read_to_end

_KEPT = ("content-type", "retry-after", "www-authenticate")


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardRequest:
    """A request that one node answers.

    Attributes:
        method: as the client sent it.
        path: with its query string, already judged by intake to be allowed.
        headers: the client's end-to-end headers.
        body: as it came.
        model: which pool; "" for any.
        deadline: monotonic seconds by which the whole request must have ended.
        left: whether the client has gone.
    """

    method: str
    path: str
    headers: Headers
    body: bytes
    model: str
    deadline: float
    left: Callable[[], bool] = cancelled_by_client


async def forward(context: OrchestrationContext, asked: ForwardRequest) -> ProxyResponse:
    """The reply of a decode node. Another one is asked only where the first could not be reached at all.

    Raises:
        ClientError: no such model, no node, too late, or the node failed.
    """
    outcome = Outcome.FAILED
    try:
        reply = await _answer(context, asked)
        outcome = Outcome.OK if reply.status < 400 else error_outcome(reply.status)
    except ClientError as error:
        outcome = error_outcome(error.status)
        raise
    except asyncio.CancelledError:
        outcome = cancelled_outcome(asked.left)
        raise
    else:
        return reply
    finally:
        context.metrics.request_ended(None, outcome)


async def _answer(context: OrchestrationContext, asked: ForwardRequest) -> ProxyResponse:
    excluded: frozenset[str] = frozenset()
    while True:
        node = _choose(context, asked.model, excluded)
        try:
            return await _ask(context, node, asked)
        except NodeFault as fault:
            excluded |= {node.name}
            _failed(context, node, fault, asked)
            if fault.fault is not Fault.REFUSED or len(excluded) > context.config.retries:
                raise final_error(Leg.DECODE, Moment.OPENING, Step.FAIL, fault) from fault


async def _ask(context: OrchestrationContext, node: Node, asked: ForwardRequest) -> ProxyResponse:
    kept = tuple(pair for pair in asked.headers if pair[0] != "accept-encoding")
    there = HttpRequest(asked.method, node.url + asked.path, (*kept, ("accept-encoding", "identity")), asked.body)
    timeouts = context.config.decode_timeouts(remaining_seconds(context.clock, asked.deadline))
    with context.pool.acquire(node.name):
        response = await context.transport.send(there, timeouts)
        try:
            answer = await read_to_end(response, ANSWER_BYTES)
        finally:
            await response.aclose()
    if response.status < 500:  # the request may have caused it: a 5xx says nothing of the node, neither way
        context.pool.report(node.name, None)
    return ProxyResponse(response.status, tuple(pair for pair in response.headers if pair[0] in _KEPT), answer)


def _failed(context: OrchestrationContext, node: Node, fault: NodeFault, asked: ForwardRequest) -> None:
    """Count a fault; one that the request's own deadline made is not the node's.

    Raises:
        ClientError: 504 where it did.
    """
    context.metrics.leg_failed(Leg.FORWARD, fault.fault)
    remaining_seconds(context.clock, asked.deadline)
    if fault.fault in COUNTED_AT_ONCE:
        context.pool.report(node.name, fault.fault)


def _choose(context: OrchestrationContext, model: str, excluded: frozenset[str]) -> Node:
    snapshot = context.pool.snapshot()
    wanted = model or next(iter(models(snapshot)), "")
    try:
        return choose(snapshot, Role.DECODE, PlanInput(wanted, excluded=excluded), next(context.tie_breaker))
    except UnknownModel as error:
        raise unknown_model_error(error) from error
    except NoNode as error:
        raise no_node_error(error) from error
