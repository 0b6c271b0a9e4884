"""One prompt's way through plan, prefill and decode, with its retries, up to a decode leg that answers.

Everything that it holds meanwhile is in `HeldResources`: `aclose` gives it back, whenever it is called.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pdproxy.errors import Fault, NodeFault
from pdproxy.failures import Moment, Step
from pdproxy.legs.calls import NOTHING_HELD, decode, prefill
from pdproxy.legs.rewrite import decode_body, prefill_body
from pdproxy.legs.shape import estimated_prompt_tokens
from pdproxy.lifecycle import RequestLifecycle, Transition
from pdproxy.nodes.node import Node
from pdproxy.observe.labels import Leg, Phase
from pdproxy.orchestration.access_log import record_usage
from pdproxy.orchestration.client_errors import deadline_passed, final_error, remaining_seconds, unknown_model_error
from pdproxy.orchestration.context import OrchestrationContext
from pdproxy.orchestration.in_flight import LegFailure, Timeline
from pdproxy.orchestration.node_picker import FaultReporter, NodePicker, RetryState
from pdproxy.orchestration.resources import BackgroundTasks, HandOver, HeldResources, fail_if_node_down
from pdproxy.planning.plan import NoNode, Plan, UnknownModel
from pdproxy.request import Addition, Endpoint, Json, LocalReason, SubRequest
from pdproxy.transport.port import HttpResponse
from pdproxy.usage import Usage

_LOG = logging.getLogger(__name__)
Result = TypeVar("Result")


class UpstreamRequest:
    """A sub-request on its way through the nodes. The holder must `aclose` it, on every exit.

    Attributes:
        hand_over: the ticket of the decode leg; None where the decode node computes the prompt itself.
        recomputed: the decode node had a ticket and computed the prompt all the same, as far as its usage shows.
        node_name: the decode node that was chosen last; "" before there is one.
    """

    def __init__(
        self,
        context: OrchestrationContext,
        background_tasks: BackgroundTasks,
        sub_request: SubRequest,
        timeline: Timeline,
    ) -> None:
        self._context = context
        self._background_tasks = background_tasks
        self._timeline = timeline
        self._life = RequestLifecycle()
        self._fault_reporter = FaultReporter(context.pool)
        self._node_picker = NodePicker(context, sub_request, self._fault_reporter)
        self._retry_state = RetryState(context)
        self.sub_request = sub_request
        self.resources = HeldResources(context, background_tasks, sub_request)
        self.hand_over: HandOver | None = None
        self.recomputed = False
        self.node_name = ""

    async def start(
        self, body: Json, additions: frozenset[Addition], read_answer: Callable[[HttpResponse], Awaitable[Result]]
    ) -> Result:
        """Send a body (the client's, or its continuation) to the nodes; what ``read_answer`` makes of the answer.

        Raises:
            ClientError: every retry failed, or none is left.
            UpstreamErrorResponse: a node's own error goes to the client.
        """
        self._retry_state = RetryState(self._context)
        self._node_picker.reset()
        node = await self._plan_and_prefill(body)
        while True:
            try:
                ticket = None if self.hand_over is None else self.hand_over.answer.ticket
                return await self._decode_on(
                    node, decode_body(self.sub_request.endpoint, body, ticket, additions), read_answer
                )
            except NodeFault as fault:
                step = self._next_step(Leg.DECODE, node, fault)
                await self.resources.close_decode_leg()
                node = await self._next_decode_node(step, fault, body)

    async def _next_decode_node(self, step: Step, fault: NodeFault, body: Json) -> Node:
        """The decode node for the next try."""
        if step is Step.SAME_TICKET and self.hand_over is not None:
            other = self._node_picker.other_decode(self.hand_over.node)
            if other is not None:
                self._life.move(Transition.SAME_TICKET)
                return self._acquire_decode(other)
        if step in (Step.SAME_TICKET, Step.PREFILL_AGAIN):
            self._life.move(Transition.AGAIN)
            self.resources.release_hand_over()
            return await self._plan_and_prefill(body)
        raise final_error(Leg.DECODE, Moment.OPENING, step, fault)

    async def _plan_and_prefill(self, body: Json) -> Node:
        """Plan and prefill until there is a ticket, or the decode node is to compute alone; that decode node."""
        self.hand_over = None
        while (chosen := self._plan()).prefill is not None:
            self._life.move(Transition.PREFILL)
            try:
                self.hand_over = await self._prefill(chosen.prefill, body)
            except NodeFault as fault:
                self._after_failed_prefill(chosen.prefill, fault)
            else:
                self._life.move(Transition.TICKET)
                return chosen.decode
        if chosen.local is not None:
            self._context.metrics.planned_local(chosen.local)
        self._life.move(Transition.LOCAL)
        return chosen.decode

    def _after_failed_prefill(self, node: Node, fault: NodeFault) -> None:
        match self._next_step(Leg.PREFILL, node, fault):
            case Step.OTHER_PREFILL:
                pass
            case Step.LOCAL:
                self._node_picker.without_prefill(LocalReason.PREFILL_FAILED)
            case step:
                raise final_error(Leg.PREFILL, Moment.OPENING, step, fault)
        self._life.move(Transition.AGAIN)

    def _next_step(self, leg: Leg, node: Node, fault: NodeFault) -> Step:
        self.record_fault(leg, node.name, fault)
        step = self._retry_state.next_step(leg, fault, self.hand_over)
        self.record_step(leg, node.name, fault, step)
        return step

    async def _prefill(self, node: Node, body: Json) -> HandOver:
        sub_request, context = self.sub_request, self._context
        hand_over_id = context.new_hand_over_id()
        leg = prefill_body(sub_request.endpoint, body, hand_over_id, sub_request.shape.choices)
        timeouts = context.config.prefill_timeouts(self.remaining_seconds())
        self._timeline.enter(Phase.PREFILL, node.name)
        try:
            with self.resources.prefilling(node, hand_over_id, estimated_prompt_tokens(body)) as slot:
                async with fail_if_node_down(slot, self._node_picker.possible):
                    answer = await prefill(
                        context.transport, node, sub_request.endpoint, leg, sub_request.headers, timeouts
                    )
        except NodeFault as fault:
            if fault.fault in NOTHING_HELD:
                self.resources.forget_hand_over()
            self.resources.release_hand_over()
            raise
        self._fault_reporter.served(Leg.PREFILL, node.name)
        return HandOver(hand_over_id, node, answer, context.clock.now())

    async def _decode_on(
        self, node: Node, leg: Json, read_answer: Callable[[HttpResponse], Awaitable[Result]]
    ) -> Result:
        sub_request, context = self.sub_request, self._context
        timeouts = context.config.decode_timeouts(self.remaining_seconds())
        self._timeline.enter(Phase.HANDOVER, node.name)
        async with fail_if_node_down(self.resources.slot, self._node_picker.possible):
            response = await decode(context.transport, node, sub_request.endpoint, leg, sub_request.headers, timeouts)
            self._timeline.enter(Phase.DECODE, node.name)
            result = await read_answer(self.resources.hold_response(response))
        self._life.move(Transition.FIRST_EVENT)
        if _first_event_proves_read(sub_request):
            self.resources.forget_hand_over()
        self._fault_reporter.served(Leg.DECODE, node.name)
        return result

    def _plan(self) -> Plan:
        self._timeline.enter(Phase.PLAN)
        try:
            chosen = self._node_picker.plan()
        except UnknownModel as error:
            raise unknown_model_error(error) from error
        except NoNode as error:
            raise self._retry_state.no_node_left(error) from error
        self._acquire_decode(chosen.decode)
        return chosen

    def _acquire_decode(self, decode_node: Node) -> Node:
        """Take its slot from the plan on, so that the plans that follow see the load."""
        self.resources.acquire(decode_node)
        self.node_name = decode_node.name
        return decode_node

    async def leave_node(self) -> None:
        """Before a migration: end the leg, release what it may not have read, exclude its node."""
        self._life.move(Transition.MIGRATE)
        self.resources.release_hand_over()
        self._fault_reporter.excluded = frozenset({self.node_name})  # others that failed earlier may be tried again
        await self.resources.close_decode_leg()

    async def aclose(self) -> None:
        """Give everything back. Idempotent."""
        self._life.move(Transition.END)
        await self.resources.aclose()

    def record_fault(self, leg: Leg, node: str, fault: NodeFault) -> None:
        """Count and log a failed leg; a fault that our own deadline made does not count against the node."""
        self._context.metrics.leg_failed(leg, fault.fault)
        level = logging.INFO if fault.fault is Fault.CLIENT_ERROR else logging.WARNING
        _LOG.log(level, "request %s: %s leg on %s: %s: %s", self.sub_request.name, leg, node, fault.fault, fault.detail)
        if not self.deadline_passed:
            self._fault_reporter.failed(leg, node, fault.fault)

    def record_step(self, leg: Leg, node: str, fault: NodeFault, step: Step) -> None:
        """Show the operator a leg's failure and the step that follows."""
        failure = LegFailure(self._context.clock.now(), self.sub_request.name, leg, node, fault.fault, step)
        self._context.in_flight.failed(self.sub_request.request, failure)

    def record_usage(self, usage: Usage) -> None:
        """A decode leg reported its usage."""
        self.recomputed = record_usage(self._context, self._background_tasks, self.sub_request, self.hand_over, usage)

    def other_node_available(self) -> bool:
        """Whether another decode node could take over now."""
        self._fault_reporter.excluded |= {self.node_name}
        return self._node_picker.other_decode() is not None

    @property
    def deadline_passed(self) -> bool:
        return deadline_passed(self._context.clock, self.sub_request.request.deadline)

    def remaining_seconds(self) -> float:
        """Until the deadline; raises the `ClientError` 504 where it has come."""
        return remaining_seconds(self._context.clock, self.sub_request.request.deadline)


def _first_event_proves_read(sub_request: SubRequest) -> bool:
    """Whether a decode leg's first event proves that the hand-over was read.

    The first of several choices may come before the others have read; and a stream of responses begins with events
    about itself. There the hand-over counts as unread until the stream ends well: releasing once more does no harm.
    """
    return not sub_request.shape.stream or (
        sub_request.shape.choices == 1 and sub_request.endpoint is not Endpoint.RESPONSES
    )
