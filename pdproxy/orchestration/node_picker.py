"""Which nodes one prompt goes to: plans, excluded nodes, faults that count against nodes, retries that are left."""

from pdproxy.errors import Fault, NodeFault, PdproxyError
from pdproxy.failures import (
    NO_RETRY_USED,
    Blame,
    Moment,
    RetryOptions,
    Step,
    blame,
    decide,
    final_step,
)
from pdproxy.nodes.node import Node, Role
from pdproxy.nodes.pool import Pool
from pdproxy.observe.labels import Leg
from pdproxy.orchestration.client_errors import final_error, no_node_error
from pdproxy.orchestration.context import OrchestrationContext
from pdproxy.orchestration.resources import HandOver
from pdproxy.orchestration.sub_request import RouteReason, SubRequest, max_prompt_tokens
from pdproxy.planning.plan import NoNode, Plan, PlanInput, UnknownModel, choose, plan


class FaultReporter:
    """Reports to the pool. What the request itself may have caused waits until another node has served it."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._doubted: list[tuple[Leg, str]] = []
        self.excluded: frozenset[str] = frozenset()
        """Nodes that failed this request: not planned for it again."""

    def failed(self, leg: Leg, name: str, fault: Fault) -> None:
        """A leg failed on a node."""
        self.excluded |= {name}
        if blame(leg, fault) is Blame.IF_ANOTHER_SERVED:
            self._doubted.append((leg, name))
        elif blame(leg, fault) is Blame.YES:
            self._pool.report(name, fault)

    def served(self, leg: Leg, name: str) -> None:
        """A leg went well. A decode leg clears the request of every doubt, a prefill leg of those about prefill."""
        self._pool.report(name, None)
        for doubt in tuple(self._doubted):
            if leg in (Leg.DECODE, doubt[0]):
                self._doubted.remove(doubt)
                self._report_doubted(doubt[1], name)

    def exclude(self, name: str) -> None:
        """Do not plan this node again for the request; nothing is held against it."""
        self.excluded |= {name}

    def clear_excluded(self) -> None:
        """The request got an answer since: nodes that failed it before may be tried again."""
        self.excluded = frozenset()

    def _report_doubted(self, doubted: str, witness: str) -> None:
        if doubted != witness:
            self._pool.report(doubted, Fault.SERVER_ERROR)


class RetryState:
    """Counts down; a new one is made for every opening."""

    def __init__(self, context: OrchestrationContext) -> None:
        self._context = context
        self._left = dict.fromkeys((Leg.PREFILL, Leg.DECODE), context.config.retries)
        self._last: tuple[Leg, NodeFault] | None = None

    def next_step(self, leg: Leg, fault: NodeFault, hand_over: HandOver | None) -> Step:
        """The next step after a failed leg."""
        self._last = (leg, fault)
        step = decide(leg, Moment.OPENING, fault.fault, self._chances(leg, hand_over))
        self._left[leg] -= fault.fault not in NO_RETRY_USED
        self._context.metrics.step_taken(leg, fault.fault, step)
        return step

    def no_node_left(self, error: NoNode) -> PdproxyError:
        """No node is left: the last fault tells why, if there was one."""
        if self._last is None:
            return no_node_error(error)
        leg, fault = self._last
        return final_error(leg, Moment.OPENING, final_step(leg, Moment.OPENING, fault.fault), fault)

    def _chances(self, leg: Leg, hand_over: HandOver | None) -> RetryOptions:
        config = self._context.config
        works = hand_over is not None and self._context.clock.now() - hand_over.issued_at < config.ticket_life
        return RetryOptions(config.on_prefill_failure, self._left[leg], works, migrations=0, continuable=False)


NO_NODE_ERRORS = (NoNode, UnknownModel)
"""Why there is no other node: none can take it now, or the last that served the model was removed meanwhile."""


class NodePicker:
    """Asks `planning` with a fresh snapshot each time; does no I/O."""

    def __init__(self, context: OrchestrationContext, sub_request: SubRequest, fault_reporter: FaultReporter) -> None:
        self._context = context
        self._sub_request = sub_request
        self._fault_reporter = fault_reporter
        self._local = _why(sub_request)
        short = context.config.local_below_tokens > 0
        self._tokens = max_prompt_tokens(sub_request.endpoint, sub_request.body) if short else None

    def plan(self) -> Plan:
        """Which nodes now.

        Raises:
            UnknownModel: no node serves the model.
            NoNode: none can take it now.
        """
        context = self._context
        return plan(context.pool.snapshot(), self._needs(), context.config.plan_policy(), next(context.tie_breaker))

    def possible(self) -> bool:
        """Whether a plan could be made now."""
        try:
            self.plan()
        except NO_NODE_ERRORS:
            return False
        return True

    def other_decode(self, prefill: Node) -> Node | None:
        """Another decode node that can use a ticket of ``prefill``, None where there is none."""
        try:
            return self._choose_decode(self._needs(prefill))
        except NO_NODE_ERRORS:
            return None

    def other_node_available(self) -> bool:
        """Whether a decode node is there that has not failed the request."""
        try:
            self._choose_decode(self._needs())
        except NO_NODE_ERRORS:
            return False
        return True

    def without_prefill(self, why: RouteReason) -> None:
        """From now on the decode node computes the prompt."""
        self._local = why

    def reset(self) -> None:
        """A new leg begins: what was decided for the last one is forgotten."""
        self._local = _why(self._sub_request)

    def _choose_decode(self, needs: PlanInput) -> Node:
        return choose(self._context.pool.snapshot(), Role.DECODE, needs, next(self._context.tie_breaker))

    def _needs(self, ticket_of: Node | None = None) -> PlanInput:
        """``ticket_of``: the prefill node whose ticket is at hand."""
        return PlanInput(
            self._sub_request.request.model,
            self._local,
            self._fault_reporter.excluded,
            ticket_of=ticket_of,
            prompt_tokens=self._tokens,
        )


def _why(sub_request: SubRequest) -> RouteReason | None:
    because = sub_request.shape.local_because
    return None if because is None else RouteReason.of(because)
