"""Which nodes a request goes to, and whether to disaggregate at all: pure, decided by the pool's state before any I/O.

Plans that are possible stand here; a policy chooses among them. `policies` has all policies by name: the default is
`cache_aware.CacheAware`. The simplest one, `LeastLoaded`, stands here, for `session` falls back on it.
"""

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Protocol

from pdproxy.nodes.node import Bars, Node, NodeGroup, NodeView, PlaceSet, PoolState, Role, Seeds, Spot
from pdproxy.planning.allowed_pairs import lightest_allowed_pair
from pdproxy.planning.plan_types import NoNode, Plan, PlanInput, UnknownModel
from pdproxy.reasons import LocalReason, NoNodeReason
from pdproxy.settings.types import OnNoDecode, OnPrefillFailure

_LOAD = operator.attrgetter("load")


class Candidates:
    """The nodes that one request may go to now.

    Attributes:
        bars: of the pool.
        book: how fast the places are, and how busy they were.
        needs: what the plan is made for.
        restricted: whether any of them must not get it: see `may_take`.
        may_pair: whether there is a pair at all, but for bars and nodes that failed this request.
        shared: whether any node has both roles.
        lone_ranks: whether each node is one place.
    """

    __slots__ = ("_served", "bars", "book", "lone_ranks", "may_pair", "needs", "restricted", "shared")

    def __init__(self, pool_state: PoolState, needs: PlanInput) -> None:
        """Raises UnknownModel where no decode node, in whatever state, serves the model."""
        if not pool_state.knows(needs.model):
            raise UnknownModel(needs.model, pool_state.models)
        self.needs = needs
        self._served = served = pool_state.served(needs.model)
        self.restricted = bool(needs.excluded) or needs.partner is not None
        self.may_pair, self.shared, self.lone_ranks = served.pairs, served.shared, served.lone_ranks
        self.bars, self.book = pool_state.bars, pool_state.load

    def serving(self, role: Role) -> Sequence[NodeView]:
        """The nodes of a role that take requests for the model, those included that must not get this one."""
        return self._served.all.of(role)

    def seeds(self, role: Role) -> Seeds:
        """The seeds by which these are hashed, in the same order."""
        return self._served.seeds[role]

    def heaviest(self, role: Role) -> float:
        """The greatest weight of these; 1 where there are none."""
        return self._served.heaviest[role]

    def open(self, role: Role) -> Sequence[NodeView]:
        """Those that may get it, in the order of joining."""
        views = self._served.all.of(role)
        return tuple(filter(self.may_take, views)) if self.restricted else views

    def may_take(self, view: NodeView) -> bool:
        """Whether one that serves the model may get this request."""
        partner = self.needs.partner
        return view.name not in self.needs.excluded and (partner is None or self.allow(partner, view.node))

    def cohorts(self) -> Sequence[NodeGroup]:
        """Those of each cohort; bars are not looked at."""
        cohorts = self._served.cohorts
        if not self.restricted:
            return cohorts
        may = self.may_take
        return [
            NodeGroup(each.cohort, tuple(filter(may, each.prefills)), tuple(filter(may, each.decodes)))
            for each in cohorts
        ]

    def spots(self, role: Role) -> Mapping[tuple[str, int], Spot]:
        """The places of the nodes of a role that take requests for the model, by the node's name and the rank. Those
        that must not get this one are included: see `may_take`."""
        return self._served.spots[role]

    def spots_of(self, role: Role, places: PlaceSet) -> Sequence[Spot]:
        """Those of a set of places; as `spots`."""
        return self._served.spots_of(role, places)

    def allow(self, prefill: Node, decode: Node) -> bool:
        """Whether a ticket can pass from one to the other."""
        return prefill.pairs_with(decode.cohort) and self.bars.allow(prefill.name, decode.name)


class RoutingPolicy(Protocol):
    """How one is chosen among several nodes. Each method returns None where there is no candidate.

    ``turn`` grows by one with each plan, so that nodes between which nothing else decides take turns.
    """

    def one_node(self, candidates: Candidates, role: Role, turn: int, local: LocalReason | None = None) -> Plan | None:
        """One of the open nodes of a role, as the decode node of a plan that has no prefill node for this reason."""

    def pair(self, candidates: Candidates, turn: int) -> Plan | None:
        """An open prefill and an open decode node between which a ticket may pass; no prefill node where there is such
        a pair, and the decode node had better compute alone."""


