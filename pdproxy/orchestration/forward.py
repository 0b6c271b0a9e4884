"""Requests that the proxy does not understand: one node answers, byte for byte, and as it comes."""

import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from pdproxy.errors import BrokenAnswer, ClientError, Fault, NodeFault
from pdproxy.failures import Blame, Moment, Step, blame
from pdproxy.legs.node_headers import for_client
from pdproxy.nodes.node import Node, Role
from pdproxy.nodes.outlier import FailureEvidence, LegOrigin
from pdproxy.observe.labels import Leg, Outcome
from pdproxy.orchestration.client_errors import cancelled_outcome, final_error, status_outcome, unknown_model_error
from pdproxy.orchestration.context import OrchestrationContext, remaining_seconds
from pdproxy.orchestration.failed_legs import FailedLegs
from pdproxy.orchestration.request_queue import QueuedPrompt
from pdproxy.orchestration.request_record import FailureRecord
from pdproxy.planning.plan import choose
from pdproxy.planning.plan_types import NoNode, PlanInput, UnknownModel
from pdproxy.request import Headers, HeldBody, header
from pdproxy.response import ProxyResponse, Sink
from pdproxy.transport.port import HttpRequest, HttpResponse, read_to_end


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardRequest:
    """A request that one node answers.

    Attributes:
        path: with its query string; intake has checked that it is allowed.
        headers: the client's end-to-end headers.
        held: the body.
        model: "" for any.
        deadline: monotonic seconds by which the whole request must have ended.
        left: whether the client has disconnected.
        api_key: the name of the client's API key; never the key itself.
    """

    request_id: str
    method: str
    path: str
    headers: Headers
    held: HeldBody[bytes]
    model: str
    deadline: float
    left: Callable[[], bool]
    api_key: str = ""


ANY_ROOM = ""
"""Where in the queue these requests wait: they take nothing of a decode node's caches for long, and wait only for their
turn to run. No model has this name."""


WHOLE_BYTES = 1024 * 1024
"""An answer that tells its length, and is no longer than this, is passed on in one piece."""


async def forward(
    context: OrchestrationContext,
    request: ForwardRequest,
    failure: FailureRecord,
    ended: Callable[[int, Outcome], None],
) -> ProxyResponse:
    """The response of a decode node; raises as `Orchestrator.forward`.

    Args:
        failure: is told of the nodes that are asked, and of their faults.
        ended: called with the status when a response that was returned has gone to the client, or cannot go on.
    """
    async with contextlib.AsyncExitStack() as held:
        queued_prompt = QueuedPrompt(context.queue, request.api_key, 0, 1, request.deadline)
        held.callback(queued_prompt.end)
        await queued_prompt.start_when_room(lambda _: True, lambda: ANY_ROOM)
        response = await _forward(context, request, failure, held, ended)
        request.held.drop()  # its node has answered: no other one is asked
    if isinstance(response.body, bytes):
        ended(response.status, status_outcome(response.status))
    return response


async def _forward(
    context: OrchestrationContext,
    request: ForwardRequest,
    failure: FailureRecord,
    held: contextlib.AsyncExitStack,
    ended: Callable[[int, Outcome], None],
) -> ProxyResponse:
    excluded: frozenset[str] = frozenset()
    origin = LegOrigin(request.request_id, request.api_key)
    failed = FailedLegs(context.pool, context.config, context.metrics, origin)
    while True:
        try:
            node = _choose(context, request.model, excluded)
        except NoNode as error:
            raise failed.no_node_left(error) from error
        async with contextlib.AsyncExitStack() as leg:
            try:
                failure.node = node.name
                response = await _send(context, node, request, leg)
                pieces = aiter(response)
                answer = await _whole(response)
                first = b"" if answer is not None else await _next(pieces)
            except NodeFault as fault:
                excluded |= {node.name}
                failure.leg_failed(Leg.FORWARD, node.name, fault)
                _record_fault(context, node, fault, request)
                step = failed.next_step(Leg.FORWARD, fault)
                if step is not Step.OTHER_NODE:
                    raise final_error(Leg.FORWARD, Moment.OPENING, step, fault) from fault
                continue
            if response.status < 500:
                context.pool.leg_served(node.name, Leg.FORWARD, request.api_key)
            else:
                _count(context, node, Fault.SERVER_ERROR, request, FailureEvidence.UNSERVED)
            headers = for_client(response.headers)
            if answer is not None:
                _require_known_path(response.status, answer, request.path)
                return ProxyResponse(response.status, headers, answer)
            held.push_async_exit(leg.pop_all())  # the stream holds all of it from here on
            on_end = functools.partial(ended, response.status)
            rest = Rest(response.status, first, pieces)
            body = ForwardedBody(context, node, request, failure, rest, held.pop_all(), on_end)
            return ProxyResponse(response.status, headers, body)


