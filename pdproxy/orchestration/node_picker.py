"""Which nodes one prompt goes to: its way through the queue, and its plans."""

from collections.abc import Callable

from pdproxy.failures import Moment
from pdproxy.legs.calls import PrefillAnswer
from pdproxy.nodes.node import Footprint, Node, Role
from pdproxy.nodes.pool_entry import NO_LOAD, LegLoad
from pdproxy.observe.labels import Affinity, Leg, Move, Phase
from pdproxy.orchestration.admission import Admission
from pdproxy.orchestration.cache_route import CacheRoute
from pdproxy.orchestration.client_errors import unknown_model_error
from pdproxy.orchestration.context import OrchestrationContext
from pdproxy.orchestration.failed_legs import FailedLegs
from pdproxy.orchestration.hand_over import HandOver
from pdproxy.orchestration.request_queue import Asked
from pdproxy.orchestration.request_record import PromptRecord
from pdproxy.planning.cache_aware import CacheAware
from pdproxy.planning.plan import choose, plan
from pdproxy.planning.plan_types import NoNode, Plan, PlanInput, UnknownModel
from pdproxy.planning.shares import Standing
from pdproxy.request import Headers, SubRequest
from pdproxy.settings.types import OnNoDecode
from pdproxy.usage import Usage

_NO_NAMES = frozenset[str]()
NO_NODE_ERRORS = (NoNode, UnknownModel)
"""There is no other node: none can take it now, or the last that served the model was removed meanwhile."""


