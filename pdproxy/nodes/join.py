"""How a node comes in: preflight, judgement, warm-up, UP."""

import asyncio
import logging

from pdproxy.errors import NodeFault
from pdproxy.nodes.facts import Facts
from pdproxy.nodes.judge import Verdict, judge
from pdproxy.nodes.node import Node, Role, State
from pdproxy.nodes.pool import Pool
from pdproxy.nodes.preflight import Preflight
from pdproxy.nodes.reachability import OutageLog, reason, what
from pdproxy.nodes.warm import WarmUp

_LOG = logging.getLogger(__name__)

WARMED_PAIRS = 8
"""With how many partners a node is warmed before it serves: each costs a request, and clients warm the others."""


class Joiner:
    """Admits nodes to the pool, or refuses them by the name of the setting.

    Args:
        warm_up: None leaves first pairs cold.
        outages: what is logged of nodes that cannot be asked; None logs nothing.
    """

    def __init__(
        self, pool: Pool, preflight: Preflight, warm_up: WarmUp | None = None, outages: OutageLog | None = None
    ) -> None:
        self._pool = pool
        self._preflight = preflight
        self._warm_up = warm_up
        self._outages = outages
        self._accepted: dict[str, Facts] = {}

    async def attempt(self, name: str) -> None:
        """Try to bring one node of the pool in; it stays as it is when it cannot be reached.

        Raises:
            UnknownNode: it has left.
        """
        node = self._pool.configured(name)
        try:
            facts = await self._preflight.inspect(node)
        except NodeFault as fault:
            self._pool.waiting(name, f"{what(fault)}: {reason(fault)}")
            if self._outages and self._has(node):
                self._outages.failed(node, fault)
            return
        if self._outages:
            self._outages.answered(node)
        if not self._has(node):
            return
        verdict = judge(facts, self._others(name))
        if verdict.refusals:
            self._refuse(name, verdict)
            return
        await self._admit(facts, verdict)

    def _others(self, name: str) -> list[Facts]:
        """The facts of the other accepted nodes that are still there."""
        there = {view.node.name for view in self._pool.snapshot().nodes}
        self._accepted = {key: facts for key, facts in self._accepted.items() if key in there}
        return [facts for key, facts in self._accepted.items() if key != name]

    def _refuse(self, name: str, verdict: Verdict) -> None:
        reason = "; ".join(map(str, verdict.refusals))
        self._accepted.pop(name, None)
        if self._pool.view(name).reason != reason:
            _LOG.error("node %s is refused: %s", name, reason)
        self._pool.refuse(name, reason)

    async def _admit(self, facts: Facts, verdict: Verdict) -> None:
        """Accepted before it is warm: two nodes that join at the same time must be judged against each other."""
        node = facts.joined()
        self._accepted[node.name] = facts
        await self._warm(node)
        if self._has(facts.node):
            self._pool.admit(node)
            _LOG.info("node %s serves %s as %s node", node.name, node.model or "any model", node.role)
            for warning in verdict.warnings:
                _LOG.warning("node %s: %s", node.name, warning)

    async def _warm(self, node: Node) -> None:
        if self._warm_up is None:
            return
        partners = self._partners(node)[:WARMED_PAIRS]
        pairs = ((node, partner) if node.role is Role.PREFILL else (partner, node) for partner in partners)
        await asyncio.gather(*(_warm_pair(self._warm_up, prefill, decode) for prefill, decode in pairs))

    def _partners(self, node: Node) -> list[Node]:
        return [
            view.node
            for view in self._pool.snapshot().nodes
            if view.state is State.UP
            and view.node.role is not node.role
            and view.node.pairs_with(node.cohort)
            and view.node.model == node.model != ""
        ]

    def _has(self, node: Node) -> bool:
        """Whether the pool still has this very node (it may have been removed, even replaced, while we asked)."""
        there = any(view.node.name == node.name for view in self._pool.snapshot().nodes)
        return there and self._pool.configured(node.name) == node


async def _warm_pair(warm_up: WarmUp, prefill: Node, decode: Node) -> None:
    """A pair that stays cold is slower once, no reason to keep a node out."""
    try:
        await warm_up.pair(prefill, decode, decode.model)
    except NodeFault as fault:
        _LOG.warning("no warm-up from %s to %s: %s", prefill.name, decode.name, fault)
