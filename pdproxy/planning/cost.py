"""The cost of a prompt at a place, in seconds: as a prefill node, as a decode node with a ticket, or alone. Pure.

What is sent to a place is *queued* there until it is computed; a prompt waits for what was queued before it. A cost is
divided by the node's `NodeView.usable_weight`, its weight as far as slow start allows, so that costs compare as loads
do.

A place that has not cached a prefix which others have must compute it, and, of a hybrid model, compute it a second time
before it keeps a state where the prompts part (vLLM keeps one at the end of each prompt, and at a branch point from the
second prompt on that meets it). That second time is charged to the request which would begin it, by `COPY_SHARE`: so
a shared prefix stays on as few nodes as their queues allow.

A prefill place that was busy lately (`PlaceLoad.busy`) costs more than its queue of the moment: those that have
prefixes there come back to it, and wait for this prompt; and this prompt's own later ones, such as the next turns, wait
for theirs. Without that, conversations gather where their system prompt is, beside idle nodes.

A prefill place whose cache is filled anew within the pauses of a conversation costs more, too, by what its next turn
will lack there (`lost_tokens`): so conversations go to places that have room before others overflow. Large ones, as
agents have, begin where the fewest agents live, and do not move for little (`with_agents`).
"""

import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol, TypeAlias

import msgspec

from pdproxy.nodes.load import Load, PlaceLoad, Work
from pdproxy.nodes.node import Node, NodeView, Role, Spot
from pdproxy.planning.agents import large_tokens
from pdproxy.planning.plan_types import NextTurn
from pdproxy.planning.prefix import Hit, Place

COPY_SHARE = 1.0
"""The part of the cost to compute once more what a place lacks and another has. With 0 a shared prefix spreads at the
first queue, with more than 1 it stays where prompts wait longer than the copy would have cost."""
LATER_PROMPTS, AGAINST_COPIES = 30.0, 55.0
"""Which follow a prompt to its place: each takes what is usual, and makes others wait, or waits, where the place is
busy. More where the copy of a prefix is charged, too, which keeps conversations where they are: a place whose cache
overflows loses states, and with each one all that its prompt has cached there."""
WAITING = 2.0
"""How many others wait for a prompt, on a place that is always busy; for the seconds that it takes."""
SEQUENCE_SECONDS = 0.01
"""Seconds that each sequence on a decode node adds to an answer: 200 steps, each 0.05 ms longer."""
SELDOM_LOST = 3
"""The power by which a turn loses less where blocks stay longer: an eighth where they stay twice as long."""
MOVED = 0.1
"""The part of a large prompt that is charged where its agent would move to another place."""
_CROWD = operator.attrgetter("lightest.crowd")
_BELOW = 1.0 - 1e-9
"""Times a bound, so that no rounding brings a price below it."""


def covered_tokens(node: Node, tokens: int) -> int:
    """How many of a prompt's tokens a prefill leg computes on a node: as far as a hand-over of it goes.

    That is up to the last boundary of `--prefix-match-unit` before the prompt's last token, a unit less with EAGLE and
    MTP (the connector's `resume_boundary`); without a unit all but the last one. Of a model of attention alone it is
    the whole prompt (vLLM 0.32, `_prefill_backoff` of the NIXL connector's scheduler).
    """
    if not node.keeps_states:
        return tokens
    unit = node.prefix_match_unit
    drop = unit if node.hashing is not None and node.hashing.drops_unit else 0
    boundary = (tokens - 1) // unit * unit - drop if unit else 0
    return boundary if boundary > 0 else tokens - 1


NOTHING_LOST: Mapping[Place, float] = MappingProxyType({})


def lost_tokens(turn: NextTurn | None, stays: Mapping[Place, float]) -> Mapping[Place, float]:
    """The tokens that a prompt's next turn is expected to lack at places, since they are evicted before it comes.

    ``stays``: see `PromptHits`. The shorter a block stays there, the likelier it is gone: most probably where that is
    less than the time within which the turn comes, and seldom where it is several times as long.
    """
    if turn is None or not stays:
        return NOTHING_LOST
    return {
        place: turn.tokens * min(1.0, (turn.seconds / seconds) ** SELDOM_LOST)
        for place, seconds in stays.items()
        if place not in turn.kept_at
    }


def with_agents(
    lost: Mapping[Place, float], turn: NextTurn, tokens: int, spots: Mapping[tuple[str, int], Spot]
) -> Mapping[Place, float]:
    """``lost``, and what a large prompt is charged instead, in tokens: so agents spread as they begin, and then stay.

    The first prompt of an agent is charged its own length for each agent that lives at a place, for each of the two
    will have to wait for the other one's prompts, or have its own evicted by them. A later one is charged `MOVED`
    of it where it would move, and nothing for what may be lost where it lives: to move is to compute that anyway.

    Args:
        lost: see `lost_tokens`.
        tokens: in the prompt.
        spots: the places that may compute it, by node and rank.
    """
    charged = dict(lost)
    if turn.home is None:
        for place, agents in turn.others.items():
            spot = spots.get((place.node, place.rank))
            if spot is not None and tokens > large_tokens(spot[0].node):
                charged[place] = charged.get(place, 0.0) + agents * tokens
        return charged
    for (name, rank), (view, _) in spots.items():
        if tokens > large_tokens(view.node):
            place = Place(name, rank)
            charged[place] = MOVED * tokens if place != turn.home else 0.0
    return charged


