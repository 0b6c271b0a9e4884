"""Which nodes a request goes to, and whether to disaggregate at all: pure, decided from a snapshot before any I/O.

What is possible stands here, and so does the simplest policy for choosing among it, `LeastLoaded`, on which `session`
falls back. `policies` has all of them by name.
"""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Protocol

from pdproxy.nodes.node import Bars, Node, NodeView, Places, Role, Seeds, Snapshot
from pdproxy.planning.allowed_pairs import lightest_allowed_pair
from pdproxy.planning.plan_types import Choice, NoNode, NoNodeReason, Plan, PlanInput, UnknownModel
from pdproxy.request import LocalReason
from pdproxy.settings.types import OnNoDecode, OnPrefillFailure

_LOAD = operator.attrgetter("load")


class Candidates:
    """The nodes that one request may go to now.

    Attributes:
        bars: of the snapshot.
        needs: what the plan is made for.
    """

    def __init__(self, snapshot: Snapshot, needs: PlanInput) -> None:
        self._nodes = snapshot.nodes
        self.needs = needs
        self._served = snapshot.roster.served(needs.model)
        self.bars = snapshot.bars

    def serving(self, role: Role) -> list[NodeView]:
        """The nodes of a role that take requests for the model, those included that must not get this one."""
        return self._served.places.views(role, self._nodes)

    def seeds(self, role: Role) -> Seeds:
        """What these are hashed by, in the same order."""
        return self._served.seeds[role]

    def heaviest(self, role: Role) -> float:
        """The greatest weight of these; 1 where there are none."""
        weights, places = self.seeds(role).weights, self._served.places.of(role)
        return max(weights) if weights else self._nodes[places[0]].node.weight if places else 1.0

    def open(self, role: Role) -> list[NodeView]:
        """Those that may get it, in the order of joining."""
        return self._open(self._served.places, role)

    def may_take(self, view: NodeView) -> bool:
        """Whether one that serves the model may get this request."""
        partner = self.needs.partner
        return view.node.name not in self.needs.excluded and (partner is None or self.paired(view.node, partner))

    def by_cohort(self) -> list[tuple[list[NodeView], list[NodeView]]]:
        """The prefill and the decode nodes of each cohort; bars are not looked at."""
        return [(self._open(places, Role.PREFILL), self._open(places, Role.DECODE)) for places in self._served.cohorts]

    @property
    def cohort_names(self) -> tuple[str, ...]:
        """Of `by_cohort`, in the same order."""
        return self._served.cohort_names

    def named(self, name: str) -> NodeView | None:
        """The node of this name, where it may get the request."""
        place = self._served.by_name.get(name)
        view = None if place is None else self._nodes[place]
        return view if view is not None and self.may_take(view) else None

    def allow(self, prefill: Node, decode: Node) -> bool:
        """Whether a ticket can pass from one to the other."""
        return prefill.pairs_with(decode.cohort) and self.bars.allow(prefill.name, decode.name)

    def paired(self, node: Node, partner: Node) -> bool:
        """`allow`, for two nodes of whichever role."""
        return self.allow(node, partner) if node.role is Role.PREFILL else self.allow(partner, node)

    def _open(self, places: Places, role: Role) -> list[NodeView]:
        views = places.views(role, self._nodes)
        restricted = self.needs.excluded or self.needs.partner is not None
        return list(filter(self.may_take, views)) if restricted else views

    @property
    def may_pair(self) -> bool:
        """Whether there is a pair at all, but for bars and nodes that failed this request; cheap."""
        return self._served.pairs


class RoutingPolicy(Protocol):
    """How one is chosen among several nodes. Each method returns None where there is no candidate.

    ``turn`` grows by one with each plan, so that nodes between which nothing else decides take turns.
    """

    def node(self, candidates: Candidates, role: Role, turn: int) -> Choice | None:
        """One of the open nodes of a role."""

    def pair(self, candidates: Candidates, turn: int) -> tuple[Choice | None, Choice] | None:
        """An open prefill and an open decode node between which a ticket may pass; no prefill node where there is such
        a pair, and the decode node had better compute alone."""


