"""The policy `session`: consistent hashing with bounded load, so that the turns of a conversation meet the same nodes.

Each key has an order of its own of all nodes of a role (rendezvous hashing): it depends on the key and on the nodes'
names and weights alone, so that proxies which stand side by side find the same one without talking, and only the
sessions move that a node which joins gets, or one which leaves had. A request goes to the first node of its key's order
that may take it and has room: none carries more than `MOST_OF_MEAN` times the mean load and `SPARE` (consistent hashing
with bounded loads, Mirrokni, Thorup and Zadimoghaddam, 2018). ``python -m deploy.bench.plan`` shows what both do.
"""

import dataclasses
import heapq
import math
import operator
from collections.abc import Iterator, Sequence

from pdproxy.nodes.node import Node, NodeView, Role, Seeds
from pdproxy.observe.labels import Affinity
from pdproxy.planning.plan import LEAST_LOADED, Candidates
from pdproxy.planning.plan_types import Plan
from pdproxy.reasons import LocalReason

MOST_OF_MEAN = 1.25
"""The most legs that a node may have, as a part of the mean by weight and slow start; rounded up to whole legs."""
SPARE = 1
"""Legs that a node may carry beyond that: where few run, the bound alone would turn a session away from a node that has
a single one."""
_ODD = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: multiplied by it, every bit of a hash counts in the product's highest ones."""
_RANGE = 1 << 64
_LOW = _RANGE - 1
_LEGS, _WEIGHT = operator.attrgetter("active"), operator.attrgetter("usable_weight")


class KeyOrder:
    """The nodes of one role that serve a model, in the order of one session's key."""

    def __init__(self, candidates: Candidates, role: Role, key: int) -> None:
        self._views = candidates.serving(role)
        self._candidates = candidates
        self._scores = rendezvous_scores(candidates.seeds(role), key)
        self._own = self._scores.index(min(self._scores)) if self._views else 0
        legs, weight = sum(map(_LEGS, self._views)), sum(map(_WEIGHT, self._views))
        self._most = MOST_OF_MEAN * (legs + 1) / (weight or 1.0)

    def __iter__(self) -> Iterator[NodeView]:
        """Those that may take the request and have room."""
        if self._views and self._fits(self._views[self._own]):
            yield self._views[self._own]
        left = self._scores.copy()
        heapq.heapify(left)  # to sort them all would take longer: one of the first has room
        while left:
            place = self._scores.index(heapq.heappop(left))
            if place != self._own and self._fits(self._views[place]):
                yield self._views[place]

    def _fits(self, view: NodeView) -> bool:
        return view.active + 1 <= math.ceil(self._most * view.usable_weight) + SPARE and self._candidates.may_take(view)

    def affinity(self, node: Node) -> Affinity:
        """Whether a node of these is the session's own, the first of all."""
        return Affinity.OWN if self._views[self._own].name == node.name else Affinity.NEXT


def rendezvous_scores(nodes: Seeds, key: int) -> list[float]:
    """A number for each node, made of its name and the key; one has the lowest as often as its weight says."""
    hashes: list[float] = [(seed ^ key) * _ODD & _LOW for seed in nodes.seeds]
    if not nodes.weights:  # the order of equal weights is that of the hashes
        return hashes
    return [-math.log((_RANGE - each) / _RANGE) / weight for each, weight in zip(hashes, nodes.weights, strict=True)]


def own_index(views: Sequence[NodeView], key: int) -> int:
    """Which of the nodes is first in the key's order; weights are not looked at."""
    hashes = [(view.node.seed ^ key) * _ODD & _LOW for view in views]
    return hashes.index(min(hashes))


@dataclasses.dataclass(frozen=True, slots=True)
class Session:
    """The first node of the session's own order that has room; the least loaded where none has, or there is no key."""

    def one_node(self, candidates: Candidates, role: Role, turn: int, local: LocalReason | None = None) -> Plan | None:
        session = candidates.needs.session
        order = None if session is None else KeyOrder(candidates, role, session)
        first = None if order is None else next(iter(order), None)
        if first is not None:
            node = first.node
        else:
            least = LEAST_LOADED.one_node(candidates, role, turn)
            if least is None:
                return None
            node = least.decode
        affinity = Affinity.NONE if order is None else order.affinity(node)
        return Plan(None, node, local, decode_affinity=affinity)

    def pair(self, candidates: Candidates, turn: int) -> Plan | None:
        """The prefill node first, for there a miss costs more; then the first decode node that may read from it."""
        session = candidates.needs.session
        if session is None:
            least = LEAST_LOADED.pair(candidates, turn)
            return least and Plan(least.prefill, least.decode, None, Affinity.NONE, Affinity.NONE)
        if not candidates.may_pair:
            return None
        prefills, decodes = (KeyOrder(candidates, role, session) for role in Role)
        first = _first_pair(candidates, prefills, decodes)
        if first is not None:
            prefill, decode = first[0].node, first[1].node
        else:
            least = LEAST_LOADED.pair(candidates, turn)
            if least is None or least.prefill is None:
                return None
            prefill, decode = least.prefill, least.decode
        return Plan(prefill, decode, None, prefills.affinity(prefill), decodes.affinity(decode))


def _first_pair(candidates: Candidates, prefills: KeyOrder, decodes: KeyOrder) -> tuple[NodeView, NodeView] | None:
    alone: set[str] = set()
    """Cohorts in which no decode node has room."""
    for prefill in prefills:
        if prefill.node.cohort in alone:
            continue
        decode = next((view for view in decodes if candidates.allow(prefill.node, view.node)), None)
        if decode is not None:
            return prefill, decode
        if not candidates.bars and Role.DECODE not in prefill.node.roles:
            alone.add(prefill.node.cohort)
    return None