class Estimate(msgspec.Struct, frozen=True):
    """The cost at one place: ``score`` compares places, ``seconds`` is how long the request is expected to take.

    Attributes:
        hit: what the place has cached.
    """

    score: float
    seconds: float
    view: NodeView
    place: PlaceLoad
    hit: Hit


Hits: TypeAlias = Sequence[tuple[Hit, Sequence[Spot]]]
"""The places that have something cached, each once, by what they have: a system prompt is cached everywhere."""


class Cost(Protocol):
    """The costs of places for one prompt. ``role``: of the nodes whose places are asked for it."""

    @property
    def role(self) -> Role: ...

    def scores(self, hit: Hit, spots: Sequence[Spot]) -> list[float]:
        """The scores of places that have all cached as much of it. Fast: a system prompt is cached everywhere."""

    def seconds(self, hit: Hit, spot: Spot, score: float, /) -> float:
        """How long the request is expected to take at a place that has this score."""

    def least_fresh(self, views: Sequence[NodeView], heaviest: float, /) -> float:
        """A bound below the scores of nodes that have cached nothing; ``heaviest``: the weight of the node that has
        most. Faster than to find them."""


class PrefillCost:
    """A prefill node computes the prompt: what waits there, and what the uncached tokens take.

    Args:
        tokens: in the prompt.
        deepest: the longest prefix of which any place has the attention blocks; 0 where there are no states to keep.
        lost: see `lost_tokens`.
        cached: any place has something of the prompt. Where none has, places are compared by their queues alone.
    """

    role = Role.PREFILL
    __slots__ = ("_book", "_busy_weight", "_deepest", "_fixed", "_later", "_lost", "_per_token", "_tokens")

    def __init__(
        self, tokens: int, book: Load, deepest: int, lost: Mapping[Place, float] = NOTHING_LOST, *, cached: bool
    ) -> None:
        self._lost = lost
        self._tokens, self._deepest, self._book = tokens, deepest, book
        pace = book.pace(Work.PREFILL)
        self._fixed, self._per_token = pace.fixed, pace.per_token
        self._busy_weight = self._later = 0.0
        if cached:
            self._busy_weight = book.busy_weight
            self._later = (AGAINST_COPIES if deepest else LATER_PROMPTS) * book.usual
            """The cost to later prompts of a place that is always busy."""

    def scores(self, hit: Hit, spots: Sequence[Spot]) -> list[float]:
        fixed, per_token, tokens = self._fixed, self._per_token, self._tokens - hit.resume
        own = fixed + per_token * tokens
        copies = COPY_SHARE * max(0, self._deepest - hit.attention) * per_token
        if_busy = (WAITING * own + self._later) * self._busy_weight
        scores = [
            ((place.queued * per_token + place.legs * fixed + own + copies) * place.prefill + place.busy * if_busy)
            / view.usable_weight
            for view, place in spots
        ]
        if self._lost:
            return [score + self._losses(*spot) for score, spot in zip(scores, spots, strict=True)]
        return scores

    def _losses(self, view: NodeView, place: PlaceLoad) -> float:
        """For what the next turn will lack there."""
        return self._lost.get(Place(view.name, place.rank), 0.0) * self._per_token * place.prefill / view.usable_weight

    def seconds(self, hit: Hit, spot: Spot, _: float, /) -> float:
        fixed, per_token, place = self._fixed, self._per_token, spot[1]
        return ((place.legs + 1) * fixed + (place.queued + self._tokens - hit.resume) * per_token) * place.prefill

    def least_fresh(self, _: Sequence[NodeView], heaviest: float) -> float:
        own = self._fixed + self._per_token * (self._tokens + COPY_SHARE * self._deepest)
        return _BELOW * own * self._book.least_factor(Work.PREFILL) / heaviest

    def own_seconds(self, tokens: int) -> float:
        """Seconds for so many tokens of a prompt that is computed anyway."""
        return self._per_token * tokens


class HandOverCost:
    """A decode node gets a ticket: the attention blocks that it lacks and one state are moved; and its load counts."""

    role = Role.DECODE
    __slots__ = ("_book", "_fixed", "_per_token", "_tokens")

    def __init__(self, tokens: int, book: Load) -> None:
        self._tokens, self._book = tokens, book
        pace = book.pace(Work.HAND_OVER)
        self._fixed, self._per_token = pace.fixed, pace.per_token

    def scores(self, hit: Hit, spots: Sequence[Spot]) -> list[float]:
        moved, each = self._fixed + self._per_token * (self._tokens - hit.attention), SEQUENCE_SECONDS
        return [(place.hand_over * moved + place.crowd * each + each) / view.usable_weight for view, place in spots]

    def seconds(self, _: Hit, spot: Spot, score: float, /) -> float:
        return score * spot[0].usable_weight

    def least_fresh(self, views: Sequence[NodeView], heaviest: float) -> float:
        own = (self._fixed + self._per_token * self._tokens) * self._book.least_factor(Work.HAND_OVER)
        return _BELOW * (own + _least_crowd(views) * SEQUENCE_SECONDS + SEQUENCE_SECONDS) / heaviest