class NodePicker:
    """Plans one prompt, with a fresh snapshot of the pool each time; does no I/O.

    Args:
        failed: the prompt's legs that failed: their nodes are not planned again.

    Attributes:
        local: why the prompt is computed on one node alone; None where it need not be.
        prompt_tokens: about how many the prompt has.
        admission: its way through the queue; to be ended.
        no_route: names of nodes that turned out not to know the route of streams that can be resumed.
    """

    def __init__(
        self, context: OrchestrationContext, sub_request: SubRequest, record: PromptRecord, failed: FailedLegs
    ) -> None:
        self._context = context
        self._sub_request = sub_request
        self._record = record
        self._failed = failed
        request = sub_request.request
        self.local = sub_request.shape.local
        self._resuming = False
        self._cohort: str | None = None
        """Of the node where a stream that has moved began."""
        self.no_route = _NO_NAMES
        short = context.config.local_below_tokens > 0
        self._tokens = sub_request.shape.most_prompt_tokens if short else None
        self.prompt_tokens = tokens = sub_request.shape.prompt_tokens
        choices, longest = sub_request.shape.choices, sub_request.shape.longest
        answer = context.in_flight.output_lengths.expected(request.model, longest)
        self._footprint = Footprint(choices * (tokens + answer), choices)
        self.admission = Admission(context.queue, context.clock, Asked.of(sub_request, tokens, choices * answer))
        by_cache = isinstance(context.config.routing_policy, CacheAware)
        self._cache_route = CacheRoute(context, sub_request, record, tokens) if by_cache else None

    async def look_up(self) -> None:
        """Ask what nodes have cached, where the policy goes by that; before the first plan."""
        if self._cache_route is not None:
            await self._cache_route.look_up()

    async def next_plan(self, acquire: Callable[[Node], object]) -> Plan:
        """As `plan`, but the first one waits in the queue until there is room: those that follow go before all there.

        ``acquire`` takes the decode node's slot, from the plan on, so that the plans that follow see the load.
        """

        def begin(standing: Standing) -> Plan | None:
            chosen = self.plan_with_room(standing)
            if chosen is not None:
                if self._record.phase is not Phase.PLAN:  # it had to wait
                    self._record.enter(Phase.PLAN)
                self._begin_plan(chosen, acquire)
            return chosen

        if not self.admission.runs:
            return await self.admission.begin(begin, self._wait)
        self._record.enter(Phase.PLAN)
        chosen = self.plan()
        self._begin_plan(chosen, acquire)
        return chosen

    def _begin_plan(self, chosen: Plan, acquire: Callable[[Node], object]) -> None:
        acquire(chosen.decode)
        self.admission.planned((chosen.prefill or chosen.decode).name)

    def _wait(self) -> str:
        """It has to wait; in the queue of this model: adapters and other names of one have the same."""
        self._record.enter(Phase.QUEUE)
        model = self._sub_request.request.model
        nodes = (view.node for view in self._context.pool.snapshot().nodes)
        return next((node.model for node in nodes if node.role is Role.DECODE and node.serves(model)), "") or model

    def plan(self) -> Plan:
        """Which nodes now, with room if there are such; raises the `ClientError` where there are none."""
        chosen = self._checked_plan()
        return self._recorded(self._with_room(chosen, self._context.config.decode_fill) or chosen)

    def plan_with_room(self, standing: Standing = Standing.WITHIN) -> Plan | None:
        """As `plan`; None where the decode nodes that could take the prompt have no room for it now.

        By its key's ``standing`` there may be less room: the node that would compute the prompt must be about done with
        those that it has, and a key over its share leaves others some room on decode nodes and some nodes that compute.
        """
        queue, most = self._context.queue, self._context.config.decode_fill
        over = standing is Standing.OVER
        chosen = self._with_room(self._checked_plan(), queue.without_reserve(most) if over else most)
        if chosen is None or (standing and not self._may_compute(chosen, standing)):
            return None
        return self._recorded(chosen)

    def _may_compute(self, chosen: Plan, standing: Standing) -> bool:
        """Whether the node that would compute the prompt may be given it, of a key whose share is used up."""
        queue, name = self._context.queue, (chosen.prefill or chosen.decode).name
        if not queue.about_done(name, self.prompt_tokens):
            return False
        if standing is not Standing.OVER:
            return True
        snapshot = self._context.pool.snapshot()
        places = snapshot.roster.served(self._sub_request.request.model).places
        names = [snapshot.nodes[place].node.name for place in (places.prefills if chosen.prefill else places.decodes)]
        return queue.leaves_nodes(name, names, self._sub_request.request.api_key)

    def _checked_plan(self) -> Plan:
        try:
            return self._plan()
        except UnknownModel as error:
            raise unknown_model_error(error) from error
        except NoNode as error:
            raise self._failed.no_node_left(error) from error

    def _with_room(self, chosen: Plan, most: float) -> Plan | None:
        """A plan whose decode node has room: this one, or another one that disaggregates if this one does."""
        context = self._context
        if context.pool.view(chosen.decode.name).admits(self._footprint, most):
            return chosen
        like = (view for view in context.pool.snapshot().nodes if view.node.role is chosen.decode.role)
        full = frozenset(view.node.name for view in like if not view.admits(self._footprint, most))
        try:
            other = self._plan(full)
        except NO_NODE_ERRORS:
            return None
        return None if other.prefill is None and chosen.prefill is not None else other

    def _recorded(self, chosen: Plan) -> Plan:
        self._record_affinity(Role.PREFILL, chosen.prefill_affinity)
        self._record_affinity(Role.DECODE, chosen.decode_affinity)
        if self._cache_route is not None:
            self._cache_route.planned(chosen)
        return chosen

    def load(self, node: Node, leg: Leg) -> LegLoad:
        """What a prefill or decode leg adds to its node: of a decode leg the caches take in the answers too, if these
        are as long as others were."""
        load = NO_LOAD if self._cache_route is None else self._cache_route.load(node)
        return load._replace(footprint=self._footprint) if leg is Leg.DECODE else load

    def begin_leg(self, node: Node) -> Headers:
        """The headers of a leg that begins now."""
        return self._sub_request.headers if self._cache_route is None else self._cache_route.begin_leg(node)

    def possible(self) -> bool:
        """Whether a plan could be made now."""
        try:
            self._plan()
        except NO_NODE_ERRORS:
            return False
        return True

    def other_decode(self, prefill: Node | None = None) -> Node | None:
        """A decode node that has not failed the request, and that can use a ticket of ``prefill`` if given."""
        context = self._context
        try:
            needs, policy = self._input(prefill), context.config.plan_policy()
            return choose(context.pool.snapshot(), Role.DECODE, needs, policy, next(context.tie_breaker))
        except NO_NODE_ERRORS:
            return None

    def reset(self) -> None:
        """Before a request starts, or goes on elsewhere: nothing has failed, and all retries are left."""
        self.local = self._sub_request.shape.local
        self._failed.restart(Moment.RESUMING if self._resuming else Moment.OPENING)

    def leave(self, node: Node, move: Move) -> None:
        """The stream leaves a node. Others that failed earlier may be tried again."""
        self._failed.excluded = frozenset({node.name})
        self._cohort = node.cohort if self._cohort is None else self._cohort
        self._resuming = move is Move.RESUMED

    def other_than(self, name: str, move: Move) -> bool:
        """Whether another decode node could take a stream over from this one now, by such a move."""
        self._failed.excluded |= {name}
        self._resuming = move is Move.RESUMED  # until it leaves, no plan is made for a leg of this stream
        return self.other_decode() is not None

    def resumes(self, node: Node) -> bool:
        """Whether a decode node can write a stream's journal, and resume one."""
        return node.can_resume and node.name not in self.no_route

    def resumes_elsewhere(self, name: str) -> bool:
        """Whether another node than this one takes requests, could serve a decode leg, and `resumes`."""
        snapshot = self._context.pool.snapshot()
        places = snapshot.roster.served(self._sub_request.request.model).places
        last_resort = places.prefills if self._context.config.on_no_decode is OnNoDecode.PREFILL else ()
        nodes = (snapshot.nodes[place].node for place in (*places.decodes, *last_resort))
        return any(node.name != name and self.resumes(node) for node in nodes)

    def prefilled(self, node: Node, answer: PrefillAnswer) -> None:
        """A prefill leg went well."""
        self.admission.computed()
        if self._cache_route is not None:
            self._cache_route.prefilled(node, answer)

    def first_event(self, node: Node, hand_over: HandOver | None) -> None:
        """A decode leg goes well, with this ticket or without one."""
        self.admission.computed()
        if self._cache_route is not None:
            self._cache_route.first_event(node, hand_over)

    def answered(self, node: Node | None, usage: Usage, hand_over: HandOver | None) -> None:
        """A decode node reported its usage; ``hand_over``: the ticket that it used."""
        if self._cache_route is not None and node is not None:
            self._cache_route.answered(node, usage, hand_over)

    def _record_affinity(self, role: Role, affinity: Affinity | None) -> None:
        if affinity is not None:
            self._record.affinities = {**self._record.affinities, role: affinity}
            self._context.metrics.session_routed(role, affinity)

    def _plan(self, full: frozenset[str] = frozenset()) -> Plan:
        """``full``: names of nodes that are left out this time."""
        context = self._context
        needs, policy = self._input(full=full), context.config.plan_policy()
        return plan(context.pool.snapshot(), needs, policy, next(context.tie_breaker))

    def _input(self, partner: Node | None = None, full: frozenset[str] = frozenset()) -> PlanInput:
        needs = PlanInput(
            self._sub_request.request.model,
            self.local,
            self._failed.excluded | full | self._unable() | self._foreign(),
            partner=partner,
            prompt_tokens=self._tokens,
            session=self._sub_request.request.session,
        )
        return needs if self._cache_route is None else self._cache_route.informed(needs)

    def _foreign(self) -> frozenset[str]:
        """For a stream that moves: decode nodes of other cohorts, maybe of other weights, while there is one of the
        cohort that it began in."""
        if self._cohort is None:
            return frozenset()
        views = [view for view in self._context.pool.snapshot().nodes if view.node.role is Role.DECODE]
        other = frozenset(view.name for view in views if not view.node.pairs_with(self._cohort))
        barred = other | self._failed.excluded | self._unable()
        model = self._sub_request.request.model
        own = (view.takes_requests() and view.node.serves(model) for view in views if view.name not in barred)
        return other if any(own) else frozenset()

    def _unable(self) -> frozenset[str]:
        """Decode nodes that cannot resume, for a leg that does."""
        if not self._resuming:
            return frozenset()
        nodes = (view.node for view in self._context.pool.snapshot().nodes)
        return frozenset(node.name for node in nodes if node.role is Role.DECODE and not self.resumes(node))
