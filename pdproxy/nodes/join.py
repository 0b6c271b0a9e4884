"""How a node comes in: preflight, judgement, introduction to its partners, UP."""

import logging

from pdproxy.errors import NodeFault
from pdproxy.nodes.compatibility import Compatibility, check_compatibility
from pdproxy.nodes.fingerprints import unpaired
from pdproxy.nodes.node import Node, State
from pdproxy.nodes.node_info import NodeInfo
from pdproxy.nodes.pool import Pool
from pdproxy.nodes.preflight import Preflight
from pdproxy.nodes.proof import Introduction
from pdproxy.nodes.reachability import OutageLog, reason, what

_LOG = logging.getLogger(__name__)

MOST_LOOKS = 15
"""How often a node is looked at whose engine has not told what it publishes when it starts; about a second apart."""


class Joiner:
    """Admits nodes to the pool, or refuses them by the name of the setting.

    Args:
        introduction: to its partners; None leaves first pairs cold.
        outages: what is logged of nodes that cannot be asked; None logs nothing.
    """

    def __init__(
        self,
        pool: Pool,
        preflight: Preflight,
        introduction: Introduction | None = None,
        outages: OutageLog | None = None,
    ) -> None:
        self._pool = pool
        self._preflight = preflight
        self._introduction = introduction
        self._outages = outages
        self._accepted: dict[str, NodeInfo] = {}
        self._looks: dict[str, int] = {}

    async def attempt(self, name: str) -> None:
        """Try to bring one node of the pool in; it stays as it is when it cannot be reached.

        Raises:
            UnknownNode: it has left.
        """
        node = self._pool.configured(name)
        try:
            info = await self._preflight.inspect(node)
        except NodeFault as fault:
            self._pool.set_join_reason(name, f"{what(fault)}: {reason(fault)}")
            if self._outages and self._has(node):
                self._outages.failed(node, fault)
            return
        if self._outages:
            self._outages.answered(node)
        if not self._has(node) or self._is_early(info):
            return
        verdict = check_compatibility(info, self._others(name))
        if verdict.refusals:
            self._refuse(name, verdict)
            return
        await self._admit(info, verdict)

    def _others(self, name: str) -> list[NodeInfo]:
        """The facts of the other accepted nodes that are still there."""
        there = {view.node.name for view in self._pool.snapshot().nodes}
        self._accepted = {key: info for key, info in self._accepted.items() if key in there}
        return [info for key, info in self._accepted.items() if key != name]

    def _refuse(self, name: str, verdict: Compatibility) -> None:
        reason = "; ".join(map(str, verdict.refusals))
        self._accepted.pop(name, None)
        if self._pool.view(name).reason != reason:
            _LOG.error("node %s is refused: %s", name, reason)
        self._pool.refuse(name, reason)

    async def _admit(self, info: NodeInfo, verdict: Compatibility) -> None:
        """Accepted before its introduction: two nodes that join at the same time are judged against each other."""
        node = info.joined()
        self._accepted[node.name] = info
        if self._introduction is not None:
            await self._introduction.join(node)
        if self._has(info.node):
            self._pool.admit(node)
            _LOG.info("node %s serves %s as %s node", node.name, node.model or "any model", node.role)
            self._log_findings(info, verdict)

    def _log_findings(self, info: NodeInfo, verdict: Compatibility) -> None:
        for warning in verdict.warnings:
            _LOG.warning("node %s: %s", info.node.name, warning)
        for difference in unpaired(info, self._others(info.node.name)):
            _LOG.warning("node %s exchanges no tickets: %s", info.node.name, difference)

    def _is_early(self, info: NodeInfo) -> bool:
        """Whether the engine has not told yet what its connector publishes once it steps for the first time.

        Its fingerprint is part of that: a node admitted without it would be of a cohort of its own.
        """
        name = info.node.name
        self._looks[name] = self._looks.get(name, 0) + 1
        if info.labels and info.capacity is None and self._looks[name] < MOST_LOOKS:
            if self._pool.view(name).state is not State.JOINING:
                self._pool.rejoin(name)  # it restarted, and what is known of it may be another one's
            self._pool.set_join_reason(name, "its engine has not told yet what its cache holds")
            return True
        del self._looks[name]
        return False

    def _has(self, node: Node) -> bool:
        """Whether the pool still has this very node (it may have been removed, even replaced, while we asked)."""
        there = any(view.node.name == node.name for view in self._pool.snapshot().nodes)
        return there and self._pool.configured(node.name) == node