@dataclasses.dataclass(frozen=True, slots=True)
class LeastLoaded:
    """The node with the fewest legs for its weight; of cohorts the one whose lightest pair is least loaded together."""

    def node(self, candidates: Candidates, role: Role, turn: int) -> Choice | None:
        views = candidates.open(role)
        return Choice(_least(views, turn).node) if views else None

    def pair(self, candidates: Candidates, turn: int) -> tuple[Choice, Choice] | None:
        groups = candidates.by_cohort()
        found = [_lightest_pair(*group, candidates.bars, turn // len(groups)) for group in groups]
        pairs = [pair for pair in found if pair is not None]
        if not pairs:
            return None
        lowest = min(prefill.load + decode.load for prefill, decode in pairs)
        ties = [pair for pair in pairs if pair[0].load + pair[1].load == lowest]
        prefill, decode = ties[turn % len(ties)]
        return Choice(prefill.node), Choice(decode.node)


LEAST_LOADED = LeastLoaded()


@dataclasses.dataclass(frozen=True, slots=True)
class PlanPolicy:
    """The operator's choices.

    Attributes:
        routing: how one is chosen among several nodes.
        on_prefill_failure: FAIL refuses requests while there is no prefill node; else the decode node serves alone.
        on_no_decode: PREFILL lets a prefill node serve whole requests while there is no decode node.
        local_below_tokens: prompts known to be shorter are computed on the decode node; 0 for none.
    """

    routing: RoutingPolicy
    on_prefill_failure: OnPrefillFailure = OnPrefillFailure.RETRY
    on_no_decode: OnNoDecode = OnNoDecode.FAIL
    local_below_tokens: int = 0


def plan(snapshot: Snapshot, needs: PlanInput, policy: PlanPolicy, turn: int) -> Plan:
    """The pair that the policy chooses, or a decode node alone; as a last resort a prefill node in its place.

    Args:
        turn: a counter that grows by one with each plan.

    Raises:
        UnknownModel: no node serves the model.
        NoNode: none can take it now.
    """
    candidates = _candidates(snapshot, needs)
    local = _why_local(needs, policy)
    if local is None:
        pair = policy.routing.pair(candidates, turn)
        if pair is not None:
            prefill, decode = pair
            if prefill is None:
                return _alone(decode, LocalReason.CACHED)
            affinities, ranks = (prefill.affinity, decode.affinity), (prefill.rank, decode.rank)
            return Plan(prefill.node, decode.node, None, *affinities, *ranks, decode.decision)
    last_resort = _last_resort(candidates, policy, turn)
    if last_resort is not None:
        return _alone(last_resort, LocalReason.NO_DECODE)
    if local is None:
        local = _why_no_pair(candidates, needs, policy)
    return _alone(_choose(candidates, Role.DECODE, needs, policy, turn), local)


def _alone(decode: Choice, why: LocalReason) -> Plan:
    return Plan(None, decode.node, why, None, decode.affinity, None, decode.rank, decode.decision)


def choose(snapshot: Snapshot, role: Role, needs: PlanInput, policy: PlanPolicy, turn: int) -> Node:
    """The node that the policy chooses for a role's leg, by `plan`'s last resort where it has no ticket; raises so."""
    candidates = _candidates(snapshot, needs)
    if role is Role.DECODE and needs.partner is None:
        last_resort = _last_resort(candidates, policy, turn)
        if last_resort is not None:
            return last_resort.node
    return _choose(candidates, role, needs, policy, turn).node


def _last_resort(candidates: Candidates, policy: PlanPolicy, turn: int) -> Choice | None:
    """A prefill node for a whole request, where the policy allows it and no decode node can take it."""
    if policy.on_no_decode is OnNoDecode.FAIL or candidates.open(Role.DECODE):
        return None
    return policy.routing.node(candidates, Role.PREFILL, turn)


def _choose(candidates: Candidates, role: Role, needs: PlanInput, policy: PlanPolicy, turn: int) -> Choice:
    choice = policy.routing.node(candidates, role, turn)
    if choice is None:
        raise _lack(candidates, role, needs)
    return choice


def _candidates(snapshot: Snapshot, needs: PlanInput) -> Candidates:
    """Raises UnknownModel where no decode node, in whatever state, serves the model."""
    if not snapshot.roster.knows(needs.model):
        raise UnknownModel(needs.model, snapshot.roster.models)
    return Candidates(snapshot, needs)


def _why_local(needs: PlanInput, policy: PlanPolicy) -> LocalReason | None:
    if needs.local is not None:
        return needs.local
    if needs.prompt_tokens is not None and needs.prompt_tokens < policy.local_below_tokens:
        return LocalReason.SHORT_PROMPT
    return None


def _why_no_pair(candidates: Candidates, needs: PlanInput, policy: PlanPolicy) -> LocalReason:
    """Raises NoNode where the decode node must not serve alone, or there is none."""
    if not candidates.open(Role.DECODE):
        raise _lack(candidates, Role.DECODE, needs)
    fail = policy.on_prefill_failure is OnPrefillFailure.FAIL
    if not candidates.open(Role.PREFILL):
        if fail:
            raise _lack(candidates, Role.PREFILL, needs)
        return LocalReason.NO_PREFILL
    barred = any(prefills and decodes for prefills, decodes in candidates.by_cohort())
    reason = LocalReason.BARRED_PAIR if barred else LocalReason.NO_PAIR
    if fail:
        raise NoNode(reason, needs.model)
    return reason


def _lack(candidates: Candidates, role: Role, needs: PlanInput) -> NoNode:
    """Why there is no node of this role."""
    partner = needs.partner
    serving = (view for view in candidates.serving(role) if partner is None or candidates.paired(view.node, partner))
    missing = NoNodeReason.NO_DECODE if role is Role.DECODE else LocalReason.NO_PREFILL
    return NoNode(NoNodeReason.EXCLUDED if any(True for _ in serving) else missing, needs.model)


def _least(views: Sequence[NodeView], turn: int) -> NodeView:
    lowest = min(map(_LOAD, views))
    ties = [view for view in views if view.load == lowest]
    return ties[turn % len(ties)]


def _lightest_pair(
    prefills: list[NodeView], decodes: list[NodeView], bars: Bars, turn: int
) -> tuple[NodeView, NodeView] | None:
    """Where nothing is barred, each of the two is chosen by itself."""
    if not prefills or not decodes:
        return None
    if bars:
        return lightest_allowed_pair(prefills, decodes, bars, turn)
    return _least(prefills, turn), _least(decodes, turn)
