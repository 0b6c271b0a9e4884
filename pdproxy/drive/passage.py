"""One prompt's way through plan, prefill and decode, up to a leg that answers.

All that is held meanwhile is in `Holdings`: `aclose` gives it back, whenever it comes.
"""

import dataclasses
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pdproxy.drive.conduct import Conduct
from pdproxy.drive.deadline import over, remaining
from pdproxy.drive.errands import Errands
from pdproxy.drive.given_up import unless_given_up
from pdproxy.drive.handover import HandOver
from pdproxy.drive.holdings import Holdings
from pdproxy.drive.job import Job
from pdproxy.drive.length import estimated_tokens
from pdproxy.drive.live import Failure
from pdproxy.drive.means import Means
from pdproxy.drive.planner import Planner
from pdproxy.drive.settlement import settle
from pdproxy.drive.timeline import Timeline
from pdproxy.drive.tries import Tries
from pdproxy.drive.verdict import from_client, unknown_model, verdict
from pdproxy.drive.why import Why
from pdproxy.errors import Fault, NodeFault
from pdproxy.failures import Moment, Step
from pdproxy.legs.body import decode_body, prefill_body
from pdproxy.legs.decode import decode
from pdproxy.legs.prefill import prefill
from pdproxy.legs.tally import Tally
from pdproxy.lifecycle import Life, Move
from pdproxy.nodes.node import Node
from pdproxy.observe.labels import Leg, Phase
from pdproxy.planning.plan import NoNode, Plan, UnknownModel
from pdproxy.request import Addition, Endpoint, Json
from pdproxy.transport.port import Incoming

_log = logging.getLogger(__name__)
_NOTHING_HELD = frozenset({Fault.REFUSED, Fault.BUSY, Fault.CLIENT_ERROR, Fault.NO_TICKET})
"""Prefill faults after which the node surely holds nothing for us."""
Got = TypeVar("Got")


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """What goes to the nodes.

    Attributes:
        body: the client's, or its continuation.
        additions: what the decode leg asks for on top.
    """

    body: Json
    additions: frozenset[Addition]


