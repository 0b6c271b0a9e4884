"""Which nodes one prompt goes to: plans, excluded nodes, faults that count against nodes, retries that are left."""

import logging
from collections.abc import Callable
from typing import NamedTuple

from pdproxy.errors import Fault, NodeFault, PdproxyError, untraced
from pdproxy.failures import NO_RETRY_USED, Blame, Moment, RetryOptions, Step, blame, decide, final_step
from pdproxy.legs.calls import PrefillAnswer
from pdproxy.nodes.node import Footprint, Node, Role
from pdproxy.nodes.outlier import Source, Verdict
from pdproxy.nodes.pool import Pool
from pdproxy.nodes.pool_entry import NO_LOAD, LegLoad
from pdproxy.observe.labels import Affinity, Leg, Move, Phase
from pdproxy.orchestration.cache_route import CacheRoute
from pdproxy.orchestration.client_errors import final_error, no_node_error, unknown_model_error
from pdproxy.orchestration.context import OrchestrationContext, deadline_passed
from pdproxy.orchestration.in_flight import LegFailure
from pdproxy.orchestration.request_queue import Asked
from pdproxy.orchestration.request_record import PromptRecord
from pdproxy.orchestration.resources import Admission, HandOver
from pdproxy.planning.cache_aware import CacheAware
from pdproxy.planning.plan import choose, plan
from pdproxy.planning.plan_types import NoNode, Plan, PlanInput, UnknownModel
from pdproxy.planning.shares import Standing
from pdproxy.request import Headers, LocalReason, SubRequest
from pdproxy.settings.types import OnNoDecode
from pdproxy.usage import Usage

_LOG = logging.getLogger(__name__)
_NO_NAMES = frozenset[str]()


class _Failed(NamedTuple):
    """A leg whose request may have caused its fault."""

    leg: Leg
    node: str
    fault: Fault
    moment: Moment


class FaultReporter:
    """Tells the pool how the legs of one prompt ended. A fault that the prompt may have caused is told once another
    node has served it, or at the end, when none has; never where the same node has served it after all."""

    def __init__(self, pool: Pool, source: Source) -> None:
        self._pool = pool
        self._source = source
        self._in_doubt: list[_Failed] = []
        self.excluded = _NO_NAMES
        """Nodes that are not planned for this request again: those that failed it, and one that its stream leaves."""

    def failed(self, leg: Leg, name: str, fault: Fault, moment: Moment = Moment.OPENING) -> None:
        """A leg failed on a node."""
        self.excluded |= {name}
        failed = _Failed(leg, name, fault, moment)
        match blame(leg, fault):
            case Blame.IN_DOUBT:
                self._in_doubt.append(failed)
            case Blame.YES:
                self._tell(failed, Verdict.NODE)

    def began(self, leg: Leg, name: str) -> None:
        """A leg goes well: legs of its kind that did not get so far elsewhere failed by their nodes' fault; after a
        decode leg, prefill legs too."""
        self._pool.leg_began(name, leg)
        if self._in_doubt:
            self._served(name, lambda failed: failed.moment is not Moment.STREAMING and leg in (Leg.DECODE, failed.leg))

    def ended(self, leg: Leg, name: str) -> None:
        """A leg has ended well."""
        self._pool.leg_ended(name, leg, self._source.client)
        if self._in_doubt:
            self._served(name, lambda failed: leg in (Leg.DECODE, failed.leg))

    def close(self) -> None:
        """The prompt is at its end: what failed until now nobody has served. Idempotent."""
        if self._in_doubt:
            in_doubt, self._in_doubt = self._in_doubt, []
            for failed in in_doubt:
                self._tell(failed, Verdict.UNSERVED)

    def _served(self, name: str, tells_of: Callable[[_Failed], bool]) -> None:
        served = [failed for failed in self._in_doubt if tells_of(failed)]
        self._in_doubt = [failed for failed in self._in_doubt if failed not in served]
        for failed in served:
            if failed.node != name:
                self._tell(failed, Verdict.SERVED)

    def _tell(self, failed: _Failed, verdict: Verdict) -> None:
        streaming = failed.moment is Moment.STREAMING
        self._pool.leg_failed(failed.node, failed.leg, failed.fault, self._source, verdict, streaming=streaming)


