"""Which nodes one prompt goes to: its way through the queue, its plans, and what is learned from what came of them."""

import logging
from collections.abc import Callable

from pdproxy.errors import ClientError
from pdproxy.failures import Moment
from pdproxy.legs.calls import PrefillAnswer
from pdproxy.nodes.load import Work
from pdproxy.nodes.node import NO_FOOTPRINT, RANK_HEADER, UNKNOWN_BLOCK, Footprint, Node, Role
from pdproxy.nodes.pool_entry import LegLoad, Slot
from pdproxy.observe.labels import Affinity, Leg, Move, Phase
from pdproxy.observe.tracing import note_event
from pdproxy.orchestration.client_errors import unknown_model_error
from pdproxy.orchestration.context import OrchestrationContext
from pdproxy.orchestration.failed_legs import FailedLegs
from pdproxy.orchestration.hand_over import HandOver
from pdproxy.orchestration.in_flight import predicted
from pdproxy.orchestration.prefix_source import RealHit
from pdproxy.orchestration.request_queue import QueuedPrompt
from pdproxy.orchestration.request_record import PromptRecord
from pdproxy.planning.plan import choose, plan
from pdproxy.planning.plan_types import NextTurn, NoNode, Plan, PlanInput, UnknownModel
from pdproxy.planning.prefix import PromptHits, place_of
from pdproxy.planning.shares import ShareUse
from pdproxy.request import Endpoint, Headers, SubRequest
from pdproxy.settings.types import OnNoDecode
from pdproxy.usage import Usage

_LOG = logging.getLogger(__name__)
_NO_NAMES = frozenset[str]()
LOOK_AGAIN = 0.5
"""Seconds between two looks for a node that comes back. No event tells of all that makes a plan possible."""
NO_NODE_ERRORS = (NoNode, UnknownModel)
"""There is no other node: none can take it now, or the last that served the model was removed meanwhile."""