class Passage:
    """Whoever makes one must `aclose` it, on every exit.

    Args:
        means: dependencies.
        errands: for releases that outlive the request.
        job: what has to be answered.
        timeline: of the client's request.
    """

    def __init__(self, means: Means, errands: Errands, job: Job, timeline: Timeline) -> None:
        self._means = means
        self._errands = errands
        self._job = job
        self._timeline = timeline
        self.recomputed = False
        """The decode node had a ticket and computed the prompt all the same, as far as it told."""
        self._life = Life()
        self._conduct = Conduct(means.pool)
        self._planner = Planner(means, job, self._conduct)
        self._tries = Tries(means)
        self._node: Node | None = None
        self.holdings = Holdings(means.pool, means.metrics, errands, job)
        self.hand_over: HandOver | None = None
        """The ticket that the decode leg has; None where it computes the prompt itself."""

    @property
    def node_name(self) -> str:
        """The decode node that was chosen last; "" before there is one."""
        return "" if self._node is None else self._node.name

    async def open(self, ask: Ask, listen: Callable[[Incoming], Awaitable[Got]]) -> Got:
        """Bring a request to a decode node; what ``listen`` made of the answer.

        Raises:
            ClientError: all chances are used up.
            Answered: a node's own error goes to the client.
        """
        self._tries = Tries(self._means)
        self._planner.anew()
        node = await self._obtain(ask.body)
        while True:
            try:
                return await self._attempt(node, ask, listen)
            except NodeFault as raised:
                fault = from_client(raised)
            await self.holdings.hang_up()
            node = await self._elsewhere(self._judge(Leg.DECODE, node, fault), fault, ask.body)

    async def _elsewhere(self, step: Step, fault: NodeFault, body: Json) -> Node:
        """The decode node that gets the next try."""
        if step is Step.SAME_TICKET and self.hand_over is not None:
            other = self._planner.other_decode(self.hand_over.node)
            if other is not None:
                self._life.move(Move.SAME_TICKET)
                return self._take(other)
        if step in (Step.SAME_TICKET, Step.PREFILL_AGAIN):
            self._life.move(Move.AGAIN)
            self.holdings.abandon()
            return await self._obtain(body)
        raise verdict(Leg.DECODE, Moment.OPENING, step, fault)

    async def _obtain(self, body: Json) -> Node:
        """Plan and prefill until a ticket is here, or the decode node is to compute alone; that decode node."""
        self.hand_over = None
        while (chosen := self._plan()).prefill is not None:
            self._life.move(Move.PREFILL)
            try:
                self.hand_over = await self._prefill(chosen.prefill, body)
            except NodeFault as raised:
                self._after_prefill(chosen.prefill, from_client(raised))
            else:
                self._life.move(Move.TICKET)
                return chosen.decode
        self._means.metrics.planned_local(Why.of(chosen.reason))
        self._life.move(Move.LOCAL)
        return chosen.decode

    def _after_prefill(self, node: Node, fault: NodeFault) -> None:
        match self._judge(Leg.PREFILL, node, fault):
            case Step.OTHER_PREFILL:
                pass
            case Step.LOCAL:
                self._planner.without_prefill(Why.PREFILL_FAILED)
            case step:
                raise verdict(Leg.PREFILL, Moment.OPENING, step, fault)
        self._life.move(Move.AGAIN)

    def _judge(self, leg: Leg, node: Node, fault: NodeFault) -> Step:
        step = self._tries.judge(leg, fault, self.hand_over)
        self.show_failure(leg, node.name, fault, step)
        return step

    async def _prefill(self, node: Node, body: Json) -> HandOver:
        job, means = self._job, self._means
        name = means.name()
        leg = prefill_body(job.endpoint, body, name, job.shape.choices)
        patience = means.terms.prefill_patience(self.remaining())
        place = self.holdings.begin_prefill(node, name, estimated_tokens(body))
        self._timeline.enter(Phase.PREFILL, node.name)
        try:
            async with unless_given_up(place, self._planner.possible):
                answer = await prefill(means.transport, node, job.endpoint, leg, job.headers, patience)
        except NodeFault as fault:
            self._failed(Leg.PREFILL, node.name, fault)
            if fault.fault in _NOTHING_HELD:
                self.holdings.settled()
            self.holdings.abandon()
            raise
        finally:
            self.holdings.end_prefill()
        self._conduct.served(Leg.PREFILL, node.name)
        return HandOver(name, node, answer, means.clock.now())

    async def _attempt(self, node: Node, ask: Ask, listen: Callable[[Incoming], Awaitable[Got]]) -> Got:
        job, means = self._job, self._means
        ticket = None if self.hand_over is None else self.hand_over.ticket()
        leg = decode_body(job.endpoint, ask.body, ticket, ask.additions)
        patience = means.terms.decode_patience(self.remaining())
        self._timeline.enter(Phase.HANDOVER, node.name)
        try:
            async with unless_given_up(self.holdings.place, self._planner.possible):
                incoming = await decode(means.transport, node, job.endpoint, leg, job.headers, patience)
                self._timeline.enter(Phase.DECODE, node.name)
                got = await listen(self.holdings.keep(incoming))
        except NodeFault as fault:
            self._failed(Leg.DECODE, node.name, from_client(fault))
            raise
        self._life.move(Move.FIRST_EVENT)
        if _reads_at_once(job):
            self.holdings.settled()
        self._conduct.served(Leg.DECODE, node.name)
        return got

    def _plan(self) -> Plan:
        self._timeline.enter(Phase.PLAN)
        try:
            chosen = self._planner.plan()
        except UnknownModel as error:
            raise unknown_model(error) from error
        except NoNode as error:
            raise self._tries.nobody(error) from error
        self._take(chosen.decode)
        return chosen

    def _take(self, decode_node: Node) -> Node:
        """Occupied from the plan on, so that the plans that follow see the load."""
        self.holdings.occupy(decode_node)
        self._node = decode_node
        return decode_node

    def _failed(self, leg: Leg, name: str, fault: NodeFault) -> None:
        """Count a fault; one that our own deadline made is not the node's."""
        job = self._job
        self._means.metrics.leg_failed(leg, fault.fault)
        level = logging.INFO if fault.fault is Fault.CLIENT_ERROR else logging.WARNING
        _log.log(level, "request %s: %s leg on %s: %s: %s", job.name, leg, name, fault.fault, fault.detail)
        if not self.late:
            self._conduct.failed(leg, name, fault.fault)

    async def leave(self) -> None:
        """The stream has to move: end its leg, have freed what it may not have read, do not come back to its node."""
        self._life.move(Move.MIGRATE)
        self.holdings.abandon()
        self._conduct.forgive()
        self._conduct.shun(self.node_name)
        await self.holdings.hang_up()

    async def aclose(self) -> None:
        """Give everything back. Idempotent."""
        self._life.move(Move.END)
        await self.holdings.aclose()

    def leg_failed(self, fault: NodeFault) -> None:
        """The decode leg failed after its first event."""
        self._failed(Leg.DECODE, self.node_name, fault)

    def show_failure(self, leg: Leg, node: str, fault: NodeFault, step: Step) -> None:
        """Let the operator see a leg's failure, and what is done about it."""
        failure = Failure(self._means.clock.now(), self._job.name, leg, node, fault.fault, step)
        self._means.live.failed(self._job.request, failure)

    def elsewhere(self) -> bool:
        """Whether another decode node could take over now."""
        self._conduct.shun(self.node_name)
        return self._planner.elsewhere()

    def settle(self, tally: Tally) -> None:
        """A decode leg told its usage."""
        self.recomputed = settle(self._means, self._errands, self._job, self.hand_over, tally)

    @property
    def late(self) -> bool:
        """Whether the request's deadline has come."""
        return over(self._means.clock, self._job.request.deadline)

    def remaining(self) -> float:
        """Seconds of the request's deadline that are left.

        Raises:
            ClientError: 504 where none are.
        """
        return remaining(self._means.clock, self._job.request.deadline)


def _reads_at_once(job: Job) -> bool:
    """Whether a decode leg's first event proves that the hand-over was read.

    The first of several choices may come before the others have read; and a stream of responses begins with events
    about itself. There the hand-over counts as unread until the stream ends well: releasing once more does no harm.
    """
    return not job.shape.stream or (job.shape.choices == 1 and job.endpoint is not Endpoint.RESPONSES)
