"""Requests that the proxy does not understand: one node answers, byte for byte."""

import dataclasses
from collections import Counter
from collections.abc import Callable

from pdproxy.errors import Fault, NodeFault
from pdproxy.failures import Blame, Moment, Step, blame
from pdproxy.legs.calls import ANSWER_BYTES
from pdproxy.nodes.node import Node, Role
from pdproxy.nodes.outlier import Source, Verdict
from pdproxy.observe.labels import Leg
from pdproxy.orchestration.client_errors import final_error, unknown_model_error
from pdproxy.orchestration.context import OrchestrationContext, remaining_seconds
from pdproxy.orchestration.failure_record import FailureRecord
from pdproxy.orchestration.node_picker import RetryState
from pdproxy.orchestration.request_queue import Asked
from pdproxy.orchestration.resources import Admission
from pdproxy.planning.plan import choose
from pdproxy.planning.plan_types import NoNode, PlanInput, UnknownModel
from pdproxy.request import Headers
from pdproxy.response import ProxyResponse
from pdproxy.transport.port import HttpRequest, read_to_end

_KEPT = ("content-type", "retry-after", "www-authenticate")


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardRequest:
    """A request that one node answers.

    Attributes:
        path: with its query string; intake has checked that it is allowed.
        headers: the client's end-to-end headers.
        model: "" for any.
        deadline: monotonic seconds by which the whole request must have ended.
        left: whether the client has disconnected.
        api_key: the name of the client's API key; never the key itself.
    """

    request_id: str
    method: str
    path: str
    headers: Headers
    body: bytes
    model: str
    deadline: float
    left: Callable[[], bool]
    api_key: str = ""


ANY_ROOM = ""
"""Where in the queue these requests wait: they take nothing of a decode node's caches for long, and wait only for their
turn to run. No model has this name."""


async def forward(context: OrchestrationContext, request: ForwardRequest, failure: FailureRecord) -> ProxyResponse:
    """The response of a decode node; raises as `Orchestrator.forward`.

    ``failure``: is told of the nodes that are asked, and of their faults.
    """
    admission = Admission(context.queue, context.clock, Asked(request.api_key, 0, 1, request.deadline))
    try:
        await admission.begin(lambda _: True, lambda: ANY_ROOM)
        return await _forward(context, request, failure)
    finally:
        admission.end()


async def _forward(context: OrchestrationContext, request: ForwardRequest, failure: FailureRecord) -> ProxyResponse:
    excluded: frozenset[str] = frozenset()
    retry_state = RetryState(context, Counter())
    while True:
        try:
            node = _choose(context, request.model, excluded)
        except NoNode as error:
            raise retry_state.no_node_left(error) from error
        try:
            failure.node = node.name
            return await _send(context, node, request)
        except NodeFault as fault:
            excluded |= {node.name}
            failure.leg_failed(Leg.FORWARD, node.name, fault)
            _record_fault(context, node, fault, request)
            step = retry_state.next_step(Leg.FORWARD, fault)
            if step is not Step.OTHER_NODE:
                raise final_error(Leg.FORWARD, Moment.OPENING, step, fault) from fault


async def _send(context: OrchestrationContext, node: Node, request: ForwardRequest) -> ProxyResponse:
    kept = tuple(pair for pair in request.headers if pair[0] != "accept-encoding")
    headers = (*kept, ("accept-encoding", "identity"))
    timeouts = context.config.decode_timeouts(remaining_seconds(context.clock, request.deadline))
    with context.pool.acquire(node.name):
        response = await context.transport.send(
            HttpRequest(request.method, node.url + request.path, headers, request.body), timeouts
        )
        try:
            answer = await read_to_end(response, ANSWER_BYTES)
        finally:
            await response.aclose()
    if response.status < 500:
        context.pool.leg_began(node.name, Leg.FORWARD)
        context.pool.leg_ended(node.name, Leg.FORWARD, request.api_key)
    else:
        _count(context, node, Fault.SERVER_ERROR, request, Verdict.UNSERVED)
    return ProxyResponse(response.status, tuple(pair for pair in response.headers if pair[0] in _KEPT), answer)


def _record_fault(context: OrchestrationContext, node: Node, fault: NodeFault, request: ForwardRequest) -> None:
    """Count a fault; one that the request's own deadline made is a 504, and does not count against the node."""
    context.metrics.leg_failed(Leg.FORWARD, fault.fault)
    remaining_seconds(context.clock, request.deadline)
    match blame(Leg.FORWARD, fault.fault):
        case Blame.YES:
            _count(context, node, fault.fault, request, Verdict.NODE)
        case Blame.IN_DOUBT:
            _count(context, node, fault.fault, request, Verdict.UNSERVED)


def _count(context: OrchestrationContext, node: Node, fault: Fault, request: ForwardRequest, verdict: Verdict) -> None:
    """No other node is asked, so that nobody knows whether the request is the cause of its fault."""
    source = Source(request.request_id, request.api_key)
    context.pool.leg_failed(node.name, Leg.FORWARD, fault, source, verdict)


def _choose(context: OrchestrationContext, model: str, excluded: frozenset[str]) -> Node:
    snapshot = context.pool.snapshot()
    needs = PlanInput(model or next(iter(snapshot.roster.models), ""), excluded=excluded)
    try:
        return choose(snapshot, Role.DECODE, needs, context.config.plan_policy(), next(context.tie_breaker))
    except UnknownModel as error:
        raise unknown_model_error(error) from error
