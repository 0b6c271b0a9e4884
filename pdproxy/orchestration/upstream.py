"""One prompt's way through the nodes: plan, prefill leg, ticket, decode leg, and what is tried when one of them fails.

::

    start ─ plan ─ prefill leg ─ ticket ─ decode leg ─ first event ──► the answer is read (`relay`, `orchestrator`)
             ▲  └── computes alone ──────────┘ │                           │
             └──── a leg failed: the failure ──┴── table decides ──────────┘ the stream moves (`leave_node`, `start`)

    aclose   gives all of it back, whenever it is called: slots, response, hand-over, place in the queue
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from opentelemetry import trace

from pdproxy.errors import NodeFault
from pdproxy.failures import Moment, Step
from pdproxy.legs.calls import NOTHING_HELD, decode, prefill, prompt_digest
from pdproxy.legs.rewrite import NOTHING_KEPT, decode_body, prefill_body
from pdproxy.lifecycle import TRANSITIONS, IllegalTransition, RequestState, Transition
from pdproxy.nodes.node import Node
from pdproxy.nodes.outlier import LegOrigin
from pdproxy.nodes.pool_entry import Slot
from pdproxy.observe.labels import Leg, Move, Phase
from pdproxy.observe.tracing import LegSpan, leg_span
from pdproxy.orchestration.client_errors import final_error
from pdproxy.orchestration.context import OrchestrationContext, deadline_passed, remaining_seconds
from pdproxy.orchestration.failed_legs import FailedLegs
from pdproxy.orchestration.hand_over import HandOver, release_later
from pdproxy.orchestration.in_flight import LegFailure
from pdproxy.orchestration.keeping import PromptKeep
from pdproxy.orchestration.leg_wait import LegWait
from pdproxy.orchestration.node_picker import NodePicker
from pdproxy.orchestration.request_record import PromptRecord, Route
from pdproxy.planning.plan_types import Plan
from pdproxy.reasons import LocalReason
from pdproxy.request import Endpoint, LegForm, SubRequest
from pdproxy.transport.port import HttpResponse
from pdproxy.usage import Usage

_LOG = logging.getLogger(__name__)
Result = TypeVar("Result")
ReadAnswer = Callable[[HttpResponse], Awaitable[Result]]
FormFor = Callable[[Node], LegForm]
"""How a decode leg asks a node, told when it begins."""
TELLING = (Endpoint.COMPLETIONS, Endpoint.CHAT)
"""Endpoints whose usage tells whether a decode node used its ticket."""


class UpstreamRequest:
    """A sub-request on its way through the nodes. The holder must `aclose` it, on every exit.

    Attributes:
        hand_over: the ticket of the decode leg, from the moment it is there; None where the decode node computes alone.
        record: of this prompt.
        nodes: which nodes it goes to.
        keep: its turn in a conversation that nodes may keep; None where there is none.
    """

    def __init__(self, context: OrchestrationContext, sub_request: SubRequest, record: PromptRecord) -> None:
        request = sub_request.request
        self._context = context
        self.sub_request = sub_request
        self.record = record
        origin = LegOrigin(request.request_id, request.api_key, request.session)
        self._failed = FailedLegs(context.pool, context.config, context.metrics, origin)
        self.nodes = NodePicker(context, sub_request, record, self._failed)
        self._state = RequestState.PLANNING
        self._move: Move | None = None
        self._decode_node: Node | None = None
        self.hand_over: HandOver | None = None
        self.keep: PromptKeep | None = None
        # What it holds, beside its place in the queue.
        self._slot: Slot | None = None
        """On the decode node."""
        self._prefill_slot: Slot | None = None
        """On the prefill node of the plan, until its leg has ended; where that has both roles, until its ticket is read
        or given up."""
        self._response: HttpResponse | None = None
        """The response of the decode leg."""
        self._span: LegSpan | None = None
        """The span of the decode leg, where it is traced."""
        self._unread: tuple[Node, str] | None = None
        """A prefill node, and the id of the hand-over that it may hold."""
        self._sent_twice = False
        """The prefill leg went out a second time: the node may hold blocks for each of the two."""

    # -- up to the answer

    async def start(self, form_for: FormFor, read_answer: ReadAnswer[Result]) -> Result:
        """Send the request to the nodes; what ``read_answer`` makes of the answer.

        Raises:
            ClientError: every retry failed, or none is left.
            UpstreamErrorResponse: a node's own error goes to the client.
        """
        await self.nodes.look_up_prefix()
        keeping = self._context.keeping
        if keeping is not None and self.keep is None and self._context.pool.state().keeps:
            self.keep = keeping.begin_turn(self.sub_request)
            if self.keep is not None:
                self.record.keep, self.nodes.next_turn = self.keep.facts, self.keep.next_turn()
        node = await self._plan_and_prefill()
        while True:
            try:
                return await self._decode_on(node, form_for, read_answer)
            except NodeFault as fault:
                node = await self._after_failed_decode(node, fault)

    async def _plan_and_prefill(self) -> Node:
        """Plan, and prefill until there is a ticket, or the decode node is to compute; that decode node."""
        self.hand_over = None
        while (chosen := await self.nodes.next_plan(self._acquire)).prefill is not None:
            self._state = TRANSITIONS[self._state, Transition.PREFILL]
            try:
                self.hand_over = await self._prefill(chosen.prefill)
            except NodeFault as fault:
                self._after_failed_prefill(chosen.prefill, fault)
                self._state = TRANSITIONS[self._state, Transition.AGAIN]
            else:
                self._state = TRANSITIONS[self._state, Transition.TICKET]
                return chosen.decode
        if chosen.local is not None:
            self._count_local(chosen.local)
        self._state = TRANSITIONS[self._state, Transition.LOCAL]
        return chosen.decode

    async def _prefill(self, node: Node) -> HandOver:
        """The prefill leg. What the node may hold of one that fails is released."""
        context, asked = self._context, self.sub_request
        hand_over_id, endpoint = context.new_hand_over_id(), asked.request.endpoint
        keep = NOTHING_KEPT if self.keep is None else self.keep.order(node, self.nodes.rank(node))
        body = prefill_body(endpoint, asked.held.content, hand_over_id, asked.shape.choices, keep)
        timeouts = context.config.prefill_timeouts(remaining_seconds(context.clock, asked.request.deadline))
        self.record.enter(Phase.PREFILL, node.name)
        headers, slot = self.nodes.headers(node), _held(self._prefill_slot)
        self._unread, self._sent_twice = (node, hand_over_id), False
        span = None if context.tracer is None else self._begin_span(context.tracer, Leg.PREFILL, node)
        try:
            with LegWait(slot, self.nodes.possible):
                answer = await prefill(
                    context.transport, node, endpoint, body, headers, timeouts, self._note_sent_twice, span
                )
            self.nodes.prefilled(slot, answer)
            if self.keep is not None:
                self.keep.told(answer.kept)
        except NodeFault as fault:
            if span is not None:
                span.failed(fault.fault)
            if fault.fault in NOTHING_HELD:
                self._forget_hand_over()
            self._release_hand_over()
            raise
        else:
            if span is not None:
                span.set_usage(Usage(answer.prompt_tokens, None, answer.cached_tokens))
        finally:
            if slot.takes_room:
                slot.end_leg()  # until the ticket is read, or given up, its blocks are held
            else:
                self._prefill_slot = None
                slot.release()
            if span is not None:
                span.end()
        self._failed.leg_served(Leg.PREFILL, node.name)
        self._failed.went_on(Leg.PREFILL)
        return HandOver(hand_over_id, node, answer, context.clock.now())

    def _after_failed_prefill(self, node: Node, fault: NodeFault) -> None:
        """The next plan has another prefill node, or none; or the client's error is raised."""
        match self._next_step(Leg.PREFILL, node, fault):
            case Step.OTHER_PREFILL:
                pass
            case Step.LOCAL:
                self.nodes.local = LocalReason.PREFILL_FAILED
            case step:
                raise final_error(Leg.PREFILL, Moment.OPENING, step, fault)

    async def _decode_on(self, node: Node, form_for: FormFor, read_answer: ReadAnswer[Result]) -> Result:
        """The decode leg, up to what ``read_answer`` reads of it: the first event of a stream, or the whole answer."""
        context, asked = self._context, self.sub_request
        ticket = None if self.hand_over is None else self.hand_over.answer.ticket
        form = form_for(node)
        keep = NOTHING_KEPT
        if ticket is None and self.keep is not None:
            keep = self.keep.order(node, self.nodes.rank(node))
        body = decode_body(asked.held.content, ticket, form, keep)
        timeouts = context.config.decode_timeouts(remaining_seconds(context.clock, asked.request.deadline))
        self.record.enter(Phase.HANDOVER, node.name)
        slot, stream = _held(self._slot), asked.shape.stream
        with LegWait(slot, self.nodes.possible):
            headers = self.nodes.headers(node)
            span = None if context.tracer is None else self._begin_span(context.tracer, Leg.DECODE, node)
            self._span = span
            self._response = response = await decode(
                context.transport, node, asked.request.endpoint, body, headers, timeouts, form, span, stream=stream
            )
            self.record.enter(Phase.DECODE, node.name)
            result = await read_answer(response)
        self._state = TRANSITIONS[self._state, Transition.FIRST_EVENT]
        if asked.first_event_proves_read:
            self.end_hand_over()
        if stream:
            self._failed.leg_began(Leg.DECODE, node.name)
        else:
            self._failed.leg_served(Leg.DECODE, node.name)
        if self._move is None:  # one that has moved may begin only to break off where it did before
            self._failed.went_on(Leg.DECODE)
        if stream:  # learned once the client has its first event
            asyncio.get_running_loop().call_soon(self.nodes.first_event, node, slot, self.hand_over)
        else:
            self.nodes.first_event(node, slot, self.hand_over)
        if span is not None and self.hand_over is not None:
            span.note({"prefill_node": self.hand_over.node.name})
        self.record.answer_began(Route.LOCAL if self.hand_over is None else Route.DISAGGREGATED, node.cohort)
        return result

    async def _after_failed_decode(self, node: Node, fault: NodeFault) -> Node:
        """The decode node for the next try: another one for the same ticket, this one at its endpoint, or that of a
        new plan; or the client's error is raised."""
        if self._span is not None:
            self._span.failed(fault.fault)
        step = self._next_step(Leg.DECODE, node, fault, ticket_works=self._ticket_works())
        await self._close_decode_leg()
        if step is Step.SAME_TICKET:
            other = self.nodes.other_decode(None if self.hand_over is None else self.hand_over.node)
            if other is not None:
                self._state = TRANSITIONS[self._state, Transition.SAME_TICKET]
                return self._acquire_decode(other)
        if step is Step.AT_ENDPOINT:
            self.nodes.no_route |= {node.name}
            if node.name in self._context.pool:
                return self._acquire_decode(node)
        if step not in (Step.SAME_TICKET, Step.PREFILL_AGAIN, Step.AT_ENDPOINT):
            raise final_error(Leg.DECODE, Moment.OPENING, step, fault)
        self._state = TRANSITIONS[self._state, Transition.AGAIN]
        self._release_hand_over()
        return await self._plan_and_prefill()

    def _ticket_works(self) -> bool:
        """Whether there is a ticket that another decode node may try."""
        age = None if self.hand_over is None else self._context.clock.now() - self.hand_over.issued_at
        return age is not None and age < self._context.config.ticket_life

    def _next_step(self, leg: Leg, node: Node, fault: NodeFault, *, ticket_works: bool = False) -> Step:
        """A leg failed before its first event: record it; the next step."""
        self._record_fault(leg, node.name, fault, Moment.OPENING)
        self._failed.on_going_node = self._context.pool.is_going(node.name)
        step = self._failed.next_step(leg, fault, ticket_works=ticket_works)
        self._show_failure(leg, node.name, fault, step)
        return step

    def _record_fault(self, leg: Leg, node: str, fault: NodeFault, moment: Moment) -> None:
        """Count and log a failed leg; a fault that our own deadline made does not count against the node.

        The line of the request's end tells of it, too: as a warning, if the request fails.
        """
        context = self._context
        context.metrics.leg_failed(leg, fault.fault)
        self.record.failure.leg_failed(leg, node, fault)
        name = self.sub_request.name
        _LOG.info("request %s: %s leg on %s: %s: %s", name, leg, node, fault.fault, fault.detail)
        if not deadline_passed(context.clock, self.sub_request.request.deadline):
            self._failed.leg_failed(leg, node, fault.fault, moment)

    def _show_failure(self, leg: Leg, node: str, fault: NodeFault, step: Step) -> None:
        """Show the operator a leg's failure and the step that follows."""
        now, name, failure = self._context.clock.now(), self.sub_request.name, self.record.failure
        self._context.in_flight.failed(LegFailure(now, name, leg, node, fault.fault, step, failure))

    def _count_local(self, reason: LocalReason) -> None:
        self._context.metrics.plans.planned_local(reason)
        if self.record.route is None:
            self.record.local_reason = reason

    def _begin_span(self, tracer: trace.Tracer, leg: Leg, node: Node) -> LegSpan | None:
        """The span of a leg that begins now; None where that of its request is not recorded."""
        context, asked = self._context, self.sub_request
        if not trace.get_current_span().is_recording():
            return None
        model = asked.request.model
        facts: dict[str, str | int | bool] = {"node": node.name, "cohort": node.cohort, "prompt": asked.index}
        label = model if context.metrics.requests.models.label(model) == model else ""
        return leg_span(tracer, leg, asked.endpoint, model, label, facts)

    # -- while a stream runs

    @property
    def resumed(self) -> bool:
        """Whether the last leg resumes what others began."""
        return self._move is Move.RESUMED

    @property
    def node(self) -> Node:
        """The decode node that was chosen last; there must be one."""
        if self._decode_node is None:
            raise IllegalTransition("no decode node was chosen yet")
        return self._decode_node

    @property
    def node_name(self) -> str:
        """The decode node that was chosen last; "" before there is one."""
        return "" if self._decode_node is None else self._decode_node.name

    def on_node_down(self, alarm: Callable[[], None]) -> None:
        """Call ``alarm`` each time that active health finds the decode node gone."""
        _held(self._slot).alarm = alarm

    def progress(self) -> None:
        """Report to active health that the decode node is at work."""
        if self._slot is not None:
            self._slot.progress()

    def went_on(self) -> None:
        """The client has got more of a stream that has moved: it does not end where it broke off before."""
        self._failed.went_on(Leg.DECODE)

    def abort_decode_leg(self) -> None:
        """Close the decode leg while it is being read: its read ends in RESET."""
        if self._response is not None:
            self._context.background.finish("abort", self._response.aclose())

    def broke_off(self, fault: NodeFault) -> int:
        """The node failed after its first event: how many nodes broke off under the stream, one after another."""
        if self._span is not None:
            self._span.failed(fault.fault)
        self._record_fault(Leg.DECODE, self.node_name, fault, Moment.STREAMING)
        return self._failed.broke_off(Leg.DECODE, fault)

    def show_broken_stream(self, fault: NodeFault, step: Step) -> None:
        """Show the operator that the stream's node failed, and the step that follows."""
        self._show_failure(Leg.DECODE, self.node_name, fault, step)

    async def leave_node(self, move: Move) -> None:
        """Before the stream moves: end the leg, release what it may not have read, exclude its node."""
        self._move = move
        self._state = TRANSITIONS[self._state, Transition.MIGRATE]
        self._release_hand_over()
        self.nodes.leave(self.node, move)
        await self._close_decode_leg()

    def stream_ended(self) -> None:
        """The stream has ended well on its last node."""
        self.end_hand_over()
        self._failed.leg_ended(Leg.DECODE, self.node_name)

    # -- what is held, and how it is given back

    async def aclose(self) -> None:
        """Give everything back. Idempotent."""
        self._state = TRANSITIONS[self._state, Transition.END]
        self.sub_request.held.drop()
        self._failed.close()
        if self.keep is not None:
            self.keep.end()
        self.nodes.queued_prompt.end()
        self._release_hand_over()
        if self._prefill_slot is not None:
            self._prefill_slot.release()
        await self._close_decode_leg()

    def _acquire(self, chosen: Plan) -> None:
        """Take slots on the nodes of a plan at once, so that the plans that follow see the load."""
        self._acquire_decode(chosen.decode)
        if chosen.prefill is not None:
            load = self.nodes.prefill_load(chosen, chosen.prefill)
            self._prefill_slot = self._context.pool.acquire(chosen.prefill.name, load)

    def _acquire_decode(self, node: Node) -> Node:
        """Take a slot on a decode node. The one held before is given back."""
        if self._slot is not None:
            self._slot.release()
        self._slot = None
        self._slot = self._context.pool.acquire(node.name, self.nodes.decode_load(node))
        self._decode_node = node
        return node

    async def _close_decode_leg(self) -> None:
        """End the decode leg: its slot first, for closing may be interrupted."""
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.release()
        span, self._span = self._span, None
        if span is not None:
            span.end()
        response, self._response = self._response, None
        if response is not None:
            await response.aclose()

    def _note_sent_twice(self) -> None:
        self._sent_twice = True

    def end_hand_over(self) -> None:
        """The decode node needs it no more. Whether one that resumes a stream has read it, nothing tells: of a stream
        that had ended it reads nothing. To release what was read does no harm."""
        if self.resumed:
            self._release_hand_over()
        else:
            self._forget_hand_over()

    def _forget_hand_over(self) -> None:
        """The ticket was read, or the node gave none: nothing is held under the hand-over's id any more. Of a leg that
        was sent twice the first copy may hold blocks of its own, so its id is released."""
        if self._sent_twice:
            self._release_hand_over()
        self._unread = None
        if self._prefill_slot is not None:
            self._prefill_slot.release()

    def _release_hand_over(self) -> None:
        """Have the hand-over freed, unless it was read."""
        unread, self._unread = self._unread, None
        if unread is not None:
            if self._prefill_slot is not None:
                self._prefill_slot.release()
            node, hand_over_id = unread
            release_later(self._context, node, self.sub_request.request.model, hand_over_id, self.sub_request.headers)

    def remaining_seconds(self) -> float:
        """Until the deadline; raises the `ClientError` 504 where it has come."""
        return remaining_seconds(self._context.clock, self.sub_request.request.deadline)

    # -- what the answer's usage shows

    def record_usage(self, usage: Usage) -> None:
        """A decode leg reported its usage. That of one that resumed a stream does not tell who computed the prompt."""
        if self._span is not None:
            self._span.set_usage(usage)
        self.nodes.queued_prompt.correct_cost((usage.prompt or 0) + (usage.completion or 0))
        if self.resumed:
            self.record.leg_used(msgspec.structs.replace(usage, cached=None), None)
            return
        route, cached = self._computed(usage)
        self.record.leg_used(msgspec.structs.replace(usage, cached=cached), route)
        self.nodes.count_hits(self.node, usage, None if route is Route.RECOMPUTED else self.hand_over)
        if route is Route.RECOMPUTED:
            self._release_recomputed()
        self._record_pace(usage)
        self._record_hand_over(usage, route)

    def _computed(self, usage: Usage) -> tuple[Route, int | None]:
        """Which node computed the prompt, and how many of its tokens that node had cached."""
        if self.hand_over is None:
            return Route.LOCAL, usage.cached
        if usage.recomputed(self.hand_over.node.tail_tokens):
            return Route.RECOMPUTED, usage.cached
        return Route.DISAGGREGATED, self.hand_over.answer.cached_tokens

    def _release_recomputed(self) -> None:
        """The decode node computed the prompt again; what it has not read is released."""
        asked, hand_over = self.sub_request, self.hand_over
        _LOG.warning("request %s: the decode node computed the prompt again", asked.name)
        if self._span is not None:
            self._span.note({"recomputed": True})
        if hand_over is not None:
            release_later(self._context, hand_over.node, asked.request.model, hand_over.hand_over_id, asked.headers)

    def _record_hand_over(self, usage: Usage, route: Route) -> None:
        """Count the ticket for or against its pair of nodes, where the usage shows what became of it, and nothing that
        the client asked for explains that it was of no use."""
        hand_over, node, asked = self.hand_over, self._decode_node, self.sub_request
        if hand_over is None or node is None or asked.endpoint not in TELLING or usage.cached is None:
            return
        if (usage.prompt or 0) <= hand_over.node.tail_tokens:
            return  # the decode node computes all of it, with a good ticket too
        request, pair, now = asked.request, (hand_over.node.name, node.name), self._context.clock.now()
        if route is not Route.RECOMPUTED:
            self._context.pool.hand_overs.ticket_used(pair, request.api_key, now)
        elif _depends_on_pair(asked, node):
            origin = LegOrigin(request.request_id, request.api_key, request.session)
            self._context.pool.hand_overs.ticket_in_vain(pair, origin, prompt_digest(hand_over.answer.ticket), now)

    def _record_pace(self, usage: Usage) -> None:
        """How quickly the tokens of a stream came that ran on one node from its first token to its last."""
        shape, slot = self.sub_request.shape, self._slot
        if shape.stream and usage.completion and not self.record.moves and slot is not None:
            slot.streamed(usage.completion // shape.choices, self.record.in_phase())


def _held(slot: Slot | None) -> Slot:
    if slot is None:
        raise IllegalTransition("a leg needs a slot on its node")
    return slot


def _depends_on_pair(asked: SubRequest, node: Node) -> bool:
    """Whether a decode node that computes such a prompt in spite of its ticket does so for any prompt.

    Not where the ticket has several readers, the two nodes may have loaded an adapter at different times, or media have
    names that the client gave them: there a client can bring it about (docs/compatibility.md). Prompts whose
    log-probabilities are asked for, and beam search, have no ticket.
    """
    return node.model in ("", asked.request.model) and asked.shape.choices == 1 and not asked.shape.media
