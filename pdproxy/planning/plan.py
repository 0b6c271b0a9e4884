"""Which nodes a request goes to, and whether to disaggregate at all: pure, decided from a snapshot before any I/O."""

import enum
from collections.abc import Iterable

from pdproxy.nodes.node import Bars, Node, NodeView, Role, Snapshot
from pdproxy.planning.needs import Lack, Needs, NoNode, Plan, PlanPolicy, Reason, UnknownModel, Without

__all__ = [
    "Lack",
    "Needs",
    "NoNode",
    "Plan",
    "PlanPolicy",
    "Reason",
    "UnknownModel",
    "Without",
    "choose",
    "known",
    "models",
    "plan",
]


def plan(snapshot: Snapshot, needs: Needs, policy: PlanPolicy, turn: int) -> Plan:
    """The least loaded pair that may work together.

    Args:
        turn: a counter that grows by one with each plan: equally loaded nodes take turns by it.

    Raises:
        UnknownModel: no node serves the model.
        NoNode: none can take it now.
    """
    known(snapshot, needs.model)
    local = _why_local(needs, policy)
    if local is not None:
        return Plan(None, choose(snapshot, Role.DECODE, needs, turn), local)
    prefills = _candidates(snapshot, Role.PREFILL, needs)
    decodes = _kept(_candidates(snapshot, Role.DECODE, needs), needs.decode)
    if not decodes:
        raise NoNode(_lack(snapshot, Role.DECODE, needs, Lack.NO_DECODE), needs.model)
    pair = _pair(prefills, decodes, snapshot.bars, turn)
    if pair is not None:
        return Plan(pair[0], pair[1], Reason.DISAGGREGATED)
    barred = bool(snapshot.bars) and _pair(prefills, decodes, Bars(), turn) is not None
    if policy.without_prefill is Without.FAIL:
        unpaired = Lack.BARRED_PAIR if barred else Lack.NO_PAIR
        raise NoNode(unpaired if prefills else _lack(snapshot, Role.PREFILL, needs, Lack.NO_PREFILL), needs.model)
    unpaired_because = Reason.BARRED_PAIR if barred else Reason.NO_PAIR
    return Plan(None, _least(decodes, turn).node, unpaired_because if prefills else Reason.NO_PREFILL)


def choose(snapshot: Snapshot, role: Role, needs: Needs, turn: int) -> Node:
    """The least loaded node of one role: another decode node for the same ticket, another prefill node for a decode.

    Raises:
        UnknownModel: no node serves the model.
        NoNode: none can take it now.
    """
    known(snapshot, needs.model)
    views = _candidates(snapshot, role, needs)
    if not views:
        missing = Lack.NO_DECODE if role is Role.DECODE else Lack.NO_PREFILL
        raise NoNode(_lack(snapshot, role, needs, missing), needs.model)
    kept = _kept(views, needs.decode) if role is Role.DECODE else views
    return _least(kept, turn).node


def known(snapshot: Snapshot, model: str) -> None:
    """Refuse a model that no decode node serves, in whatever state; one whose model is not known yet might.

    Raises:
        UnknownModel: so it is.
    """
    decodes = [view.node for view in snapshot.nodes if view.node.role is Role.DECODE]
    if decodes and not any(node.serves(model) for node in decodes):
        raise UnknownModel(model, models(snapshot))


def models(snapshot: Snapshot) -> tuple[str, ...]:
    """Every name that a client may ask for, served by a decode node, sorted."""
    decodes = (view.node for view in snapshot.nodes if view.node.role is Role.DECODE)
    return tuple(sorted({name for node in decodes for name in (node.model, *node.aliases) if name}))


def _why_local(needs: Needs, policy: PlanPolicy) -> enum.StrEnum | None:
    if needs.local is not None:
        return needs.local
    if needs.prompt_tokens is not None and needs.prompt_tokens < policy.local_below_tokens:
        return Reason.SHORT_PROMPT
    return None


def _serving(snapshot: Snapshot, role: Role, needs: Needs) -> Iterable[NodeView]:
    return (
        view
        for view in snapshot.nodes
        if view.node.role is role
        and view.takes_requests()
        and view.node.serves(needs.model)
        and view.node.pairs_with(needs.cohort)
        and (not needs.prefill or snapshot.bars.allow(needs.prefill, view.node.name))
    )


def _candidates(snapshot: Snapshot, role: Role, needs: Needs) -> list[NodeView]:
    return [view for view in _serving(snapshot, role, needs) if view.node.name not in needs.excluded]


def _lack(snapshot: Snapshot, role: Role, needs: Needs, otherwise: Lack) -> Lack:
    return Lack.EXCLUDED if any(True for _ in _serving(snapshot, role, needs)) else otherwise


def _kept(views: list[NodeView], name: str | None) -> list[NodeView]:
    """Only the node of this name if it is there, else all."""
    return [view for view in views if view.node.name == name] or views


def _load(view: NodeView) -> float:
    """What the node's load would be with this request, per unit of the weight that it may use now."""
    return (view.active + 1) / (view.node.weight * view.share)


def _least(views: list[NodeView], turn: int) -> NodeView:
    lowest = min(map(_load, views))
    ties = [view for view in views if _load(view) == lowest]
    return ties[turn % len(ties)]


def _pair(prefills: list[NodeView], decodes: list[NodeView], bars: Bars, turn: int) -> tuple[Node, Node] | None:
    """The least loaded prefill and decode node of the cohort in which the two together are least loaded."""
    cohorts = sorted({view.node.cohort for view in (*prefills, *decodes)})
    pair_of = _allowed_pair_of if bars else _pair_of
    found = (pair_of(cohort, prefills, decodes, bars, turn // len(cohorts)) for cohort in cohorts)
    pairs = [pair for pair in found if pair is not None]
    if not pairs:
        return None
    prefill, decode = _lightest(pairs, turn)
    return prefill.node, decode.node


def _lightest(pairs: list[tuple[NodeView, NodeView]], turn: int) -> tuple[NodeView, NodeView]:
    lowest = min(_load(prefill) + _load(decode) for prefill, decode in pairs)
    ties = [pair for pair in pairs if _load(pair[0]) + _load(pair[1]) == lowest]
    return ties[turn % len(ties)]


def _pair_of(
    cohort: str, prefills: list[NodeView], decodes: list[NodeView], _: Bars, turn: int
) -> tuple[NodeView, NodeView] | None:
    """Where nothing is barred, each of the two is chosen by itself."""
    fit_prefill, fit_decode = _of_cohort(cohort, prefills), _of_cohort(cohort, decodes)
    if not fit_prefill or not fit_decode:
        return None
    return _least(fit_prefill, turn), _least(fit_decode, turn)


def _allowed_pair_of(
    cohort: str, prefills: list[NodeView], decodes: list[NodeView], bars: Bars, turn: int
) -> tuple[NodeView, NodeView] | None:
    """Where some are, every pair is looked at: the least loaded node may have no partner."""
    takers = [(view, _load(view)) for view in _of_cohort(cohort, decodes)]
    lowest, ties = float("inf"), list[tuple[NodeView, NodeView]]()
    for prefill in _of_cohort(cohort, prefills):
        own = _load(prefill)
        for decode, load in takers:
            if own + load > lowest or not bars.allow(prefill.node.name, decode.node.name):
                continue
            if own + load < lowest:
                lowest, ties = own + load, []
            ties.append((prefill, decode))
    return ties[turn % len(ties)] if ties else None


def _of_cohort(cohort: str, views: list[NodeView]) -> list[NodeView]:
    return [view for view in views if view.node.cohort in ("", cohort)]
