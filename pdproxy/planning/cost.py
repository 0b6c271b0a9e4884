"""What a place would cost a prompt, in seconds: as a prefill node, as a decode node with a ticket, or alone. Pure.

What is sent to a place is *queued* there until it is computed; a prompt waits for what was queued before it. A cost is
divided by the node's `NodeView.room`, its weight as far as slow start allows, so that it compares as load does.

A place that has not cached a prefix which others have must compute it, and, of a hybrid model, compute it a second time
before it keeps a state where the prompts part (vLLM keeps one at the end of each prompt, and at a branch point from the
second prompt on that meets it). That second time is charged to the request which would begin it, by `COPY_SHARE`: so
a shared prefix stays on as few nodes as their queues allow.

A prefill place that was busy lately costs more than its queue of the moment (`recent_work`): those that have prefixes
there come back to it, and wait for this prompt; and this prompt's own later ones, such as the next turns, wait for
theirs. Without that, conversations gather where their system prompt is, beside idle nodes.
"""

import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from pdproxy.nodes.node import Node, NodeView
from pdproxy.planning.prefix import Hit
from pdproxy.planning.rates import Rates, Work
from pdproxy.planning.recent_work import RecentWork

COPY_SHARE = 1.0
"""Of the cost to compute once more what a place lacks and another has. With 0 a shared prefix spreads at the first
queue, with more than 1 it stays where prompts wait longer than the copy would have cost."""
LATER_PROMPTS, AGAINST_COPIES = 30.0, 55.0
"""Which follow a prompt to its place: each takes what is usual, and makes others wait, or waits, where the place is
busy. More where the copy of a prefix is charged, too, which keeps conversations where they are: a place whose cache
overflows loses states, and with each one all that its prompt has cached there."""
WAITING = 2.0
"""How many others wait for a prompt, on a place that is always busy; for the seconds that it takes."""
SEQUENCE_SECONDS = 0.01
"""What each sequence on a decode node adds to an answer: 200 steps, each 0.05 ms longer."""
NO_HIT = Hit(0, 0)
_NOT_BUSY: Mapping[str, float] = MappingProxyType({})
_CROWD = operator.attrgetter("crowd")


def may_keep_states(node: Node) -> bool:
    """Whether its model has states, such as mamba's; taken to be so where the node does not say."""
    return node.capacity is None or node.capacity.sequences is not None


def covered_tokens(node: Node, tokens: int) -> int:
    """How many of a prompt's tokens a prefill leg computes on a node: as far as a hand-over of it goes.

    That is up to the last boundary of `--prefix-match-unit` before the prompt's last token, a unit less with EAGLE and
    MTP (the connector's `resume_boundary`); without a unit all but the last one. Of a model of attention alone it is
    the whole prompt (vLLM 0.32, `_prefill_backoff` of the NIXL connector's scheduler).
    """
    if not may_keep_states(node):
        return tokens
    unit = node.prefix_match_unit
    drop = unit if node.hashing is not None and node.hashing.drops_unit else 0
    boundary = (tokens - 1) // unit * unit - drop if unit else 0
    return boundary if boundary > 0 else tokens - 1


class Quote(NamedTuple):
    """One place's cost: ``score`` is what places are compared by, ``seconds`` what the request is expected to take."""

    score: float
    seconds: float
    view: NodeView
    rank: int
    hit: Hit


class Price(Protocol):
    """What places ask for one prompt."""

    def fresh(self, views: Sequence[NodeView]) -> list[float]:
        """The scores of nodes that have cached nothing of it, each on its lightest rank. Fast: there are many."""

    def least_fresh(self, views: Sequence[NodeView], heaviest: float, /) -> float:
        """A bound below all of these scores, also as rounded; ``heaviest``: the weight of the node that has most.
        Faster than to find them."""

    def quote(self, view: NodeView, rank: int, hit: Hit) -> Quote:
        """The cost of one place."""


