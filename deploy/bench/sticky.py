"""Sessions that stay where they began, for simulations: the policy `sticky_least_loaded` of vllm-router.

A session's first request goes to the nodes with the fewest legs, of equally busy ones to those with the fewest
sessions; all others follow it. Nothing else is looked at.
"""

from collections import Counter

from pdproxy.nodes.node import NodeView, Role
from pdproxy.planning.plan import Candidates
from pdproxy.planning.plan_types import Plan
from pdproxy.reasons import LocalReason


class Sticky:
    """A `RoutingPolicy`; every request must name a session, and the nodes must stay."""

    def __init__(self) -> None:
        self._own: dict[tuple[Role, int], str] = {}

    def one_node(
        self,
        candidates: Candidates,
        role: Role,
        turn: int,  # noqa: ARG002 - the sessions decide
        local: LocalReason | None = None,
    ) -> Plan | None:
        """The session's own node of a role, alone."""
        found = self._of(candidates, role)
        return None if found is None else Plan(None, found.node, local)

    def pair(self, candidates: Candidates, turn: int) -> Plan | None:  # noqa: ARG002
        """The session's own nodes."""
        prefill, decode = (self._of(candidates, role) for role in Role)
        return Plan(prefill.node, decode.node) if prefill is not None and decode is not None else None

    def _of(self, candidates: Candidates, role: Role) -> NodeView | None:
        views = {view.name: view for view in candidates.open(role)}
        key = role, candidates.needs.session or 0
        if key not in self._own and views:
            sessions = Counter(name for (of_role, _), name in self._own.items() if of_role is role)
            self._own[key] = min(views, key=lambda name: (views[name].active, sessions[name]))
        return views.get(self._own.get(key, ""))