def _broke_off(fault: NodeFault) -> bool:
    """Whether the node broke the connection off: the request may have ended its process."""
    return fault.fault is Fault.RESET or fault.resent


class RetryState:
    """The retries that are left to a request, each leg with its own, until it gets an answer.

    Args:
        broken: nodes that broke off under it, by the kind of leg; counted on here.
        decode_moment: whether its decode legs begin an answer or resume one.

    Attributes:
        on_going_node: the last leg that failed did so on a node that goes away.
    """

    def __init__(
        self, context: OrchestrationContext, broken: dict[Leg, int], decode_moment: Moment = Moment.OPENING
    ) -> None:
        self._context = context
        self._broken = broken
        self._decode_moment = decode_moment
        self._used: dict[Leg, int] = {}
        self._last: tuple[Leg, NodeFault] | None = None
        self.on_going_node = False

    def next_step(self, leg: Leg, fault: NodeFault, *, ticket_works: bool = False) -> Step:
        """The next step after a failed leg, by the failure table."""
        self._last = (leg, untraced(fault))
        used = self._used.get(leg, 0)
        config = self._context.config
        self._broken[leg] = broken = self._broken.get(leg, 0) + _broke_off(fault)
        retries = config.retries - used
        options = RetryOptions(config.on_prefill_failure, retries, ticket_works=ticket_works, broken=broken)
        moment = self._decode_moment if leg is Leg.DECODE else Moment.OPENING
        step = decide(leg, moment, fault.fault, options)
        self._used[leg] = used + (fault.fault not in NO_RETRY_USED)
        self._context.metrics.step_taken(leg, fault.fault, step)
        return step

    def no_node_left(self, error: NoNode) -> PdproxyError:
        """The error where a next step finds no node: that of the last fault, if there was one that says something.

        How a node fails that is ending says nothing: vLLM answers 500 then. There is no node, for now.
        """
        if self._last is None or self.on_going_node:
            return no_node_error(error)
        leg, fault = self._last
        return final_error(leg, Moment.OPENING, final_step(leg, Moment.OPENING, fault.fault), fault)


NO_NODE_ERRORS = (NoNode, UnknownModel)
"""There is no other node: none can take it now, or the last that served the model was removed meanwhile."""