class PrefillPrice:
    """Of a prefill node: what waits there, and what the prompt's uncached tokens take.

    Args:
        tokens: in the prompt.
        deepest: the longest prefix of which any place has the attention blocks; 0 where there are no states to keep.
        work: how busy places were lately; None for a prompt that no place has cached, which goes by queues alone.
    """

    __slots__ = (
        "_busy", "_deepest", "_factor", "_fresh_seconds", "_later", "_rates", "_role", "_tokens", "_weight",
    )  # fmt: skip

    def __init__(self, tokens: int, rates: Rates, deepest: int, work: RecentWork | None) -> None:
        self._tokens, self._deepest, self._rates = tokens, deepest, rates
        self._role, self._factor = rates.role(Work.PREFILL), rates.factors(Work.PREFILL).get
        self._fresh_seconds = self._role.seconds(tokens + COPY_SHARE * deepest)
        self._busy, self._weight, usual = _NOT_BUSY.get, 0.0, 0.0
        if work is not None:
            self._busy, self._weight, usual = work.busy.get, work.weight, work.usual
        self._later = (AGAINST_COPIES if deepest else LATER_PROMPTS) * usual
        """What it costs later prompts that a place is always busy."""

    def fresh(self, views: Sequence[NodeView]) -> list[float]:
        fixed, per_token, of = self._role.fixed, self._role.per_token, self._factor
        own_seconds, busy = self._fresh_seconds, self._busy
        if_busy = (WAITING * (fixed + per_token * self._tokens) + self._later) * self._weight
        return [
            (
                (view.backlog * per_token + view.sequences * fixed + own_seconds) * of(name := view.name, 1.0)
                + busy(name, 0.0) * if_busy
            )
            / view.room
            for view in views
        ]

    def quote(self, view: NodeView, rank: int, hit: Hit) -> Quote:
        fixed, per_token, name = self._role.fixed, self._role.per_token, view.name
        factor, own = self._factor(name, 1.0), self._tokens - hit.resume
        seconds = ((view.legs[rank] + 1) * fixed + (view.queued[rank] + own) * per_token) * factor
        lacking = self._deepest - hit.attention
        copies = COPY_SHARE * lacking * per_token * factor if lacking > 0 else 0.0
        if_busy = WAITING * (fixed + own * per_token) + self._later
        waits = self._busy(name, 0.0) * self._weight * if_busy
        return Quote((seconds + copies + waits) / view.room, seconds, view, rank, hit)

    def least_fresh(self, _: Sequence[NodeView], heaviest: float) -> float:
        return self._fresh_seconds * self._rates.least_factor(Work.PREFILL) / heaviest

    def own_seconds(self, tokens: int) -> float:
        """What so many tokens of a prompt take that is computed anyway."""
        return self._role.per_token * tokens


class HandOverPrice:
    """Of a decode node with a ticket: the attention blocks that it lacks and one state are moved; and its load."""

    __slots__ = ("_factor", "_rates", "_role", "_tokens")

    def __init__(self, tokens: int, rates: Rates) -> None:
        self._tokens, self._rates = tokens, rates
        self._role, self._factor = rates.role(Work.HAND_OVER), rates.factors(Work.HAND_OVER).get

    def fresh(self, views: Sequence[NodeView]) -> list[float]:
        own, each, of = self._role.seconds(self._tokens), SEQUENCE_SECONDS, self._factor
        return [(of(view.name, 1.0) * own + view.crowd * each + each) / view.room for view in views]

    def least_fresh(self, views: Sequence[NodeView], heaviest: float) -> float:
        own = self._role.seconds(self._tokens) * self._rates.least_factor(Work.HAND_OVER)
        return (own + _least_crowd(views) * SEQUENCE_SECONDS + SEQUENCE_SECONDS) / heaviest

    def quote(self, view: NodeView, rank: int, hit: Hit) -> Quote:
        moved = self._role.seconds(self._tokens - hit.attention)
        seconds = moved * self._factor(view.name, 1.0) + load_seconds(view, rank)
        return Quote(seconds / view.room, seconds, view, rank, hit)


class LocalPrice:
    """Of a decode node that computes the prompt itself: what waits there, its uncached tokens, the node's load."""

    __slots__ = ("_rates", "_tokens")

    def __init__(self, tokens: int, rates: Rates) -> None:
        self._tokens, self._rates = tokens, rates

    def fresh(self, views: Sequence[NodeView]) -> list[float]:
        role, of, each = self._rates.role(Work.LOCAL), self._rates.factors(Work.LOCAL).get, SEQUENCE_SECONDS
        own, per_token = role.seconds(self._tokens), role.per_token
        return [
            ((view.backlog * per_token + own) * of(view.name, 1.0) + view.crowd * each + each) / view.room
            for view in views
        ]

    def least_fresh(self, views: Sequence[NodeView], heaviest: float) -> float:
        own = self._rates.role(Work.LOCAL).seconds(self._tokens) * self._rates.least_factor(Work.LOCAL)
        return (own + _least_crowd(views) * SEQUENCE_SECONDS + SEQUENCE_SECONDS) / heaviest

    def quote(self, view: NodeView, rank: int, hit: Hit) -> Quote:
        pace = self._rates.pace(Work.LOCAL, view.name)
        seconds = pace.seconds(view.queued[rank] + self._tokens - hit.resume) + load_seconds(view, rank)
        return Quote(seconds / view.room, seconds, view, rank, hit)

    def stall(self, view: NodeView, rank: int, hit: Hit) -> float:
        """Seconds for which the streams there get no token: the longer of what is to be computed already, and this.

        vLLM gives each stream a token in every step, and takes what came meanwhile into the next one: between what is
        computed now and this prompt they get one. Where the two still meet in one step, it is twice as long at most.
        To count both would turn away prompts for which a prefill place then computes all that it lacks.
        """
        per_token = self._rates.pace(Work.LOCAL, view.name).per_token
        return per_token * max(view.queued[rank], self._tokens - hit.resume)


def load_seconds(view: NodeView, rank: int) -> float:
    """What a further answer costs for the load of a decode node's rank."""
    return (view.crowd_of(rank) + 1) * SEQUENCE_SECONDS


def _least_crowd(views: Sequence[NodeView]) -> float:
    return min(map(_CROWD, views), default=0.0)
