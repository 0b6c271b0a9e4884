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

import dataclasses
from collections.abc import Callable, Sequence
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

    def least_fresh(self, heaviest: float) -> float:
        """A bound below all of these scores; ``heaviest``: the weight of the node that has most. Fast, too."""

    def quote(self, view: NodeView, rank: int, hit: Hit) -> Quote:
        """The cost of one place."""


Usable = Callable[[Hit], int]
"""How many of a hit's tokens a place that computes the prompt need not compute."""


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillPrice:
    """Of a prefill node: what waits there, and what the prompt's uncached tokens take.

    Attributes:
        tokens: in the prompt.
        usable: as its type says.
        deepest: the longest prefix of which any place has the attention blocks; 0 where there are no states to keep.
        copy_share: `COPY_SHARE`, or 0.
        work: how busy places were lately; none of it for a prompt that no place has cached, which goes by queues alone.
    """

    tokens: int
    rates: Rates
    usable: Usable
    deepest: int
    copy_share: float
    work: RecentWork

    def fresh(self, views: Sequence[NodeView]) -> list[float]:
        role, of = self.rates.role(Work.PREFILL), self.rates.factors(Work.PREFILL).get
        fixed, per_token = role.fixed, role.per_token
        own_seconds, busy = self._fresh_seconds(), self.work.busy.get
        if_busy = self._if_busy(fixed + per_token * self.tokens) * self.work.weight
        return [
            (
                (view.backlog * per_token + view.sequences * fixed + own_seconds) * of(name := view.name, 1.0)
                + busy(name, 0.0) * if_busy
            )
            / view.room
            for view in views
        ]

    def quote(self, view: NodeView, rank: int, hit: Hit) -> Quote:
        role, factor = self.rates.role(Work.PREFILL), self.rates.factors(Work.PREFILL).get(view.name, 1.0)
        tokens = view.queued[rank] + self.tokens - self.usable(hit)
        seconds = ((view.legs[rank] + 1) * role.fixed + tokens * role.per_token) * factor
        copies = self.copy_share * max(0, self.deepest - hit.attention) * role.per_token * factor
        own = role.fixed + (self.tokens - self.usable(hit)) * role.per_token
        waits = self.work.share(view.name) * self._if_busy(own)
        return Quote((seconds + copies + waits) / view.room, seconds, view, rank, hit)

    def least_fresh(self, heaviest: float) -> float:
        return self._fresh_seconds() * self.rates.least_factor(Work.PREFILL) / heaviest

    def own_seconds(self, tokens: int) -> float:
        """What so many tokens of a prompt take that is computed anyway."""
        return self.rates.role(Work.PREFILL).per_token * tokens

    def _fresh_seconds(self) -> float:
        return self.rates.role(Work.PREFILL).seconds(self.tokens + self.copy_share * self.deepest)

    def _if_busy(self, own: float) -> float:
        """What it costs others and later prompts that a place is always busy which computes for ``own`` seconds."""
        later = AGAINST_COPIES if self.copy_share * self.deepest else LATER_PROMPTS
        return WAITING * own + later * self.work.usual


@dataclasses.dataclass(frozen=True, slots=True)
class HandOverPrice:
    """Of a decode node with a ticket: the attention blocks that it lacks and one state are moved; and its load."""

    tokens: int
    rates: Rates

    def fresh(self, views: Sequence[NodeView]) -> list[float]:
        own, each = self.rates.role(Work.HAND_OVER).seconds(self.tokens), SEQUENCE_SECONDS
        of = self.rates.factors(Work.HAND_OVER).get
        return [(of(view.name, 1.0) * own + view.crowd * each + each) / view.room for view in views]

    def least_fresh(self, heaviest: float) -> float:
        least = self.rates.least_factor(Work.HAND_OVER)
        return (self.rates.role(Work.HAND_OVER).seconds(self.tokens) * least + SEQUENCE_SECONDS) / heaviest

    def quote(self, view: NodeView, rank: int, hit: Hit) -> Quote:
        factor = self.rates.factors(Work.HAND_OVER).get(view.name, 1.0)
        moved = self.rates.role(Work.HAND_OVER).seconds(self.tokens - hit.attention)
        seconds = moved * factor + load_seconds(view, rank)
        return Quote(seconds / view.room, seconds, view, rank, hit)


@dataclasses.dataclass(frozen=True, slots=True)
class LocalPrice:
    """Of a decode node that computes the prompt itself: what waits there, its uncached tokens, the node's load."""

    tokens: int
    rates: Rates
    usable: Usable

    def fresh(self, views: Sequence[NodeView]) -> list[float]:
        role, of, each = self.rates.role(Work.LOCAL), self.rates.factors(Work.LOCAL).get, SEQUENCE_SECONDS
        own, per_token = role.seconds(self.tokens), role.per_token
        return [
            ((view.backlog * per_token + own) * of(view.name, 1.0) + view.crowd * each + each) / view.room
            for view in views
        ]

    def least_fresh(self, heaviest: float) -> float:
        least = self.rates.least_factor(Work.LOCAL)
        return (self.rates.role(Work.LOCAL).seconds(self.tokens) * least + SEQUENCE_SECONDS) / heaviest

    def quote(self, view: NodeView, rank: int, hit: Hit) -> Quote:
        pace = self.rates.pace(Work.LOCAL, view.name)
        seconds = pace.seconds(view.queued[rank] + self.tokens - self.usable(hit)) + load_seconds(view, rank)
        return Quote(seconds / view.room, seconds, view, rank, hit)

    def stall(self, view: NodeView, rank: int, hit: Hit) -> float:
        """Seconds for which the streams there get no token: the longer of what is to be computed already, and this.

        vLLM gives each stream a token in every step, and takes what came meanwhile into the next one: between what is
        computed now and this prompt they get one. Where the two still meet in one step, it is twice as long at most.
        To count both would turn away prompts for which a prefill place then computes all that it lacks.
        """
        per_token = self.rates.pace(Work.LOCAL, view.name).per_token
        return per_token * max(view.queued[rank], self.tokens - self.usable(hit))


def load_seconds(view: NodeView, rank: int) -> float:
    """What a further answer costs for the load of a decode node's rank."""
    return (view.crowd_of(rank) + 1) * SEQUENCE_SECONDS