class LocalCost:
    """A decode node computes the prompt itself: what waits there, its uncached tokens, the node's load."""

    role = Role.DECODE
    __slots__ = ("_book", "_fixed", "_per_token", "_tokens")

    def __init__(self, tokens: int, book: Load) -> None:
        self._tokens, self._book = tokens, book
        pace = book.pace(Work.LOCAL)
        self._fixed, self._per_token = pace.fixed, pace.per_token

    def scores(self, hit: Hit, spots: Sequence[Spot]) -> list[float]:
        per_token, each = self._per_token, SEQUENCE_SECONDS
        own = self._fixed + per_token * (self._tokens - hit.resume)
        return [
            ((place.queued * per_token + own) * place.local + place.crowd * each + each) / view.usable_weight
            for view, place in spots
        ]

    def seconds(self, _: Hit, spot: Spot, score: float, /) -> float:
        return score * spot[0].usable_weight

    def least_fresh(self, views: Sequence[NodeView], heaviest: float) -> float:
        own = (self._fixed + self._per_token * self._tokens) * self._book.least_factor(Work.LOCAL)
        return _BELOW * (own + _least_crowd(views) * SEQUENCE_SECONDS + SEQUENCE_SECONDS) / heaviest

    def stall(self, hit: Hit, place: PlaceLoad) -> float:
        """Seconds for which the streams there get no token: the longer of what is to be computed already, and this.

        vLLM gives each stream a token in every step, and takes what came meanwhile into the next one: between what is
        computed now and this prompt they get one. Where the two still meet in one step, it is twice as long at most.
        To count both would turn away prompts for which a prefill place then computes all that it lacks.
        """
        return self._per_token * place.local * max(place.queued, self._tokens - hit.resume)

    def least_stall(self, hit: Hit) -> float:
        """A bound below that, for any place with this hit."""
        return _BELOW * self._per_token * self._book.least_factor(Work.LOCAL) * (self._tokens - hit.resume)


class SharedPrefillCost(PrefillCost):
    """The same where nodes have both roles: of their legs those are ahead whose prompts are still to be computed, and
    the others are streams, which the prompt slows down (`Load.stall_weight`)."""

    __slots__ = ()

    def scores(self, hit: Hit, spots: Sequence[Spot]) -> list[float]:
        own, fixed = self._fixed + (self._tokens - hit.resume) * self._per_token, self._fixed
        weight = self._book.stall_weight
        return [
            score + (place.legs - place.prompts) * place.prefill * (own * weight - fixed) / view.usable_weight
            for score, (view, place) in zip(super().scores(hit, spots), spots, strict=True)
        ]

    def seconds(self, hit: Hit, spot: Spot, score: float, /) -> float:
        place = spot[1]
        return super().seconds(hit, spot, score) - (place.legs - place.prompts) * self._fixed * place.prefill


class SharedHandOverCost(HandOverCost):
    """The same where nodes have both roles: what is computed there now comes before the first token, or soon after it,
    and what will be computed there later comes between tokens."""

    __slots__ = ("_prompt_seconds",)

    def __init__(self, tokens: int, book: Load) -> None:
        super().__init__(tokens, book)
        self._prompt_seconds = book.pace(Work.PREFILL).per_token

    def scores(self, hit: Hit, spots: Sequence[Spot]) -> list[float]:
        per_token, answer_stalls = self._prompt_seconds, self._book.answer_stalls
        return [
            score + (place.queued * per_token * place.prefill + answer_stalls(place)) / view.usable_weight
            for score, (view, place) in zip(super().scores(hit, spots), spots, strict=True)
        ]

    def seconds(self, _: Hit, spot: Spot, score: float, /) -> float:
        return score * spot[0].usable_weight - self._book.answer_stalls(spot[1])


class SharedLocalCost(SharedPrefillCost):
    """A node of both roles computes the prompt and generates the answer."""

    role = Role.DECODE
    __slots__ = ()

    def scores(self, hit: Hit, spots: Sequence[Spot]) -> list[float]:
        answer_stalls = self._book.answer_stalls
        return [
            score + ((place.crowd + 1) * SEQUENCE_SECONDS + answer_stalls(place)) / view.usable_weight
            for score, (view, place) in zip(super().scores(hit, spots), spots, strict=True)
        ]

    def seconds(self, hit: Hit, spot: Spot, score: float, /) -> float:
        return super().seconds(hit, spot, score) + (spot[1].crowd + 1) * SEQUENCE_SECONDS


def _least_crowd(views: Sequence[NodeView]) -> float:
    return min(map(_CROWD, views), default=0.0)