class NodePicker:
    """Plans one prompt, each time with the nodes as they stand then; does no I/O.

    Args:
        failed: the prompt's legs that failed: their nodes are not planned again.

    Attributes:
        local: why the prompt is computed on one node alone; None where it need not be.
        prompt_tokens: about how many the prompt has.
        queued_prompt: its way through the queue; to be ended.
        next_turn: what is expected of the prompt's conversation; None where nothing is.
        no_route: names of nodes that turned out not to know the route of streams that can be resumed.
    """

    def __init__(
        self, context: OrchestrationContext, sub_request: SubRequest, record: PromptRecord, failed: FailedLegs
    ) -> None:
        self._context = context
        self._sub_request = sub_request
        self._record = record
        self._failed = failed
        shape, request = sub_request.shape, sub_request.request
        self.local = shape.local
        self._left_node = self._resuming = False
        self._cohort: str | None = None
        """The cohort of the node where a stream that has moved began."""
        self.no_route = _NO_NAMES
        self.next_turn: NextTurn | None = None
        self.prompt_tokens = tokens = shape.prompt_tokens
        answer = context.in_flight.output_lengths.expected(request.model, shape.longest)
        self._footprint = Footprint(shape.choices * (tokens + answer), shape.choices)
        cost, later = tokens + shape.choices * answer, sub_request.index > 0
        self.queued_prompt = QueuedPrompt(
            context.queue, request.api_key, request.priority, cost, request.deadline, later=later, prompt=tokens
        )
        self._prefix: PromptHits | None = None
        """Hits of places for the prompt; None where nothing is known."""
        self._looked_up = self._counted = False
        self._chosen: Plan | None = None
        """The last plan."""

    async def look_up_prefix(self) -> None:
        """Ask what places have cached, where the policy goes by that; before the first plan. Later calls do nothing."""
        source = self._context.prefix_source
        if source is not None and not self._looked_up:
            self._looked_up = True
            self._prefix = await source.look_up(self._sub_request)

    async def next_plan(self, acquire: Callable[[Plan], object]) -> Plan:
        """As `plan`, but the first one waits in the queue until there is room: those that follow go before all there.

        ``acquire`` takes the slots of its nodes, from the plan on, so that the plans that follow see the load.
        """

        chosen: Plan | None = None

        def start(share_use: ShareUse) -> bool:
            nonlocal chosen
            chosen = self.plan_with_room(share_use)
            if chosen is None:
                return False
            if self._record.phase is not Phase.PLAN:  # it had to wait
                self._record.enter(Phase.PLAN)
            acquire(chosen)
            return True

        if not self.queued_prompt.runs:
            await self.queued_prompt.start_when_room(start, self._wait)
        if chosen is None:
            self._record.enter(Phase.PLAN)
            chosen = await self._plan_again()
            acquire(chosen)
        return chosen

    async def _plan_again(self) -> Plan:
        """As `plan`. A stream that has lost its node, and finds no other, waits for as long as one may come back: its
        client has a part of the answer, which only a node can go on with."""
        context, request, waits = self._context, self._sub_request.request, False
        limit = min(request.deadline, context.clock.now() + context.config.queue.queue_seconds)
        while True:
            try:
                return self.plan()
            except ClientError:
                if not self._left_node or not self._failed.may_come_back() or context.clock.now() >= limit:
                    raise
            if not waits:
                waits = True
                _LOG.info("request %s: no node is there for its stream: it waits for one", self._sub_request.name)
                note_event("waits_for_node", {})
            await context.clock.sleep(LOOK_AGAIN)

    def _wait(self) -> str:
        """Enter the queue; the model in whose queue it waits: adapters and other names of one have the same."""
        self._record.enter(Phase.QUEUE)
        model = self._sub_request.request.model
        nodes = (view.node for view in self._context.pool.state().nodes)
        return next((node.model for node in nodes if Role.DECODE in node.roles and node.serves(model)), "") or model

    def plan(self) -> Plan:
        """Which nodes now, with room if there are such; raises the `ClientError` where there are none."""
        chosen = self._checked_plan()
        return self._recorded(self._with_room(chosen, self._context.config.decode_fill) or chosen)

    def plan_with_room(self, share_use: ShareUse = ShareUse.WITHIN) -> Plan | None:
        """As `plan`; None where the decode nodes that could take the prompt have no room for it now, or the nodes of
        both roles that could compute it.

        There may be less room by its key's ``share_use``: the node that would compute the prompt must be about done
        with those that it has, and a key over its share leaves others some room on decode nodes and some nodes that
        compute.
        """
        queue, most = self._context.queue, self._context.config.decode_fill
        over = share_use is ShareUse.OVER
        chosen = self._with_room(self._checked_plan(), queue.without_reserve(most) if over else most)
        if chosen is None or (share_use and not self._may_compute(chosen, share_use)):
            return None
        return self._recorded(chosen)

    def _may_compute(self, chosen: Plan, share_use: ShareUse) -> bool:
        """Whether the node that would compute the prompt may be given it, of a key whose share is used up."""
        queue, pool, node = self._context.queue, self._context.pool, chosen.computing
        place = pool.view(node.name).place(chosen.rank(node))
        work = Work.LOCAL if chosen.prefill is None and len(node.roles) == 1 else Work.PREFILL
        left = pool.load.seconds_left(work, place, self._context.clock.now())
        if not queue.about_done(left, pool.load.pace_at(work, place).seconds(self._uncached(chosen))):
            return False
        if share_use is not ShareUse.OVER:
            return True
        request = self._sub_request.request
        views = (
            pool.state()
            .served(request.model)
            .all.of(Role.PREFILL if chosen.prefill is not None or Role.DECODE not in node.roles else Role.DECODE)
        )
        return queue.leaves_nodes(node.name, views, request.api_key)

    def _uncached(self, chosen: Plan) -> int:
        """How many of the prompt's tokens the place that computes it has to, as far as the policy knows."""
        return self.prompt_tokens if chosen.reason is None else chosen.computed

    def _checked_plan(self) -> Plan:
        try:
            return self._plan()
        except UnknownModel as error:
            raise unknown_model_error(error) from error
        except NoNode as error:
            raise self._failed.no_node_left(error) from error

    def _with_room(self, chosen: Plan, most: float) -> Plan | None:
        """A plan whose decode node has room, and its prefill node, where that has both roles: this one, or another one
        that disaggregates if this one does. Nodes whose caches are full of prompts for each other would wait for ever.
        """
        context, prefill = self._context, chosen.prefill
        if context.pool.view(chosen.decode.name).has_room_for(self._footprint, most) and (
            prefill is None
            or Role.DECODE not in prefill.roles
            or context.pool.view(prefill.name).has_room_for(Footprint(self.prompt_tokens, 1), most)
        ):
            return chosen
        role = Role.DECODE if Role.DECODE in chosen.decode.roles else Role.PREFILL
        like = (view for view in context.pool.state().nodes if role in view.node.roles)
        full = frozenset(view.node.name for view in like if not view.has_room_for(self._footprint, most))
        try:
            other = self._plan(full)
        except NO_NODE_ERRORS:
            return None
        alone = other.prefill is None and Role.PREFILL not in other.decode.roles
        return None if alone and chosen.prefill is not None else other

    def _recorded(self, chosen: Plan) -> Plan:
        context, self._chosen = self._context, chosen
        if chosen.reason is not None:
            self._record.decision = chosen
            context.metrics.plans.planned(chosen.reason)
            context.in_flight.plans[chosen.reason] += 1
        if chosen.decode_affinity is not None:
            self._record_affinity(Role.PREFILL, chosen.prefill_affinity)
            self._record_affinity(Role.DECODE, chosen.decode_affinity)
        if context.prefix_source is not None:
            context.prefix_source.routed(self._sub_request, chosen)
        return chosen

    def prefill_load(self, chosen: Plan, node: Node) -> LegLoad:
        """The load that the prefill leg of a plan adds to its node: of the caches, where that has both roles."""
        request = self._sub_request.request
        footprint = Footprint(self.prompt_tokens, 1) if Role.DECODE in node.roles else NO_FOOTPRINT
        queued = self._uncached(chosen)
        return LegLoad(chosen.prefill_rank, queued, footprint, request.api_key, request.arrived, Leg.PREFILL)

    def decode_load(self, node: Node) -> LegLoad:
        """The load that a decode leg adds to its node, with the answer, which is expected to be as long as others
        were."""
        chosen, request = self._chosen, self._sub_request.request
        if chosen is None or node is not chosen.decode:
            return LegLoad(None, None, self._footprint, request.api_key, request.arrived)
        queued = self._uncached(chosen) if chosen.prefill is None else None
        return LegLoad(chosen.decode_rank, queued, self._footprint, request.api_key, request.arrived)

    def headers(self, node: Node) -> Headers:
        """The headers of a leg to a node: they name the planned rank."""
        headers, rank = self._sub_request.headers, self.rank(node)
        return headers if rank is None else (*headers, (RANK_HEADER, str(rank)))

    def rank(self, node: Node) -> int | None:
        """The rank that the plan names on one of its nodes; None where it names none."""
        return None if self._chosen is None else self._chosen.rank(node)

    def possible(self) -> bool:
        """Whether a plan could be made now."""
        try:
            self._plan()
        except NO_NODE_ERRORS:
            return False
        return True

    def other_decode(self, prefill: Node | None = None, without: frozenset[str] = _NO_NAMES) -> Node | None:
        """A decode node that has not failed the request, and that can use a ticket of ``prefill`` if given; none of
        those ``without`` which it is to be."""
        context = self._context
        try:
            needs, policy = self._input(prefill, without=without), context.plan_policy
            return choose(context.pool.state(), Role.DECODE, needs, policy, next(context.tie_breaker))
        except NO_NODE_ERRORS:
            return None

    def leave(self, node: Node, move: Move) -> None:
        """The stream leaves a node. Others that failed earlier may be tried again, and all retries are left."""
        self._left_node = True
        self._cohort = node.cohort if self._cohort is None else self._cohort
        self._resuming = move is Move.RESUMED
        self.local = self._sub_request.shape.local
        self._failed.moved(Moment.RESUMING if self._resuming else Moment.OPENING, node.name)

    def other_than(self, name: str, move: Move) -> bool:
        """Whether another decode node could take a stream over from this one now, by such a move."""
        self._resuming = move is Move.RESUMED  # until it leaves, no plan is made for a leg of this stream
        return self.other_decode(without=frozenset({name})) is not None

    def resumes(self, node: Node) -> bool:
        """Whether a decode node can write a stream's journal, and resume one."""
        return node.can_resume and node.name not in self.no_route

    def resumes_elsewhere(self, name: str) -> bool:
        """Whether another node than this one takes requests, could serve a decode leg, and `resumes`."""
        served = self._context.pool.state().served(self._sub_request.request.model).all
        last_resort = served.prefills if self._context.config.on_no_decode is OnNoDecode.PREFILL else ()
        return any(view.name != name and self.resumes(view.node) for view in (*served.decodes, *last_resort))

    # -- what came of it

    def prefilled(self, slot: Slot, answer: PrefillAnswer) -> None:
        """A prefill leg went well: how fast its place computes is learned, by the tokens that the node had not cached.

        Where the plan knew nothing of the prompt but its bytes, these count here as they did in the place's queue.
        """
        chosen = self._chosen
        if chosen is not None:
            tokens = self._uncached(chosen)
            if self._prefix is not None and answer.cached_tokens is not None:
                prompt = chosen.tokens if answer.prompt_tokens is None else answer.prompt_tokens
                tokens = max(0, prompt - answer.cached_tokens)
            slot.computed(tokens)
        self._context.queue.room_changed()

    def first_event(self, node: Node, slot: Slot, hand_over: HandOver | None) -> None:
        """A decode leg goes well: how fast its place computes, or takes over, is learned. The time of a whole answer
        tells nothing of that."""
        chosen, stream = self._chosen, self._sub_request.shape.stream
        if chosen is None:
            return
        if hand_over is None:
            slot.computed(self._uncached(chosen) if stream and node is chosen.decode else None)
            self._context.queue.room_changed()
        elif stream and node is chosen.decode and chosen.reason is not None:
            hit = chosen.decode_hit
            slot.took_over(max(0, chosen.tokens - hit.attention), hand_over.issued_at, instead=hit.resume > 0)

    def count_hits(self, node: Node, usage: Usage, hand_over: HandOver | None) -> None:
        """The nodes said what they had cached: once, for the prompt as the client sent it.

        ``hand_over``: the ticket that was used; None where ``node``, the decode node, computed.
        """
        chosen, cached, source = self._chosen, usage.cached, self._context.prefix_source
        if hand_over is not None:
            node, cached = hand_over.node, hand_over.answer.cached_tokens
        if self._counted or cached is None or chosen is None or chosen.reason is None:
            return
        rank, planned = chosen.rank(node), chosen.tokens - chosen.computed
        if rank is None and node.ranks > 1:
            return  # vLLM chose among several
        self._counted = True
        if node in (chosen.prefill, chosen.decode):
            outcome = predicted(planned, cached, node.block_size or UNKNOWN_BLOCK)
            role = Role.PREFILL if node is chosen.prefill or Role.DECODE not in node.roles else Role.DECODE
            self._context.metrics.plans.hit(role, planned, cached, outcome)
            self._context.in_flight.planned_hits[role].add(usage.prompt or 0, planned, cached, outcome)
        if source is not None:
            source.learn(self._sub_request, RealHit(place_of(node.name, rank), usage.prompt, cached))

    def _record_affinity(self, role: Role, affinity: Affinity | None) -> None:
        if affinity is not None:
            self._record.affinities = {**self._record.affinities, role: affinity}
            self._context.metrics.plans.session_routed(role, affinity)

    def _plan(self, full: frozenset[str] = _NO_NAMES) -> Plan:
        """``full``: names of nodes that are left out this time."""
        context = self._context
        needs, policy = self._input(full=full), context.plan_policy
        return plan(context.pool.state(), needs, policy, next(context.tie_breaker))

    def _input(
        self, partner: Node | None = None, full: frozenset[str] = _NO_NAMES, without: frozenset[str] = _NO_NAMES
    ) -> PlanInput:
        asked, excluded = self._sub_request, self._failed.excluded | without
        if self._resuming:
            excluded |= self._unable()
        if self._cohort is not None:
            excluded |= self._foreign(self._cohort, excluded)
        excluded |= full
        # vLLM heeds no rank of a leg for responses.
        return PlanInput(
            asked.request.model, self.local, excluded, partner, asked.request.session, self._prefix,
            self.prompt_tokens, asked.endpoint is not Endpoint.RESPONSES, self.next_turn,
        )  # fmt: skip

    def _foreign(self, cohort: str, excluded: frozenset[str]) -> frozenset[str]:
        """For a stream that moves: decode nodes of other cohorts than the one that it began in, maybe of other weights,
        while there is one of that which is not ``excluded``."""
        views = [view for view in self._context.pool.state().nodes if Role.DECODE in view.node.roles]
        other = frozenset(view.name for view in views if not view.node.pairs_with(cohort))
        barred = other | excluded
        model = self._sub_request.request.model
        own = (view.takes_requests() and view.node.serves(model) for view in views if view.name not in barred)
        return other if any(own) else _NO_NAMES

    def _unable(self) -> frozenset[str]:
        """Decode nodes that cannot resume, for a leg that does."""
        nodes = (view.node for view in self._context.pool.state().nodes)
        return frozenset(node.name for node in nodes if Role.DECODE in node.roles and not self.resumes(node))