class NodePicker:
    """Plans one prompt, with a fresh snapshot of the pool each time, and records how its nodes did; does no I/O.

    Attributes:
        prompt_tokens: about how many the prompt has.
        admission: its way through the queue; to be ended.
        no_route: names of nodes that turned out not to know the route of streams that can be resumed.
    """

    def __init__(self, context: OrchestrationContext, sub_request: SubRequest, record: PromptRecord) -> None:
        self._context = context
        self._sub_request = sub_request
        self._record = record
        request = sub_request.request
        self._fault_reporter = FaultReporter(context.pool, Source(request.request_id, request.api_key, request.session))
        self._broken: dict[Leg, int] = {}
        self._retry_state = RetryState(context, self._broken)
        self._local = sub_request.shape.local
        self._resuming = False
        self._cohort: str | None = None
        """Of the node where a stream that has moved began."""
        self.no_route = _NO_NAMES
        short = context.config.local_below_tokens > 0
        self._tokens = sub_request.shape.most_prompt_tokens if short else None
        self.prompt_tokens = tokens = sub_request.shape.prompt_tokens
        choices, longest = sub_request.shape.choices, sub_request.shape.longest
        answer = context.in_flight.output_lengths.expected(sub_request.request.model, longest)
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
            raise self._retry_state.no_node_left(error) from error

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
        self._local = self._sub_request.shape.local
        moment = Moment.RESUMING if self._resuming else Moment.OPENING
        self._retry_state = RetryState(self._context, self._broken, moment)

    def leave(self, node: Node, move: Move) -> None:
        """The stream leaves a node. Others that failed earlier may be tried again."""
        self._fault_reporter.excluded = frozenset({node.name})
        self._cohort = node.cohort if self._cohort is None else self._cohort
        self._resuming = move is Move.RESUMED

    def other_than(self, name: str, move: Move) -> bool:
        """Whether another decode node could take a stream over from this one now, by such a move."""
        self._fault_reporter.excluded |= {name}
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
        self._fault_reporter.began(Leg.PREFILL, node.name)
        self._fault_reporter.ended(Leg.PREFILL, node.name)
        self._broken.pop(Leg.PREFILL, None)
        self.admission.computed()
        if self._cache_route is not None:
            self._cache_route.prefilled(node, answer)

    def first_event(self, node: Node, hand_over: HandOver | None) -> None:
        """A decode leg goes well, with this ticket or without one."""
        self._fault_reporter.began(Leg.DECODE, node.name)
        if not self._sub_request.shape.stream:
            self._fault_reporter.ended(Leg.DECODE, node.name)
        if self._cohort is None:  # one that has moved may begin only to break off where it did before
            self._broken.pop(Leg.DECODE, None)
        self.admission.computed()
        if self._cache_route is not None:
            self._cache_route.first_event(node, hand_over)

    def went_on(self) -> None:
        """The client has got more of a stream that has moved: it does not end where it broke off before."""
        self._broken.pop(Leg.DECODE, None)

    def broke_off(self, node: str, fault: NodeFault) -> int:
        """A stream's node failed after its first event: how many nodes broke off under it, one after another."""
        self.record_fault(Leg.DECODE, node, fault, Moment.STREAMING)
        self._broken[Leg.DECODE] = broken = self._broken.get(Leg.DECODE, 0) + _broke_off(fault)
        return broken

    def stream_ended(self, node: str) -> None:
        """A stream has ended well on its last node."""
        self._fault_reporter.ended(Leg.DECODE, node)

    def end(self) -> None:
        """The prompt is at its end, whatever that is. Idempotent."""
        self._fault_reporter.close()
        self.admission.end()

    def answered(self, node: Node | None, usage: Usage, hand_over: HandOver | None) -> None:
        """A decode node reported its usage; ``hand_over``: the ticket that it used."""
        if self._cache_route is not None and node is not None:
            self._cache_route.answered(node, usage, hand_over)

    def failed(self, leg: Leg, node: Node, fault: NodeFault, *, ticket_works: bool = False) -> Step:
        """A leg failed before its first event: record it; the next step."""
        self.record_fault(leg, node.name, fault)
        self._retry_state.on_going_node = self._context.pool.is_going(node.name)
        step = self._retry_state.next_step(leg, fault, ticket_works=ticket_works)
        self.record_step(leg, node.name, fault, step)
        return step

    def prefill_failed(self, node: Node, fault: NodeFault) -> None:
        """A prefill leg failed: the next plan has another prefill node, or none; or the client's error is raised."""
        match self.failed(Leg.PREFILL, node, fault):
            case Step.OTHER_PREFILL:
                pass
            case Step.LOCAL:
                self._local = LocalReason.PREFILL_FAILED
            case step:
                raise final_error(Leg.PREFILL, Moment.OPENING, step, fault)

    def record_fault(self, leg: Leg, node: str, fault: NodeFault, moment: Moment = Moment.OPENING) -> None:
        """Count and log a failed leg; a fault that our own deadline made does not count against the node.

        The line of the request's end tells of it, too: as a warning, if the request fails.
        """
        self._context.metrics.leg_failed(leg, fault.fault)
        self._record.failure.leg_failed(leg, node, fault)
        name = self._sub_request.name
        _LOG.info("request %s: %s leg on %s: %s: %s", name, leg, node, fault.fault, fault.detail)
        if not deadline_passed(self._context.clock, self._sub_request.request.deadline):
            self._fault_reporter.failed(leg, node, fault.fault, moment)

    def record_step(self, leg: Leg, node: str, fault: NodeFault, step: Step) -> None:
        """Show the operator a leg's failure and the step that follows."""
        now, name, failure = self._context.clock.now(), self._sub_request.name, self._record.failure
        self._context.in_flight.failed(LegFailure(now, name, leg, node, fault.fault, step, failure))

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
            self._local,
            self._fault_reporter.excluded | full | self._unable() | self._foreign(),
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
        barred = other | self._fault_reporter.excluded | self._unable()
        model = self._sub_request.request.model
        own = (view.takes_requests() and view.node.serves(model) for view in views if view.name not in barred)
        return other if any(own) else frozenset()

    def _unable(self) -> frozenset[str]:
        """Decode nodes that cannot resume, for a leg that does."""
        if not self._resuming:
            return frozenset()
        nodes = (view.node for view in self._context.pool.snapshot().nodes)
        return frozenset(node.name for node in nodes if node.role is Role.DECODE and not self.resumes(node))
