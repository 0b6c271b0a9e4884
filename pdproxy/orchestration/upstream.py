"""One prompt's way through plan, prefill and decode, with its retries, up to a decode leg that answers.

The decode leg goes out once there is a ticket, and carries it. Everything that the request holds meanwhile is in
`HeldResources`: `aclose` gives it back, whenever it is called.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from pdproxy.errors import NodeFault
from pdproxy.failures import Moment, Step
from pdproxy.legs.calls import decode, prefill, prompt_digest
from pdproxy.legs.rewrite import decode_body, prefill_body, with_usage
from pdproxy.lifecycle import IllegalTransition, RequestLifecycle, Transition
from pdproxy.nodes.node import Node
from pdproxy.nodes.outlier import Source
from pdproxy.observe.labels import Leg, Move, Phase
from pdproxy.observe.tracing import LegSpan
from pdproxy.orchestration.client_errors import final_error
from pdproxy.orchestration.context import OrchestrationContext, remaining_seconds
from pdproxy.orchestration.node_picker import NodePicker
from pdproxy.orchestration.request_record import PromptRecord, Route
from pdproxy.orchestration.resources import (
    BackgroundTasks,
    HandOver,
    HeldResources,
    LegWait,
    begin_leg_span,
)
from pdproxy.planning.demand import Decoded, Prefilled
from pdproxy.planning.prefix import Place
from pdproxy.request import Endpoint, LegForm, LocalReason, SubRequest
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
        recomputed: the decode node had a ticket and computed the prompt all the same, as far as its usage shows.
        nodes: which nodes it goes to, and how they did.
    """

    def __init__(
        self,
        context: OrchestrationContext,
        background_tasks: BackgroundTasks,
        sub_request: SubRequest,
        record: PromptRecord,
    ) -> None:
        self._context = context
        self._background_tasks = background_tasks
        self.record = record
        self._life = RequestLifecycle()
        self._decode_node: Node | None = None
        self.sub_request = sub_request
        self.nodes = NodePicker(context, sub_request, record)
        self.resources = HeldResources(context, background_tasks, sub_request)
        self.hand_over: HandOver | None = None
        self.recomputed = False
        self._move: Move | None = None

    async def start(self, form_for: FormFor, read_answer: ReadAnswer[Result]) -> Result:
        """Send the request to the nodes; what ``read_answer`` makes of the answer.

        Raises:
            ClientError: every retry failed, or none is left.
            UpstreamErrorResponse: a node's own error goes to the client.
        """
        self.nodes.reset()
        await self.nodes.look_up()
        node = await self._plan_and_prefill()
        while True:
            try:
                return await self._decode_on(node, form_for, read_answer)
            except NodeFault as fault:
                node = await self._after_failed_decode(node, fault)

    async def _after_failed_decode(self, node: Node, fault: NodeFault) -> Node:
        """The decode node for the next try."""
        self.resources.leg_span.failed(fault.fault)
        step = self.nodes.failed(Leg.DECODE, node, fault, ticket_works=self._ticket_works())
        await self.resources.close_decode_leg()
        other = self._other_decode() if step is Step.SAME_TICKET else None
        if other is not None:
            return other
        if step is Step.AT_ENDPOINT:
            self.nodes.no_route |= {node.name}
            if node.name in self._context.pool:
                return self._acquire_decode(node)
        if step in (Step.SAME_TICKET, Step.PREFILL_AGAIN, Step.AT_ENDPOINT):
            return await self._plan_anew()
        raise final_error(Leg.DECODE, Moment.OPENING, step, fault)

    def _other_decode(self) -> Node | None:
        """Another decode node for the ticket that is at hand."""
        other = self.nodes.other_decode(None if self.hand_over is None else self.hand_over.node)
        if other is None:
            return None
        self._life.move(Transition.SAME_TICKET)
        return self._acquire_decode(other)

    async def _plan_anew(self) -> Node:
        await self.resources.close_decode_leg()
        self._life.move(Transition.AGAIN)
        self.resources.release_hand_over()
        return await self._plan_and_prefill()

    async def _plan_and_prefill(self) -> Node:
        """Plan, and prefill until there is a ticket, or the decode node is to compute; that decode node."""
        self.hand_over = None
        while (chosen := await self.nodes.next_plan(self._acquire_decode)).prefill is not None:
            self._life.move(Transition.PREFILL)
            try:
                self.hand_over = await self._prefill(chosen.prefill)
            except NodeFault as fault:
                self.nodes.prefill_failed(chosen.prefill, fault)
                self._life.move(Transition.AGAIN)
            else:
                self._life.move(Transition.TICKET)
                return chosen.decode
        self._count_local(chosen.local)
        self._life.move(Transition.LOCAL)
        return chosen.decode

    def _ticket_works(self) -> bool:
        """Whether there is a ticket that another decode node may try."""
        age = None if self.hand_over is None else self._context.clock.now() - self.hand_over.issued_at
        return age is not None and age < self._context.config.ticket_life

    async def _prefill(self, node: Node) -> HandOver:
        asked, context = self.sub_request, self._context
        hand_over_id = context.new_hand_over_id()
        leg = prefill_body(asked.endpoint, asked.body, hand_over_id, asked.shape.choices)
        timeouts = context.config.prefill_timeouts(self.remaining_seconds())
        self.record.enter(Phase.PREFILL, node.name)
        load, headers, began = self.nodes.load(node, Leg.PREFILL), self.nodes.begin_leg(node), context.clock.now()
        span = begin_leg_span(context, asked, Leg.PREFILL, node)
        try:
            held = self.resources.prefilling(node, hand_over_id, self.nodes.prompt_tokens, load)
            with held as slot, LegWait(slot, self.nodes.possible), span:
                answer = await prefill(
                    context.transport, node, asked.endpoint, leg, headers, timeouts, self.resources.prefill_resent
                )
        except NodeFault as fault:
            span.failed(fault.fault)
            raise
        else:
            span.used(Usage(answer.prompt_tokens, None, answer.cached_tokens))
        finally:
            span.end()
        self.nodes.prefilled(node, answer)
        ended, ranks = context.clock.now(), 1 if load.rank is None else node.ranks
        context.work.append(Prefilled(Place(node.name, load.rank or 0), ranks, asked.request.arrived, began, ended))
        return HandOver(hand_over_id, node, answer, ended)

    def _begin_decode_span(self, node: Node) -> LegSpan:
        span = begin_leg_span(self._context, self.sub_request, Leg.DECODE, node)
        self.resources.leg_span = span
        return span

    async def _decode_on(self, node: Node, form_for: FormFor, read_answer: ReadAnswer[Result]) -> Result:
        asked, transport = self.sub_request, self._context.transport
        ticket = None if self.hand_over is None else self.hand_over.answer.ticket
        form = form_for(node)
        leg = decode_body(asked.body, ticket)
        leg = with_usage(leg) if form.adds_usage else leg
        timeouts = self._context.config.decode_timeouts(self.remaining_seconds())
        self.record.enter(Phase.HANDOVER, node.name)
        with LegWait(self.resources.slot, self.nodes.possible):
            headers = self.nodes.begin_leg(node)
            with self._begin_decode_span(node):
                response = await decode(transport, node, asked.endpoint, leg, headers, timeouts, form)
            self.record.enter(Phase.DECODE, node.name)
            result = await read_answer(self.resources.hold_response(response))
        self._first_event(node)
        return result

    def _first_event(self, node: Node) -> None:
        self._life.move(Transition.FIRST_EVENT)
        if self.sub_request.first_event_proves_read:
            self.end_hand_over()
        self.resources.slot.prompt_computed()
        self.nodes.first_event(node, self.hand_over)
        if self.hand_over is not None:
            self.resources.leg_span.note({"prefill_node": self.hand_over.node.name})
        self.record.began(Route.LOCAL if self.hand_over is None else Route.DISAGGREGATED, node.cohort)

    def end_hand_over(self) -> None:
        """The decode node needs it no more. Whether one that resumes a stream has read it, nothing tells: of a stream
        that had ended it reads nothing. To release what was read does no harm."""
        if self.resumed:
            self.resources.release_hand_over()
        else:
            self.resources.forget_hand_over()

    def _count_local(self, reason: LocalReason | None) -> None:
        if reason is not None:
            self._context.metrics.planned_local(reason)
            if self.record.route is None:
                self.record.local_reason = reason

    def _acquire_decode(self, decode_node: Node) -> Node:
        """Take its slot from the plan on, so that the plans that follow see the load."""
        self.resources.acquire(decode_node, self.nodes.load(decode_node, Leg.DECODE))
        self._decode_node = decode_node
        return decode_node

    async def leave_node(self, move: Move) -> None:
        """Before a migration: end the leg, release what it may not have read, exclude its node."""
        self._move = move
        self._life.move(Transition.MIGRATE)
        self.resources.release_hand_over()
        self.nodes.leave(self.node, move)
        await self.resources.close_decode_leg()

    async def aclose(self) -> None:
        """Give everything back. Idempotent."""
        self._life.move(Transition.END)
        self.sub_request.held.drop()
        self.nodes.end()
        await self.resources.aclose()

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

    def record_usage(self, usage: Usage) -> None:
        """A decode leg reported its usage. That of one that resumed a stream does not tell who computed the prompt."""
        self.resources.leg_span.used(usage)
        self.nodes.admission.used((usage.prompt or 0) + (usage.completion or 0))
        if self.resumed:
            self.record.used(msgspec.structs.replace(usage, cached=None), None)
            return
        route, cached = self._computed(usage)
        self.record.used(msgspec.structs.replace(usage, cached=cached), route)
        self.recomputed = route is Route.RECOMPUTED
        self.nodes.answered(self._decode_node, usage, None if self.recomputed else self.hand_over)
        if self.recomputed:
            self._release_recomputed()
        self._record_pace(usage)
        self._record_hand_over(usage)

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
        self.resources.leg_span.note({"recomputed": True})
        if hand_over is not None:
            self._background_tasks.release(hand_over.node, asked.request.model, hand_over.hand_over_id, asked.headers)

    def _record_hand_over(self, usage: Usage) -> None:
        """What became of the ticket counts for or against its pair of nodes, where the usage shows it, and nothing that
        the client asked for explains that it was of no use."""
        hand_over, node, asked = self.hand_over, self._decode_node, self.sub_request
        if hand_over is None or node is None or asked.endpoint not in TELLING or usage.cached is None:
            return
        if (usage.prompt or 0) <= hand_over.node.tail_tokens:
            return  # the decode node computes all of it, with a good ticket too
        request, pair, now = asked.request, (hand_over.node.name, node.name), self._context.clock.now()
        if not self.recomputed:
            self._context.pool.hand_overs.used(pair, request.api_key, now)
        elif _depends_on_pair(asked, node):
            source = Source(request.request_id, request.api_key, request.session)
            self._context.pool.hand_overs.in_vain(pair, source, prompt_digest(hand_over.answer.ticket), now)

    def _record_pace(self, usage: Usage) -> None:
        """How quickly the tokens of a stream came that ran on one node from its first token to its last."""
        shape, streams = self.sub_request.shape, self._context.pool.active(self.node_name)
        if shape.stream and usage.completion and not self.record.moves and streams:
            tokens = usage.completion // shape.choices
            self._context.work.append(Decoded(streams, tokens, self.record.so_far(Phase.DECODE)))

    def remaining_seconds(self) -> float:
        """Until the deadline; raises the `ClientError` 504 where it has come."""
        return remaining_seconds(self._context.clock, self.sub_request.request.deadline)


def _depends_on_pair(asked: SubRequest, node: Node) -> bool:
    """Whether a decode node that computes such a prompt in spite of its ticket does so for any prompt.

    Not where the ticket has several readers, the two nodes may have loaded an adapter at different times, or media have
    names that the client gave them: there a client can bring it about (docs/operating.md, "Nodes that do not mean the
    same"). Prompts whose log-probabilities are asked for, and beam search, have no ticket.
    """
    return node.model in ("", asked.request.model) and asked.shape.choices == 1 and not asked.shape.media
