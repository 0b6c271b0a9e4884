"""Watches what is asked of nodes, and says how many of them the last hour needed: on the metrics and the live page."""

from pdproxy.nodes.demand import Advice, Wanted
from pdproxy.nodes.node import Role
from pdproxy.orchestration.context import OrchestrationContext

EVERY = 5.0
"""Seconds between two looks at the decode nodes."""


class SizingWatch:
    """Looks at the decode nodes. ``wanted``: what nodes are counted for."""

    def __init__(self, context: OrchestrationContext, wanted: Wanted) -> None:
        self._context = context
        self._wanted = wanted
        self._demand = context.pool.load.demand

    def look(self) -> None:
        """Note what runs and waits, and set the metrics of the advice that follows. Call it `EVERY` few seconds."""
        context = self._context
        decodes = [view for view in context.pool.state().nodes if Role.DECODE in view.node.roles]
        taken = [(view.node.capacity, view.footprint) for view in decodes]
        caches = sum(capacity.part_taken(each.tokens, each.sequences) for capacity, each in taken if capacity)
        waiting = context.queue.status().waiting
        self._demand.observed(context.clock.now(), sum(view.legs(Role.DECODE) for view in decodes), waiting, caches)
        advice = self.advice()
        context.metrics.nodes.nodes_needed(Role.PREFILL, advice.prefill)
        context.metrics.nodes.nodes_needed(Role.DECODE, advice.decode)

    def advice(self) -> Advice:
        """As of the last look."""
        return self._demand.advice(self._context.clock.now(), self._wanted)
