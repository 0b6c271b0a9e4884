"""Both legs of a request under way at once: the decode leg waits on its node until its ticket is brought to it.

::

    the request's task     decode leg ─────────── waits ───────────────── first event
    a task of its own      prefill leg(s) ── ticket ── delivery ─┘

Where the decode node says where it takes tickets, the prefill node sends it there, too: the delivery then mostly comes
second, and changes nothing. The decode leg may move to another node while its ticket is made, and either task may fail
at any moment. What follows then is `upstream`'s business; this is how the two meet.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Iterator

from pdproxy.clock import first_of
from pdproxy.errors import NodeFault, PdproxyError, untraced
from pdproxy.legs.calls import deliver_ticket
from pdproxy.legs.rewrite import sent_to, waiting
from pdproxy.nodes.node import Node
from pdproxy.observe.labels import Delivery, Leg, Phase
from pdproxy.orchestration.context import OrchestrationContext, remaining_seconds
from pdproxy.orchestration.in_flight import Timeline
from pdproxy.orchestration.resources import HandOver, Interrupt
from pdproxy.request import Endpoint, Json, SubRequest
from pdproxy.transport.port import DeadlineHold, Timeouts

ANSWER_SECONDS = 0.1
"""A first event may overtake the answer of the prefill leg whose ticket it had from the prefill node. Waited for at
most so long: a node that did not wait, and is ahead of a prefill that is under way, is not made slower by more."""


def can_wait(context: OrchestrationContext, sub_request: SubRequest, node: Node) -> bool:
    """Whether a decode leg may go to this node before its ticket, where the policy has legs go out together.

    A stream of responses may not: it begins with events about itself, before anything was computed, and the first event
    has to show that the node waits no more.
    """
    if not node.can_wait:
        return False
    if sub_request.shape.stream and sub_request.endpoint is Endpoint.RESPONSES:
        return False
    return context.waiting_places.free(node.name, sub_request.shape.choices, context.clock.now())


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class WaitingLeg:
    """A decode leg that waits for its ticket.

    Attributes:
        timeouts: their hold keeps the leg's deadlines from running until it has its ticket.
        hold: that hold.
        give_back: its place among those that wait on the node; may be called twice.
        interrupt: ends the leg with an error.
        instead: what stands in its body in the place of the ticket.
    """

    node: Node
    wait_id: str
    timeouts: Timeouts
    hold: DeadlineHold
    give_back: Callable[[], None]
    interrupt: Interrupt
    instead: Json

    def end_wait(self) -> None:
        """It waits no more. Idempotent."""
        self.hold.release()
        self.give_back()


class Undelivered(PdproxyError):
    """A ticket could not be brought to the decode leg that waits on ``node``."""

    def __init__(self, node: Node, fault: NodeFault) -> None:
        super().__init__(f"no delivery to {node.name}: {fault}")
        self.node = node
        self.fault = untraced(fault)


class PlanAgain(PdproxyError):
    """No prefill node that is left can hand over to the decode node that waits, but other nodes can to each other."""


async def deliver_nothing(context: OrchestrationContext, sub_request: SubRequest, leg: WaitingLeg) -> None:
    """Tell a node that has begun to answer that no ticket will come: should it wait all the same, it computes now."""
    timeouts = context.config.delivery_timeouts(context.config.release)
    try:
        await deliver_ticket(context.transport, leg.node, leg.wait_id, None, sub_request.headers, timeouts)
    except NodeFault as fault:
        context.metrics.leg_failed(Leg.DELIVERY, fault.fault)


class Rendezvous:
    """Prefills in a task of its own, and brings what comes of it to the decode leg that waits then.

    The holder must `aclose` it, on every exit.

    Args:
        node: where the first decode leg goes.
        prefill: the hand-over, or None where the decode node is to compute. What it raises interrupts the decode leg.

    Attributes:
        prefilled: there is a ticket, or none is to come.
        told: a leg that waited was told so.
    """

    def __init__(
        self,
        context: OrchestrationContext,
        sub_request: SubRequest,
        timeline: Timeline,
        node: Node,
        prefill: Callable[[], Awaitable[HandOver | None]],
    ) -> None:
        self._context = context
        self._sub_request = sub_request
        self._timeline = timeline
        self._leg: WaitingLeg | None = None
        self._next: tuple[Node, str] | None = (node, context.new_hand_over_id())
        self._prefill_ended = asyncio.Event()
        self.prefilled = self.told = False
        self._task = asyncio.get_running_loop().create_task(self._run(prefill))
        self._task.add_done_callback(self._interrupt_leg)

    @property
    def pending(self) -> bool:
        """Whether a leg that begins to wait now would be told: a prefill or a delivery is under way."""
        return not self._task.done()

    @contextlib.contextmanager
    def waiting(self, node: Node, interrupt: Interrupt) -> Iterator[WaitingLeg]:
        """A decode leg waits inside; afterwards it is no longer told anything.

        The node is let to wait for as long as the request may last: a prefill that is slow, or that is tried again,
        must not make it compute the prompt too.
        """
        context, hold, wait_id = self._context, DeadlineHold(), self._take_wait_id(node)
        seconds = self._remaining_seconds()
        timeouts = context.config.waiting_timeouts(seconds, hold)
        give_back = context.waiting_places.take(node.name, self._sub_request.shape.choices)
        leg = WaitingLeg(node, wait_id, timeouts, hold, give_back, interrupt, waiting(wait_id, seconds))
        self._leg = leg
        self._timeline.assign(Phase.HANDOVER, node.name)
        try:
            yield leg
        finally:
            self._leg = None
            leg.end_wait()

    def send_ticket(self) -> Json | None:
        """Where the ticket of a prefill leg that begins now is waited for: by the leg that waits, or is about to. None
        for several choices: their first event does not say that all have read."""
        if self._sub_request.shape.choices > 1:
            return None
        node, wait_id = (self._leg.node, self._leg.wait_id) if self._leg is not None else self._next or (None, "")
        return sent_to(wait_id, node.ticket_addresses) if node is not None and node.ticket_addresses else None

    def _take_wait_id(self, node: Node) -> str:
        """That of the first leg is known before it goes out, for the prefill leg names it."""
        known, self._next = self._next, None
        return known[1] if known is not None and known[0].name == node.name else self._context.new_hand_over_id()

    async def prefill_ended(self, leg: WaitingLeg) -> None:
        """After a first event: return when there is a ticket, none is to come, or it takes too long; at once where the
        leg cannot have had one."""
        direct = leg.node.ticket_addresses and self._sub_request.shape.choices == 1
        if direct and not self._prefill_ended.is_set():
            await first_of(self._prefill_ended.wait(), self._context.clock.sleep(ANSWER_SECONDS))

    async def result(self) -> None:
        """Return when there is a ticket or none is to come; raises what ``prefill`` raised, and `Undelivered`."""
        await self._task

    async def aclose(self) -> None:
        """End the prefill, or the delivery. Idempotent."""
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def _run(self, prefill: Callable[[], Awaitable[HandOver | None]]) -> None:
        try:
            hand_over = await prefill()
            self.prefilled = True
        finally:
            self._prefill_ended.set()
        told: WaitingLeg | None = None
        while (leg := self._leg) is not None and leg is not told:
            try:
                await self._deliver(leg, hand_over)
            except NodeFault as fault:
                if leg is self._leg:
                    raise Undelivered(leg.node, fault) from fault
            else:
                self.told = True
            leg.end_wait()
            told = leg

    async def _deliver(self, leg: WaitingLeg, hand_over: HandOver | None) -> None:
        context, headers = self._context, self._sub_request.headers
        ticket = None if hand_over is None else hand_over.answer.ticket
        self._timeline.enter(Phase.HANDOVER, leg.node.name)
        timeouts = context.config.delivery_timeouts(self._remaining_seconds())
        try:
            await deliver_ticket(context.transport, leg.node, leg.wait_id, ticket, headers, timeouts)
        except NodeFault:
            context.metrics.delivered(Delivery.FAILED)
            raise
        context.metrics.delivered(Delivery.NONE if ticket is None else Delivery.TICKET)

    def _remaining_seconds(self) -> float:
        return remaining_seconds(self._context.clock, self._sub_request.request.deadline)

    def _interrupt_leg(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and self._leg is not None:
            self._leg.interrupt(error)
