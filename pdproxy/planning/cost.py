"""What a place would cost a prompt, in seconds: as a prefill node, as a decode node with a ticket, or alone. Pure.

What is sent to a place is *queued* there until it is computed; a prompt waits for what was queued before it. A cost is
divided by the node's `NodeView.room`, its weight as far as slow start allows, so that it compares as load does.

A place that has not cached a prefix which others have must compute it, and, of a hybrid model, compute it a second time
before it keeps a state where the prompts part (vLLM keeps one at the end of each prompt, and at a branch point from the
second prompt on that meets it). That second time is charged to the request which would begin it, by `COPY_SHARE`: so
a shared prefix stays on as few nodes as their queues allow.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from pdproxy.nodes.node import NodeView
from pdproxy.planning.prefix import Hit
from pdproxy.planning.rates import Rates, Work

COPY_SHARE = 1.0
"""Of the cost to compute once more what a place lacks and another has. With 0 a shared prefix spreads at the first
queue, with more than 1 it stays where prompts wait longer than the copy would have cost."""
SEQUENCE_SECONDS = 0.01
"""What each sequence on a decode node adds to an answer: 200 steps, each 0.05 ms longer."""
NO_HIT = Hit(0, 0)


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
        deepest: the longest prefix of which any place has the attention blocks.
        copy_share: `COPY_SHARE`, or 0.
    """

    tokens: int
    rates: Rates
    usable: Usable
    deepest: int
    copy_share: float

    def fresh(self, views: Sequence[NodeView]) -> list[float]:
        learned, mean = self.rates.per_token(Work.PREFILL)
        of, each = learned.get, self.rates.role(Work.PREFILL).fixed
        own = self.tokens + self.copy_share * self.deepest
        return [
            ((view.backlog + own) * of(view.node.name, mean) + view.sequences * each + each) / view.room
            for view in views
        ]

    def quote(self, view: NodeView, rank: int, hit: Hit) -> Quote:
        per_token = self.rates.pace(Work.PREFILL, view.node.name).per_token
        legs = (view.legs[rank] + 1) * self.rates.role(Work.PREFILL).fixed
        seconds = (view.queued[rank] + self.tokens - self.usable(hit)) * per_token + legs
        copies = self.copy_share * max(0, self.deepest - hit.attention) * per_token
        return Quote((seconds + copies) / view.room, seconds, view, rank, hit)


@dataclasses.dataclass(frozen=True, slots=True)
class HandOverPrice:
    """Of a decode node with a ticket: the attention blocks that it lacks and one state are moved; and its load."""

    tokens: int
    rates: Rates

    def fresh(self, views: Sequence[NodeView]) -> list[float]:
        learned, mean = self.rates.per_token(Work.HAND_OVER)
        tokens, of, each = self.tokens, learned.get, SEQUENCE_SECONDS
        fixed = self.rates.role(Work.HAND_OVER).fixed + each
        return [(tokens * of(view.node.name, mean) + view.crowd * each + fixed) / view.room for view in views]

    def quote(self, view: NodeView, rank: int, hit: Hit) -> Quote:
        per_token = self.rates.pace(Work.HAND_OVER, view.node.name).per_token
        fixed = self.rates.role(Work.HAND_OVER).fixed
        seconds = (self.tokens - hit.attention) * per_token + fixed + load_seconds(view, rank)
        return Quote(seconds / view.room, seconds, view, rank, hit)


@dataclasses.dataclass(frozen=True, slots=True)
class LocalPrice:
    """Of a decode node that computes the prompt itself: what waits there, its uncached tokens, the node's load."""

    tokens: int
    rates: Rates
    usable: Usable

    def fresh(self, views: Sequence[NodeView]) -> list[float]:
        learned, mean = self.rates.per_token(Work.LOCAL)
        tokens, of, each = self.tokens, learned.get, SEQUENCE_SECONDS
        fixed = self.rates.role(Work.LOCAL).fixed + each
        return [
            ((view.backlog + tokens) * of(view.node.name, mean) + view.crowd * each + fixed) / view.room
            for view in views
        ]

    def quote(self, view: NodeView, rank: int, hit: Hit) -> Quote:
        fixed = self.rates.role(Work.LOCAL).fixed
        seconds = self.stall(view, rank, hit) + fixed + load_seconds(view, rank)
        return Quote(seconds / view.room, seconds, view, rank, hit)

    def stall(self, view: NodeView, rank: int, hit: Hit) -> float:
        """Seconds for which the streams there get no token, all prompts counted that are to be computed there."""
        per_token = self.rates.pace(Work.LOCAL, view.node.name).per_token
        return per_token * (view.queued[rank] + self.tokens - self.usable(hit))


def load_seconds(view: NodeView, rank: int) -> float:
    """What a further answer costs for the load of a decode node's rank."""
    return (view.crowd_of(rank) + 1) * SEQUENCE_SECONDS
