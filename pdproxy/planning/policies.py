"""The policies for choosing among several nodes, by their names in the settings."""

import bisect
import dataclasses
import itertools
import operator
from collections.abc import Sequence

from pdproxy.nodes.node import NodeView, Role
from pdproxy.planning.cache_aware import CacheAware
from pdproxy.planning.cost import COPY_SHARE
from pdproxy.planning.plan import LEAST_LOADED, Candidates, RoutingPolicy
from pdproxy.planning.plan_types import Choice
from pdproxy.planning.session import Session
from pdproxy.settings.types import Routing

_GOLDEN = 0.6180339887498949
"""Multiples of it, without their whole parts, fill the range from 0 to 1 evenly, and so each part of it by its size."""


@dataclasses.dataclass(frozen=True, slots=True)
class RoundRobin:
    """Each node in its turn, whatever runs on it; by weight and slow start where these differ."""

    def node(self, candidates: Candidates, role: Role, turn: int) -> Choice | None:
        views = candidates.open(role)
        return Choice(_in_turn(views, turn).node) if views else None

    def pair(self, candidates: Candidates, turn: int) -> tuple[Choice, Choice] | None:
        """A prefill node in its turn, and a decode node in its turn among those that may read from it."""
        if not candidates.may_pair:
            return None
        prefills, decodes = candidates.open(Role.PREFILL), candidates.open(Role.DECODE)
        while prefills:
            prefill = _in_turn(prefills, turn)
            partners = candidates.partners(prefill.node, decodes)
            if partners:
                return Choice(prefill.node), Choice(_in_turn(partners, turn).node)
            prefills.remove(prefill)
        return None


def _in_turn(views: Sequence[NodeView], turn: int) -> NodeView:
    rooms = [view.room for view in views]
    if rooms.count(rooms[0]) == len(rooms):
        return views[turn % len(views)]
    ends = list(itertools.accumulate(rooms))
    return views[min(bisect.bisect(ends, turn * _GOLDEN % 1 * ends[-1]), len(views) - 1)]


ITL_BUDGET = 0.1
"""Seconds; the default of ``policy.itl_budget``."""


def policy_named(name: Routing, itl_budget: float = ITL_BUDGET) -> RoutingPolicy:
    """The policy of a name; ``itl_budget`` as in `CacheAware`, for `hybrid`."""
    match name:
        case Routing.LEAST_LOADED:
            return LEAST_LOADED
        case Routing.ROUND_ROBIN:
            return RoundRobin()
        case Routing.SESSION:
            return Session()
        case Routing.PREFIX:
            return CacheAware(operator.attrgetter("attention"))
        case Routing.HYBRID:
            return CacheAware(operator.attrgetter("resume"), COPY_SHARE, itl_budget)
