"""The least loaded pair of a cohort where some pairs are barred, or nodes have both roles. Pure.

The least loaded node may have no partner, or be its own, which it cannot.
"""

import dataclasses
import itertools
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from pdproxy.nodes.node import Bars, NodeView

_LOAD = operator.attrgetter("load")


@dataclasses.dataclass(frozen=True, slots=True)
class _EqualLoad:
    """Decode nodes of equal load."""

    load: float
    views: Sequence[NodeView]
    names: AbstractSet[str]

    def free(self, barred: AbstractSet[str]) -> int:
        """How many are not barred."""
        return len(self.views) - len(self.names & barred)


@dataclasses.dataclass(frozen=True, slots=True)
class _Tie:
    """Pairs of one prefill node that are the least loaded of all."""

    prefill: NodeView
    level: _EqualLoad
    barred: AbstractSet[str]


def lightest_allowed_pair(
    prefills: Sequence[NodeView], decodes: Sequence[NodeView], bars: Bars, turn: int
) -> tuple[NodeView, NodeView] | None:
    """The pair with the lowest sum of loads; of several, each in its turn. None where all are barred.

    Partners are sought from the least loaded on, and equal ones are counted, not listed: bars are few, pairs are many.
    """
    barred = _barred_by_prefill(bars)
    levels = _levels([view for view in decodes if view.node.name not in bars.nodes])
    ties: list[_Tie] = []
    lowest = float("inf")
    for prefill in prefills:
        mine = barred.get(prefill.node.name, frozenset()) | {prefill.node.name}
        level = None if prefill.node.name in bars.nodes else next((each for each in levels if each.free(mine)), None)
        if level is None or prefill.load + level.load > lowest:
            continue
        if prefill.load + level.load < lowest:
            lowest, ties = prefill.load + level.load, []
        ties.append(_Tie(prefill, level, mine))
    return _in_turn(ties, turn) if ties else None


def _barred_by_prefill(bars: Bars) -> Mapping[str, AbstractSet[str]]:
    found: defaultdict[str, set[str]] = defaultdict(set)
    for prefill, decode in bars.pairs:
        found[prefill].add(decode)
    return found


def _levels(decodes: Sequence[NodeView]) -> list[_EqualLoad]:
    """By load, the lowest first; within one the order is kept."""
    groups = ((load, tuple(views)) for load, views in itertools.groupby(sorted(decodes, key=_LOAD), key=_LOAD))
    return [_EqualLoad(load, views, frozenset(view.node.name for view in views)) for load, views in groups]


def _in_turn(ties: Sequence[_Tie], turn: int) -> tuple[NodeView, NodeView]:
    left = turn % sum(tie.level.free(tie.barred) for tie in ties)
    for tie in ties:
        free = tie.level.free(tie.barred)
        if left < free:
            allowed = (view for view in tie.level.views if view.node.name not in tie.barred)
            return tie.prefill, next(itertools.islice(allowed, left, None))
        left -= free
    raise AssertionError("the turn is less than the number of ties")