@dataclasses.dataclass(frozen=True, slots=True)
class LeastLoaded:
    """The node with the fewest legs for its weight; of cohorts the one whose lightest pair is least loaded together."""

    def one_node(self, candidates: Candidates, role: Role, turn: int, local: LocalReason | None = None) -> Plan | None:
        views = candidates.open(role)
        return Plan(None, _least(views, turn).node, local) if views else None

    def pair(self, candidates: Candidates, turn: int) -> Plan | None:
        groups = candidates.cohorts()
        found = [_lightest_pair(group, candidates.bars, turn // len(groups)) for group in groups]
        pairs = [pair for pair in found if pair is not None]
        if not pairs:
            return None
        lowest = min(prefill.load + decode.load for prefill, decode in pairs)
        ties = [pair for pair in pairs if pair[0].load + pair[1].load == lowest]
        prefill, decode = ties[turn % len(ties)]
        return Plan(prefill.node, decode.node)


LEAST_LOADED = LeastLoaded()


@dataclasses.dataclass(frozen=True, slots=True)
class PlanPolicy:
    """The operator's choices.

    Attributes:
        routing: how one is chosen among several nodes.
        on_prefill_failure: FAIL refuses requests while there is no prefill node; else the decode node serves alone.
        on_no_decode: PREFILL lets a prefill node serve whole requests while there is no decode node.
    """

    routing: RoutingPolicy
    on_prefill_failure: OnPrefillFailure = OnPrefillFailure.RETRY
    on_no_decode: OnNoDecode = OnNoDecode.FAIL


def plan(pool_state: PoolState, needs: PlanInput, policy: PlanPolicy, turn: int) -> Plan:
    """The pair that the policy chooses, or a decode node alone; as a last resort a prefill node in its place.

    Args:
        turn: a counter that grows by one with each plan.

    Raises:
        UnknownModel: no node serves the model.
        NoNode: none can take it now.
    """
    candidates, local = Candidates(pool_state, needs), needs.local
    if local is None:
        pair = policy.routing.pair(candidates, turn)
        if pair is not None:
            return pair
    last_resort = _last_resort(candidates, policy, turn)
    if last_resort is not None:
        return last_resort
    if local is None:
        local = _why_no_pair(candidates, needs, policy)
    return _choose(candidates, Role.DECODE, needs, policy, turn, local)


def choose(pool_state: PoolState, role: Role, needs: PlanInput, policy: PlanPolicy, turn: int) -> Node:
    """The node that the policy chooses for a role's leg, by `plan`'s last resort where it has no ticket; raises so."""
    candidates = Candidates(pool_state, needs)
    if role is Role.DECODE and needs.partner is None:
        last_resort = _last_resort(candidates, policy, turn)
        if last_resort is not None:
            return last_resort.decode
    return _choose(candidates, role, needs, policy, turn).decode


def _last_resort(candidates: Candidates, policy: PlanPolicy, turn: int) -> Plan | None:
    """A prefill node for a whole request, where the policy allows it and no decode node can take it."""
    if policy.on_no_decode is OnNoDecode.FAIL or candidates.open(Role.DECODE):
        return None
    return policy.routing.one_node(candidates, Role.PREFILL, turn, LocalReason.NO_DECODE)


def _choose(
    candidates: Candidates,
    role: Role,
    needs: PlanInput,
    policy: PlanPolicy,
    turn: int,
    local: LocalReason | None = None,
) -> Plan:
    chosen = policy.routing.one_node(candidates, role, turn, local)
    if chosen is None:
        raise _lack(candidates, role, needs)
    return chosen


def _why_no_pair(candidates: Candidates, needs: PlanInput, policy: PlanPolicy) -> LocalReason:
    """Raises NoNode where the decode node must not serve alone, or there is none."""
    if not candidates.open(Role.DECODE):
        raise _lack(candidates, Role.DECODE, needs)
    fail = policy.on_prefill_failure is OnPrefillFailure.FAIL
    if not candidates.open(Role.PREFILL):
        if fail:
            raise _lack(candidates, Role.PREFILL, needs)
        return LocalReason.NO_PREFILL
    barred = any(group.has_pair() for group in candidates.cohorts())
    if not barred and any(len(view.node.roles) > 1 for view in candidates.open(Role.DECODE)):
        return LocalReason.ONLY_NODE  # that is no failure: it is the prefill node, too
    if fail:
        raise NoNode(NoNodeReason.BARRED_PAIR if barred else NoNodeReason.NO_PAIR, needs.model)
    return LocalReason.BARRED_PAIR if barred else LocalReason.NO_PAIR


def _lack(candidates: Candidates, role: Role, needs: PlanInput) -> NoNode:
    """Why there is no node of this role."""
    partner = needs.partner
    serving = (view for view in candidates.serving(role) if partner is None or candidates.allow(partner, view.node))
    missing = NoNodeReason.NO_DECODE if role is Role.DECODE else NoNodeReason.NO_PREFILL
    return NoNode(NoNodeReason.EXCLUDED if any(True for _ in serving) else missing, needs.model)


def _least(views: Sequence[NodeView], turn: int) -> NodeView:
    lowest = min(map(_LOAD, views))
    ties = [view for view in views if view.load == lowest]
    return ties[turn % len(ties)]


def _lightest_pair(group: NodeGroup, bars: Bars, turn: int) -> tuple[NodeView, NodeView] | None:
    """Where nothing is barred, each of the two is chosen by itself, unless that is one node of both roles."""
    prefills, decodes = group.prefills, group.decodes
    if not prefills or not decodes:
        return None
    prefill, decode = _least(prefills, turn), _least(decodes, turn)
    if bars or prefill is decode:
        return lightest_allowed_pair(prefills, decodes, bars, turn)
    return prefill, decode
