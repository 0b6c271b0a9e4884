"""Requests that the proxy does not understand: one node answers, byte for byte."""

import asyncio
import dataclasses
from collections.abc import Callable

from pdproxy.drive.account import cut, outcome_of
from pdproxy.drive.deadline import remaining
from pdproxy.drive.means import Means
from pdproxy.drive.reply import Reply
from pdproxy.drive.verdict import no_node, unknown_model, verdict
from pdproxy.errors import ClientError, Fault, NodeFault
from pdproxy.failures import BLAMED, Moment, Step
from pdproxy.legs.judge import ANSWER_BYTES
from pdproxy.nodes.node import Node, Role
from pdproxy.observe.labels import Leg, Outcome
from pdproxy.planning.plan import Needs, NoNode, UnknownModel, choose, models
from pdproxy.request import Headers, unwatched
from pdproxy.transport.port import Outgoing

_KEPT = ("content-type", "retry-after", "www-authenticate")


@dataclasses.dataclass(frozen=True, slots=True)
class Forwarded:
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
    left: Callable[[], bool] = unwatched


async def forward(means: Means, asked: Forwarded) -> Reply:
    """The reply of a decode node. Another one is asked only where the first could not be reached at all.

    Raises:
        ClientError: no such model, no node, too late, or the node failed.
    """
    outcome = Outcome.FAILED
    try:
        reply = await _answer(means, asked)
        outcome = Outcome.OK if reply.status < 400 else outcome_of(reply.status)
    except ClientError as error:
        outcome = outcome_of(error.status)
        raise
    except asyncio.CancelledError:
        outcome = cut(asked.left)
        raise
    else:
        return reply
    finally:
        means.metrics.request_ended(None, outcome)


async def _answer(means: Means, asked: Forwarded) -> Reply:
    avoided: frozenset[str] = frozenset()
    while True:
        node = _choose(means, asked.model, avoided)
        try:
            return await _ask(means, node, asked)
        except NodeFault as fault:
            avoided |= {node.name}
            _failed(means, node, fault, asked)
            if fault.fault is not Fault.REFUSED or len(avoided) > means.terms.retries:
                raise verdict(Leg.DECODE, Moment.OPENING, Step.FAIL, fault) from fault


async def _ask(means: Means, node: Node, asked: Forwarded) -> Reply:
    kept = tuple(pair for pair in asked.headers if pair[0] != "accept-encoding")
    there = Outgoing(asked.method, node.url + asked.path, (*kept, ("accept-encoding", "identity")), asked.body)
    patience = means.terms.decode_patience(remaining(means.clock, asked.deadline))
    with means.pool.occupy(node.name):
        incoming = await means.transport.send(there, patience)
        try:
            answer = await incoming.read(ANSWER_BYTES)
        finally:
            await incoming.aclose()
    if incoming.status < 500:  # the request may have caused it: a 5xx says nothing of the node, neither way
        means.pool.report(node.name, None)
    return Reply(incoming.status, tuple(pair for pair in incoming.headers if pair[0] in _KEPT), answer)


def _failed(means: Means, node: Node, fault: NodeFault, asked: Forwarded) -> None:
    """Count a fault; one that the request's own deadline made is not the node's.

    Raises:
        ClientError: 504 where it did.
    """
    means.metrics.leg_failed(Leg.FORWARD, fault.fault)
    remaining(means.clock, asked.deadline)
    if fault.fault in BLAMED:
        means.pool.report(node.name, fault.fault)


def _choose(means: Means, model: str, avoided: frozenset[str]) -> Node:
    snapshot = means.pool.snapshot()
    wanted = model or next(iter(models(snapshot)), "")
    try:
        return choose(snapshot, Role.DECODE, Needs(wanted, excluded=avoided), next(means.turns))
    except UnknownModel as error:
        raise unknown_model(error) from error
    except NoNode as error:
        raise no_node(error) from error
