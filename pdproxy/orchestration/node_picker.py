"""Which nodes one prompt goes to: plans, excluded nodes, faults that count against nodes, retries that are left."""

from pdproxy.errors import Fault, NodeFault, PdproxyError
from pdproxy.failures import NO_RETRY_USED, Blame, Moment, RetryOptions, Step, blame, decide, final_step
from pdproxy.legs.shape import max_prompt_tokens
from pdproxy.nodes.node import Node, Role
from pdproxy.nodes.pool import Pool
from pdproxy.observe.labels import Leg
from pdproxy.orchestration.client_errors import final_error, no_node_error
from pdproxy.orchestration.context import OrchestrationContext
from pdproxy.orchestration.resources import HandOver
from pdproxy.planning.plan import NoNode, Plan, PlanInput, UnknownModel, choose, plan
from pdproxy.request import LocalReason, SubRequest


class FaultReporter:
    """Reports faults to the pool; those that the request may have caused itself only once another node served it."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._unreported: list[tuple[Leg, str]] = []
        self.excluded: frozenset[str] = frozenset()
        """Nodes that are not planned for this request again: those that failed it, and one that its stream leaves."""

    def failed(self, leg: Leg, name: str, fault: Fault) -> None:
        """A leg failed on a node."""
        self.excluded |= {name}
        if blame(leg, fault) is Blame.IF_ANOTHER_SERVED:
            self._unreported.append((leg, name))
        elif blame(leg, fault) is Blame.YES:
            self._pool.report(name, fault)

    def served(self, leg: Leg, name: str) -> None:
        """A leg went well: earlier faults of the same leg on other nodes count now; after a decode leg, all do."""
        self._pool.report(name, None)
        counting = [earlier for earlier in self._unreported if leg in (Leg.DECODE, earlier[0])]
        for earlier in counting:
            self._unreported.remove(earlier)
            if earlier[1] != name:
                self._pool.report(earlier[1], Fault.SERVER_ERROR)


class RetryState:
    """The retries that are left to a request, each leg with its own, until it gets an answer."""

    def __init__(self, context: OrchestrationContext) -> None:
        self._context = context
        self._left = dict.fromkeys((Leg.PREFILL, Leg.DECODE, Leg.FORWARD), context.config.retries)
        self._last: tuple[Leg, NodeFault] | None = None

    def next_step(self, leg: Leg, fault: NodeFault, hand_over: HandOver | None = None) -> Step:
        """The next step after a failed leg, by the failure table."""
        self._last = (leg, fault)
        config, now = self._context.config, self._context.clock.now()
        works = hand_over is not None and now - hand_over.issued_at < config.ticket_life
        options = RetryOptions(config.on_prefill_failure, self._left[leg], ticket_works=works)
        step = decide(leg, Moment.OPENING, fault.fault, options)
        self._left[leg] -= fault.fault not in NO_RETRY_USED
        self._context.metrics.step_taken(leg, fault.fault, step)
        return step

    def no_node_left(self, error: NoNode) -> PdproxyError:
        """The error where a next step finds no node: that of the last fault, if there was one."""
        if self._last is None:
            return no_node_error(error)
        leg, fault = self._last
        return final_error(leg, Moment.OPENING, final_step(leg, Moment.OPENING, fault.fault), fault)


NO_NODE_ERRORS = (NoNode, UnknownModel)
"""There is no other node: none can take it now, or the last that served the model was removed meanwhile."""


class NodePicker:
    """Plans one prompt, with a fresh snapshot of the pool each time; does no I/O."""

    def __init__(self, context: OrchestrationContext, sub_request: SubRequest, fault_reporter: FaultReporter) -> None:
        self._context = context
        self._sub_request = sub_request
        self._fault_reporter = fault_reporter
        self._local = sub_request.shape.local
        short = context.config.local_below_tokens > 0
        self._tokens = max_prompt_tokens(sub_request.endpoint, sub_request.body) if short else None

    def plan(self) -> Plan:
        """Which nodes now; raises as `planning.plan`."""
        context = self._context
        return plan(context.pool.snapshot(), self._input(), context.config.plan_policy(), next(context.tie_breaker))

    def possible(self) -> bool:
        """Whether a plan could be made now."""
        try:
            self.plan()
        except NO_NODE_ERRORS:
            return False
        return True

    def other_decode(self, prefill: Node | None = None) -> Node | None:
        """A decode node that has not failed the request, and that can use a ticket of ``prefill`` if given."""
        snapshot = self._context.pool.snapshot()
        try:
            return choose(snapshot, Role.DECODE, self._input(prefill), next(self._context.tie_breaker))
        except NO_NODE_ERRORS:
            return None

    def without_prefill(self, reason: LocalReason) -> None:
        """From now on the decode node computes the prompt."""
        self._local = reason

    def reset(self) -> None:
        """Before a request, or its continuation, starts: an earlier `without_prefill` no longer holds."""
        self._local = self._sub_request.shape.local

    def _input(self, ticket_of: Node | None = None) -> PlanInput:
        return PlanInput(
            self._sub_request.request.model,
            self._local,
            self._fault_reporter.excluded,
            ticket_of=ticket_of,
            prompt_tokens=self._tokens,
        )
