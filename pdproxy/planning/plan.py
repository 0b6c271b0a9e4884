"""Which nodes a request goes to, and whether to disaggregate at all: pure, decided from a snapshot before any I/O."""

import dataclasses
import enum
from collections.abc import Iterable

from pdproxy.errors import PdproxyError
from pdproxy.nodes.node import Bars, Node, NodeView, Role, Snapshot
from pdproxy.request import LocalReason
from pdproxy.settings.types import OnPrefillFailure


class NoNodeReason(enum.StrEnum):
    """Why no plan can be made; the ``code`` of the client's error."""

    NO_DECODE = "no_decode"
    """No decode node for the model takes requests now (down, draining, joining, refused, on trial)."""
    NO_PREFILL = "no_prefill"
    """No prefill node takes requests now, and the policy forbids to do without."""
    EXCLUDED = "excluded"
    """All nodes that take requests have failed this one already."""
    NO_PAIR = "no_pair"
    """No prefill and decode node are of one cohort, and the policy forbids to do without prefill."""
    BARRED_PAIR = "barred_pair"
    """All pairs of one cohort failed the known-answer test, and the policy forbids to do without prefill."""


class NoNode(PdproxyError):
    """No plan can be made now; it may be possible later."""

    def __init__(self, reason: NoNodeReason, model: str) -> None:
        super().__init__(f"no node for {model!r}: {reason}")
        self.reason = reason
        self.model = model


class UnknownModel(PdproxyError):
    """No node, in whatever state, serves this model. ``known`` are the models that are served."""

    def __init__(self, model: str, known: tuple[str, ...]) -> None:
        super().__init__(f"no node serves {model!r}")
        self.model = model
        self.known = known