async def _send(
    context: OrchestrationContext, node: Node, request: ForwardRequest, leg: contextlib.AsyncExitStack
) -> HttpResponse:
    kept = tuple(pair for pair in request.headers if pair[0] != "accept-encoding")
    headers = (*kept, ("accept-encoding", "identity"))
    timeouts = context.config.decode_timeouts(remaining_seconds(context.clock, request.deadline))
    leg.enter_context(context.pool.acquire(node.name))
    response = await context.transport.send(
        HttpRequest(request.method, node.url + request.path, headers, request.held.content), timeouts
    )
    leg.push_async_callback(response.aclose)
    return response


async def _next(pieces: AsyncIterator[bytes]) -> bytes:
    """The next piece that is not empty; none at the end."""
    async for piece in pieces:
        if piece:
            return piece
    return b""


async def _whole(response: HttpResponse) -> bytes | None:
    """The body of a response that tells that it is short, or that has none; None for any other."""
    length = header(response.headers, "content-length")
    if response.status not in _BODILESS and (length is None or int(length) > WHOLE_BYTES):
        return None
    return await read_to_end(response, WHOLE_BYTES)


_BODILESS = frozenset({204, 304})


def _require_known_path(status: int, answer: bytes, path: str) -> None:
    """Raise the `ClientError` 404 for an answer of the node's web framework: it has no such path."""
    if status == 404 and answer == _NO_SUCH_PATH:
        text = f"The nodes do not serve {path.partition('?')[0]}: their model, or their flags, do not have it."
        raise ClientError(404, text, code="unknown_url")


_NO_SUCH_PATH = b'{"detail":"Not Found"}'
"""FastAPI's, of a path that it does not know."""


class Rest(NamedTuple):
    """The rest of an answer: the first piece, which was read already, and those that follow."""

    status: int
    first: bytes
    pieces: AsyncIterator[bytes]


class ForwardedBody:
    """The body of a node's answer, which goes to the client as it comes; a `ResponseStream`.

    A body that breaks off is cut for the client, too: nothing else shows that it is not complete. Its first
    piece was read before the head is sent, so that a node that fails before has an error answer, and not half of one.
    """

    def __init__(
        self,
        context: OrchestrationContext,
        node: Node,
        request: ForwardRequest,
        failure: FailureRecord,
        rest: Rest,
        held: contextlib.AsyncExitStack,
        ended: Callable[[Outcome], None],
    ) -> None:
        self._context = context
        self._node = node
        self._request = request
        self._failure = failure
        self._status, self._first, self._pieces = rest
        self._held = held
        self._ended: Callable[[Outcome], None] | None = ended

    async def read(self) -> bytes:
        """The next bytes; none at the end.

        Raises:
            BrokenAnswer: the node did not send all of it.
        """
        piece, self._first = self._first, b""
        try:
            piece = piece or await _next(self._pieces)
        except NodeFault as fault:
            self._failure.leg_failed(Leg.FORWARD, self._node.name, fault)
            self._end(Outcome.FAILED)
            _record_fault(self._context, self._node, fault, self._request)
            raise BrokenAnswer(f"{self._node.name} broke its answer to {self._request.path} off: {fault}") from fault
        if not piece:
            self._end(status_outcome(self._status))
            await self.aclose()
        return piece

    async def pipe_to(self, sink: Sink, chunk_sink: Sink | None = None) -> None:
        """Nothing: pieces are few, and `read` passes them on."""

    async def aclose(self) -> None:
        """Give the connection, the node and the place in the queue back. Idempotent."""
        self._end(cancelled_outcome(self._request.left))
        await self._held.aclose()

    def _end(self, outcome: Outcome) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(outcome)


def _record_fault(context: OrchestrationContext, node: Node, fault: NodeFault, request: ForwardRequest) -> None:
    """Count a fault; one that the request's own deadline made is a 504, and does not count against the node."""
    context.metrics.leg_failed(Leg.FORWARD, fault.fault)
    remaining_seconds(context.clock, request.deadline)
    match blame(Leg.FORWARD, fault.fault):
        case Blame.YES:
            _count(context, node, fault.fault, request, FailureEvidence.NODE)
        case Blame.IN_DOUBT:
            _count(context, node, fault.fault, request, FailureEvidence.UNSERVED)


def _count(
    context: OrchestrationContext, node: Node, fault: Fault, request: ForwardRequest, evidence: FailureEvidence
) -> None:
    """No other node is asked, so that nobody knows whether the request is the cause of its fault."""
    origin = LegOrigin(request.request_id, request.api_key)
    context.pool.leg_failed(node.name, Leg.FORWARD, fault, origin, evidence)


def _choose(context: OrchestrationContext, model: str, excluded: frozenset[str]) -> Node:
    pool_state = context.pool.state()
    needs = PlanInput(model or next(iter(pool_state.models), ""), excluded=excluded)
    try:
        return choose(pool_state, Role.DECODE, needs, context.plan_policy, next(context.tie_breaker))
    except UnknownModel as error:
        raise unknown_model_error(error) from error