@dataclasses.dataclass(frozen=True, slots=True)
class PlanPolicy:
    """The operator's choices.

    Attributes:
        on_prefill_failure: FAIL refuses requests while there is no prefill node; else the decode node serves alone.
        local_below_tokens: prompts known to be shorter are computed on the decode node; 0 for none.
    """

    on_prefill_failure: OnPrefillFailure = OnPrefillFailure.RETRY
    local_below_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class PlanInput:
    """What a plan depends on, of one request.

    Attributes:
        model: as the client named it.
        local: why it cannot be disaggregated; None when it can.
        excluded: names of nodes that must not be used (they failed this request).
        partner: the node of the other role, where it is chosen already: a ticket must be able to pass; None for any.
        prompt_tokens: how long the prompt is, where known.
    """

    model: str
    local: LocalReason | None = None
    excluded: frozenset[str] = frozenset()
    partner: Node | None = None
    prompt_tokens: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Where a request goes. ``prefill`` is None when the decode node computes everything; ``local`` says why."""

    prefill: Node | None
    decode: Node
    local: LocalReason | None = None


def plan(snapshot: Snapshot, needs: PlanInput, policy: PlanPolicy, turn: int) -> Plan:
    """The least loaded pair that may work together.

    Args:
        turn: a counter that grows by one with each plan, so that equally loaded nodes take turns.

    Raises:
        UnknownModel: no node serves the model.
        NoNode: none can take it now.
    """
    _check_model(snapshot, needs.model)
    local = _why_local(needs, policy)
    if local is not None:
        return Plan(None, choose(snapshot, Role.DECODE, needs, turn), local)
    prefills = _candidates(snapshot, Role.PREFILL, needs)
    decodes = _candidates(snapshot, Role.DECODE, needs)
    if not decodes:
        raise NoNode(_lack(snapshot, Role.DECODE, needs, NoNodeReason.NO_DECODE), needs.model)
    pair = _pair(prefills, decodes, snapshot.bars, turn)
    if pair is not None:
        return Plan(pair[0], pair[1])
    barred = bool(snapshot.bars) and _pair(prefills, decodes, Bars(), turn) is not None
    if policy.on_prefill_failure is OnPrefillFailure.FAIL:
        unpaired = NoNodeReason.BARRED_PAIR if barred else NoNodeReason.NO_PAIR
        raise NoNode(
            unpaired if prefills else _lack(snapshot, Role.PREFILL, needs, NoNodeReason.NO_PREFILL), needs.model
        )
    unpaired_because = LocalReason.BARRED_PAIR if barred else LocalReason.NO_PAIR
    return Plan(None, _least(decodes, turn).node, unpaired_because if prefills else LocalReason.NO_PREFILL)


def choose(snapshot: Snapshot, role: Role, needs: PlanInput, turn: int) -> Node:
    """The least loaded node of one role. Raises as `plan`."""
    _check_model(snapshot, needs.model)
    views = _candidates(snapshot, role, needs)
    if not views:
        missing = NoNodeReason.NO_DECODE if role is Role.DECODE else NoNodeReason.NO_PREFILL
        raise NoNode(_lack(snapshot, role, needs, missing), needs.model)
    return _least(views, turn).node


def _check_model(snapshot: Snapshot, model: str) -> None:
    """Raise UnknownModel where no decode node, in whatever state, serves it; one whose model is not known yet might."""
    decodes = [view.node for view in snapshot.nodes if view.node.role is Role.DECODE]
    if decodes and not any(node.serves(model) for node in decodes):
        raise UnknownModel(model, models(snapshot))


def models(snapshot: Snapshot) -> tuple[str, ...]:
    """Every name that a client may ask for, served by a decode node, sorted."""
    decodes = (view.node for view in snapshot.nodes if view.node.role is Role.DECODE)
    return tuple(sorted({name for node in decodes for name in (node.model, *node.aliases) if name}))


def _why_local(needs: PlanInput, policy: PlanPolicy) -> LocalReason | None:
    if needs.local is not None:
        return needs.local
    if needs.prompt_tokens is not None and needs.prompt_tokens < policy.local_below_tokens:
        return LocalReason.SHORT_PROMPT
    return None


def _serving(snapshot: Snapshot, role: Role, needs: PlanInput) -> Iterable[NodeView]:
    return (
        view
        for view in snapshot.nodes
        if view.node.role is role
        and view.takes_requests()
        and view.node.serves(needs.model)
        and (needs.partner is None or _may_pair(view.node, needs.partner, snapshot.bars))
    )


def _may_pair(node: Node, partner: Node, bars: Bars) -> bool:
    prefill, decode = (node, partner) if node.role is Role.PREFILL else (partner, node)
    return node.pairs_with(partner.cohort) and bars.allow(prefill.name, decode.name)


def _candidates(snapshot: Snapshot, role: Role, needs: PlanInput) -> list[NodeView]:
    return [view for view in _serving(snapshot, role, needs) if view.node.name not in needs.excluded]


def _lack(snapshot: Snapshot, role: Role, needs: PlanInput, otherwise: NoNodeReason) -> NoNodeReason:
    return NoNodeReason.EXCLUDED if any(True for _ in _serving(snapshot, role, needs)) else otherwise


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
    prefills, decodes = _of_cohort(cohort, prefills), _of_cohort(cohort, decodes)
    return (_least(prefills, turn), _least(decodes, turn)) if prefills and decodes else None


def _allowed_pair_of(
    cohort: str, prefills: list[NodeView], decodes: list[NodeView], bars: Bars, turn: int
) -> tuple[NodeView, NodeView] | None:
    """Where some are, every pair is compared: the least loaded node may have no partner."""
    decode_loads = [(view, _load(view)) for view in _of_cohort(cohort, decodes)]
    lowest, ties = float("inf"), list[tuple[NodeView, NodeView]]()
    for prefill in _of_cohort(cohort, prefills):
        prefill_load = _load(prefill)
        for decode, decode_load in decode_loads:
            load = prefill_load + decode_load
            if load > lowest or not bars.allow(prefill.node.name, decode.node.name):
                continue
            if load < lowest:
                lowest, ties = load, []
            ties.append((prefill, decode))
    return ties[turn % len(ties)] if ties else None


def _of_cohort(cohort: str, views: list[NodeView]) -> list[NodeView]:
    return [view for view in views if view.node.cohort in ("", cohort)]
