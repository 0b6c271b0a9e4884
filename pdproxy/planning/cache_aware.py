"""The policy `cache`: the places that cost a prompt least, by what they have cached of it. Pure.

The costs of prefill and of decode places are found apart (`cost`), and the best of each cohort go together, for what a
hand-over costs depends on the decode place alone. Only places that have something cached are looked at one by one; all
others differ by their load alone. Of places that cost nearly the same, the request's session decides, or what they did
lately.

How `CacheAware.pair` comes to a plan: `Comparison.best_pair` finds the cheapest pair. Two other ways may be better:

    `best_alone`      a node of both roles does everything        cheaper by `score`: it costs others time, too
    `best_resuming`   a decode node goes on from its own cache    sooner by `seconds`, later turns included

An `Estimate` has both: `score` is the price by which places are compared, what others lose included, and divided by the
node's weight; `seconds` is how long this request is expected to take. Scores of one kind of cost compare; those of a
prefill place and of a decode place that resumes do not, for the first is charged what later prompts lose.

A node of both roles may compute the prompt, take it over, or do both: the best pair of two nodes is compared with the
best node of both roles alone. Its streams are slower while it computes, which costs them (`Load.stall_weight`); so a
prompt is computed where few streams run, and an answer is generated where few prompts are computed, where that pays.
"""

import dataclasses
import heapq
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress, repeat
from types import MappingProxyType
from typing import TypeAlias

from pdproxy.nodes.node import Bars, NodeGroup, NodeView, PlaceSet, Role, Spot
from pdproxy.planning.cost import (
    NOTHING_LOST,
    Cost,
    Estimate,
    HandOverCost,
    Hits,
    LocalCost,
    PrefillCost,
    SharedHandOverCost,
    SharedLocalCost,
    SharedPrefillCost,
    lost_tokens,
    with_agents,
)
from pdproxy.planning.plan import Candidates
from pdproxy.planning.plan_types import Plan
from pdproxy.planning.prefix import NO_HIT, Hit, HitPlaces, HitSource, Place, PromptHits
from pdproxy.planning.session import own_index
from pdproxy.reasons import LocalReason, RouteReason

ITL_BUDGET = 0.1
"""Seconds; the default of ``policy.itl_budget``."""
NEAR_SECONDS, NEAR_SHARE = 0.002, 0.05
"""Costs that differ by less than this, or than this share, are the same: no estimate is better than that."""
FEW = 8
"""The most places of nearly the same cost that are compared by what they did lately."""
SESSION_SHARE = 0.5
"""The share of a prompt that its session's own place is taken to have cached where nothing is known."""
FIRST_TURN = 0.6
"""The part of `CacheAware.itl_budget` for the first turn that a decode place computes, where a prefill place could
resume as far: the next turn is about as long, and where that one is over the budget, a prefill place computes both."""
_Scored: TypeAlias = tuple[float, Spot, Hit]
_VIEW, _KEEPS_STATES = operator.itemgetter(0), operator.attrgetter("node.keeps_states")
_SCORE, _RECENT, _SPOT = operator.attrgetter("score"), operator.attrgetter("recent"), operator.attrgetter("spot")


@dataclasses.dataclass(frozen=True, slots=True)
class CacheAware:
    """Chooses by cost.

    Attributes:
        itl_budget: seconds for which a decode node's streams may get no token since it computes a prompt that a prefill
            node could; 0: it never does. Nodes of both roles compute beside their streams whatever it says: there, a
            step takes as many prompt tokens as vLLM's ``--max-num-batched-tokens`` says.
    """

    itl_budget: float = ITL_BUDGET

    def one_node(self, candidates: Candidates, role: Role, turn: int, local: LocalReason | None = None) -> Plan | None:
        """Without a partner a decode node computes the prompt itself."""
        compared = Comparison(self, candidates)
        cost: Cost = compared.prefill
        if role is Role.DECODE:
            cost = compared.local() if candidates.needs.partner is None else compared.hand_over
        best = compared.best(cost, candidates.open(role), compared.hits(cost.role), turn)
        return None if best is None else compared.plan_alone(best, compared.reason(best, role), local)

    def pair(self, candidates: Candidates, turn: int) -> Plan | None:
        if not candidates.may_pair:
            return None
        compared = Comparison(self, candidates)
        found = compared.best_pair(turn)
        if found is None:
            return None
        prefill, decode = found
        if candidates.shared:
            alone = compared.best_alone(turn)
            is_one_node = prefill.view is decode.view  # it needs no hand-over to itself, and so serves alone
            if alone is not None and (is_one_node or alone.score < prefill.score + decode.score):
                return compared.plan_alone(alone, compared.reason(alone, Role.DECODE), LocalReason.ALONE)
        resuming = compared.best_resuming() if compared.hits(Role.DECODE) else None
        if resuming is not None and (
            resuming.seconds + compared.seconds_put_off(resuming, prefill) < prefill.seconds + decode.seconds
        ):
            return compared.plan_alone(resuming, RouteReason.RESUMES, LocalReason.CACHED)
        return compared.plan_pair(prefill, decode)


def _near(score: float) -> float:
    """The most that costs as much as this."""
    return score + max(NEAR_SECONDS, NEAR_SHARE * score)


class Comparison:
    """The places to which one request may go, and what each would cost it.

    Attributes:
        candidates: the nodes that may get it.
        tokens: in its prompt.
        prefill: the cost of prefill places.
        hand_over: the cost of decode places that get a ticket.
    """

    __slots__ = ("_deepest", "_hits", "_lost", "_policy", "candidates", "hand_over", "prefill", "tokens")

    def __init__(self, policy: CacheAware, candidates: Candidates) -> None:
        needs, book = candidates.needs, candidates.book
        prefix = needs.prefix
        self._policy = policy
        self.candidates = candidates
        self._hits = _by_role(candidates, prefix) if prefix is not None and prefix.hits else _NOTHING_CACHED
        self.tokens = needs.tokens if prefix is None else prefix.tokens
        cached = self._hits[Role.PREFILL]
        deepest = 0
        if cached:
            deepest = max([hit.attention for hit, spots in cached if _keep_states(spots)], default=0)
        self._deepest = deepest
        """The longest prefix whose attention blocks any prefill place with states has; see `PrefillCost`."""
        turn = needs.next_turn
        self._lost = NOTHING_LOST if prefix is None else lost_tokens(turn, prefix.stays)
        if turn is not None and (turn.home is not None or turn.others):
            self._lost = with_agents(self._lost, turn, self.tokens, candidates.spots(Role.PREFILL))
        self.prefill: PrefillCost
        self.hand_over: HandOverCost
        if candidates.shared:
            self.prefill = SharedPrefillCost(self.tokens, book, deepest, self._lost, cached=bool(cached))
            self.hand_over = SharedHandOverCost(self.tokens, book)
        else:
            self.prefill = PrefillCost(self.tokens, book, deepest, self._lost, cached=bool(cached))
            self.hand_over = HandOverCost(self.tokens, book)

    def local(self) -> Cost:
        """The cost of decode places that compute the prompt; few plans ask for it."""
        book = self.candidates.book
        if not self.candidates.shared:
            return LocalCost(self.tokens, book)
        cached = bool(self._hits[Role.DECODE])
        return SharedLocalCost(self.tokens, book, self._deepest, self._lost, cached=cached)

    def hits(self, role: Role) -> Hits:
        """The places of a role that have something cached."""
        return self._hits[role]

    def best_pair(self, turn: int) -> tuple[Estimate, Estimate] | None:
        """The pair that costs least among the best pairs of all cohorts; None where there is no pair."""
        candidates, best = self.candidates, None
        groups, bars = candidates.cohorts(), candidates.bars
        if len(groups) == 1 and not bars:
            return self._best_of(groups[0], self._hits[Role.PREFILL], self._hits[Role.DECODE], turn)
        for group in groups:
            prefills = _of_cohort(self._hits[Role.PREFILL], group.cohort)
            decodes = _of_cohort(self._hits[Role.DECODE], group.cohort)
            if bars:
                found = best_allowed_pair(
                    self.all_estimates(self.prefill, group.prefills, prefills),
                    self.all_estimates(self.hand_over, group.decodes, decodes),
                    bars,
                )
            else:
                found = self._best_of(group, prefills, decodes, turn)
            if best is None or (found and found[0].score + found[1].score < best[0].score + best[1].score):
                best = found
        return best

    def _best_of(self, group: NodeGroup, prefills: Hits, decodes: Hits, turn: int) -> tuple[Estimate, Estimate] | None:
        """The best place of each role; what a hand-over costs depends on the decode place alone."""
        prefill = self.best(self.prefill, group.prefills, prefills, turn)
        if prefill is None:
            return None
        decode = self.best(self.hand_over, group.decodes, decodes, turn)
        return None if decode is None else (prefill, decode)

    def best_alone(self, turn: int) -> Estimate | None:
        """The node of both roles that serves the whole request at the least cost."""
        views = [view for view in self.candidates.open(Role.DECODE) if len(view.node.roles) > 1]
        hits = _having(self._hits[Role.DECODE], lambda view: len(view.node.roles) > 1)
        return self.best(self.local(), views, hits, turn)

    def best_resuming(self) -> Estimate | None:
        """The decode place that resumes by itself and computes the rest soonest, within the budget for its streams.
        Nodes of both roles are left to `best_alone`."""
        if self._policy.itl_budget <= 0:
            return None
        hits: Hits = [(hit, spots) for hit, spots in self._hits[Role.DECODE] if hit.resume > 0]
        if self.candidates.shared:
            hits = _having(hits, lambda view: len(view.node.roles) == 1)
        if not hits:
            return None
        cost = LocalCost(self.tokens, self.candidates.book)
        hits = [each for each in hits if cost.least_stall(each[0]) <= self._budget(each[0])]
        for score, spot, hit in _cheapest_first([(hit, spots, cost.scores(hit, spots)) for hit, spots in hits]):
            if cost.stall(hit, spot[1]) <= self._budget(hit):
                return Estimate(score, cost.seconds(hit, spot, score), *spot, hit)
        return None

    def _budget(self, hit: Hit) -> float:
        """Seconds for which the streams of a decode place with this hit may wait: the whole budget, if it can resume
        further than any prefill place; else less, for the prefill place will lack what is computed here now."""
        whole = self._policy.itl_budget
        return whole if self._ahead_of_prefill(hit) else FIRST_TURN * whole

    def _ahead_of_prefill(self, hit: Hit) -> int:
        """How many tokens further a decode place with this hit can resume than any prefill place."""
        return max(0, hit.resume - self.furthest(Role.PREFILL))

    def seconds_put_off(self, alone: Estimate, prefill: Estimate) -> float:
        """Seconds of work that prefill places must do later, if a decode place computes the prompt alone now.

        That is all that the chosen prefill place would compute now: it may be a less busy one that lacks much, and to
        fill its cache is put off, not saved. Tokens that the decode place alone has cached do not count: prefill places
        lack them whichever way the request goes.
        """
        return self.prefill.own_seconds(self.tokens - prefill.hit.resume - self._ahead_of_prefill(alone.hit))

    def furthest(self, role: Role) -> int:
        """The most tokens of which a place of that role need not compute any."""
        return max([hit.resume for hit, _ in self._hits[role]], default=0)

    def all_estimates(self, cost: Cost, views: Sequence[NodeView], hits: Hits) -> list[Estimate]:
        """The cost of the places that have something cached, and of the lightest rank of each other node."""
        known = {view.name for _, spots in hits for view, _ in spots}
        fresh = [view.spot for view in views if view.name not in known]
        return _estimates(cost, [*hits, (NO_HIT, fresh)])

    def best(self, cost: Cost, views: Sequence[NodeView], hits: Hits, turn: int) -> Estimate | None:
        """The place that costs least; of nearly equal ones the session's own, or each in its turn."""
        if not views:
            return None
        needs = self.candidates.needs
        if needs.prefix is None and needs.session is not None:
            hits = self._guessed(views, needs.session)
        if len(views) == 1 and len(views[0].places) == 1:  # nothing to compare
            return _estimate(cost, views[0].spot, hits[0][0] if hits else NO_HIT)
        scored = [(hit, spots, cost.scores(hit, spots)) for hit, spots in hits]
        least = min([min(scores) for _, _, scores in scored], default=math.inf)
        if not hits or self._may_be_fresh(cost, views, hits, least):
            fresh = list(map(_SPOT, views))
            scores = cost.scores(NO_HIT, fresh)
            least = min(least, *scores)
            scored.append((NO_HIT, fresh, scores))
        near: list[_Scored] = []
        most = _near(least)
        for hit, spots, scores in scored:
            if len(scores) > 1:  # no step of ours for each of many nodes
                near += compress(zip(scores, spots, repeat(hit)), map(most.__ge__, scores))
            elif scores[0] <= most:
                near.append((scores[0], spots[0], hit))
        score, spot, hit = near[0] if len(near) == 1 else self._choose_among_near(near, turn)
        if hit is NO_HIT and hits:  # its lightest rank may have something cached after all, where that hardly matters
            return _estimate(cost, spot, self._hit_at(cost.role, spot))
        return Estimate(score, cost.seconds(hit, spot, score), *spot, hit)

    def _may_be_fresh(self, cost: Cost, views: Sequence[NodeView], hits: Hits, least: float) -> bool:
        """Whether a place that has nothing cached may cost as little as the best one of the others."""
        if self.candidates.lone_ranks and sum([len(spots) for _, spots in hits]) == len(views):
            return False  # there is none
        return _near(least) >= cost.least_fresh(views, self.candidates.heaviest(cost.role))

    def _choose_among_near(self, near: list[_Scored], turn: int) -> _Scored:
        """One place of those that cost nearly the same. A node that has something cached is there once."""
        if near[-1][2] is NO_HIT and near[0][2] is not NO_HIT:
            known = {spot[0].name for _, spot, hit in near if hit is not NO_HIT}
            near = [each for each in near if each[2] is not NO_HIT or each[1][0].name not in known]
        return near[self._index_by_session_or_idleness(near, turn)]

    def _hit_at(self, role: Role, spot: Spot) -> Hit:
        return next((hit for hit, spots in self._hits[role] if spot in spots), NO_HIT)

    def _index_by_session_or_idleness(self, near: Sequence[_Scored], turn: int) -> int:
        """The session's own place, where what is cached is an estimate: all its turns are at one place then, and other
        proxies find the same one. Else the place that did least lately, of a few from the ``turn``-th on: whatever is
        cached there will draw more requests."""
        needs = self.candidates.needs
        if needs.session is not None and (needs.prefix is None or needs.prefix.source is HitSource.APPROXIMATION):
            return own_index([spot[0] for _, spot, _ in near], needs.session)
        few = [(turn + step) % len(near) for step in range(min(FEW, len(near)))]
        did = [sum(map(_RECENT, near[index][1][0].places)) for index in few]
        return few[did.index(min(did))]

    def _guessed(self, views: Sequence[NodeView], session: int) -> Hits:
        own, tokens = views[own_index(views, session)], int(self.tokens * SESSION_SHARE)
        return [(Hit(tokens, tokens), [(own, own.places[session % len(own.places)])])]

    def reason(self, chosen: Estimate, role: Role) -> RouteReason:
        """Why this place computes the prompt."""
        needs = self.candidates.needs
        if needs.prefix is None:
            guessed = needs.session is not None and chosen.hit.attention > 0
            return RouteReason.SESSION if guessed else RouteReason.NOTHING_CACHED
        own = chosen.hit.resume
        if own < self.furthest(role):
            return RouteReason.LOAD
        if own:
            return RouteReason.CACHED
        return RouteReason.BRANCH if chosen.hit.attention else RouteReason.NOTHING_CACHED

    def plan_pair(self, prefill: Estimate, decode: Estimate) -> Plan:
        """One place computes the prompt, and another one takes it over."""
        return Plan(
            prefill.view.node, decode.view.node, None, None, None,
            self._rank(prefill) if len(prefill.view.places) > 1 else None,
            self._rank(decode) if len(decode.view.places) > 1 else None,
            self.reason(prefill, Role.PREFILL), self.tokens, prefill.hit, decode.hit,
            self.tokens - prefill.hit.resume, prefill.seconds, decode.seconds,
        )  # fmt: skip

    def plan_alone(self, chosen: Estimate, reason: RouteReason, local: LocalReason | None) -> Plan:
        """One place does everything."""
        return Plan(
            None, chosen.view.node, local, None, None, None, self._rank(chosen),
            reason, self.tokens, None, chosen.hit, self.tokens - chosen.hit.resume, chosen.seconds,
        )  # fmt: skip

    def _rank(self, chosen: Estimate) -> int | None:
        """The rank is named where there are several."""
        several = len(chosen.view.places) > 1 and self.candidates.needs.names_rank
        return chosen.place.rank if several else None


_NOTHING_CACHED: Mapping[Role, Hits] = MappingProxyType(dict.fromkeys(Role, ()))


def _estimates(cost: Cost, hits: Hits) -> list[Estimate]:
    return [
        Estimate(score, cost.seconds(hit, spot, score), *spot, hit)
        for hit, spots in hits
        for score, spot in zip(cost.scores(hit, spots), spots, strict=True)
    ]


def _cheapest_first(scored: Sequence[tuple[Hit, Sequence[Spot], list[float]]]) -> Iterator[_Scored]:
    """These places by rising score. Usually the first one is taken, so the others are not sorted."""
    left = [(score, number, at) for number, (_, _, scores) in enumerate(scored) for at, score in enumerate(scores)]
    heapq.heapify(left)
    while left:
        score, number, at = heapq.heappop(left)
        hit, spots, _ = scored[number]
        yield score, spots[at], hit


def _estimate(cost: Cost, spot: Spot, hit: Hit) -> Estimate:
    score = cost.scores(hit, (spot,))[0]
    return Estimate(score, cost.seconds(hit, spot, score), *spot, hit)


def _keep_states(spots: Sequence[Spot]) -> bool:
    """Whether any of these places keeps states."""
    return spots[0][0].node.keeps_states or any(map(_KEEPS_STATES, map(_VIEW, spots)))


def _having(hits: Hits, wanted: Callable[[NodeView], bool]) -> Hits:
    """Those on nodes of which this is true."""
    found = [(hit, [spot for spot in spots if wanted(spot[0])]) for hit, spots in hits]
    return [(hit, spots) for hit, spots in found if spots]


def _of_cohort(hits: Hits, cohort: str) -> Hits:
    return _having(hits, lambda view: view.node.cohort in ("", cohort))


def _by_role(candidates: Candidates, prefix: PromptHits) -> Mapping[Role, Hits]:
    """Hits on places that may get the request. A leg that cannot name a rank meets any of its node's."""
    hits = prefix.hits
    if not candidates.needs.names_rank and not candidates.lone_ranks:
        hits = _mean_over_ranks(candidates, prefix.by_place())
    found: dict[Role, Hits] = {
        role: [(hit, spots) for hit, places in hits if (spots := candidates.spots_of(role, places))] for role in Role
    }
    if candidates.restricted:
        return {role: _having(each, candidates.may_take) for role, each in found.items()}
    return found


def _mean_over_ranks(candidates: Candidates, hits: Mapping[Place, Hit]) -> HitPlaces:
    sums: dict[str, tuple[int, int]] = {}
    for place, hit in hits.items():
        attention, resume = sums.get(place.node, (0, 0))
        sums[place.node] = attention + hit.attention, resume + hit.resume
    first = [spots.get((name, 0)) for name in sums for spots in map(candidates.spots, Role)]
    ranks = {spot[0].name: spot[0].node.ranks for spot in first if spot is not None}
    return [(Hit(*(tokens // ranks[name] for tokens in sums[name])), PlaceSet([Place(name)])) for name in ranks]


def best_allowed_pair(
    prefills: list[Estimate], decodes: list[Estimate], bars: Bars
) -> tuple[Estimate, Estimate] | None:
    """The pair of the lowest score together between which a ticket may pass; None where all are barred."""
    decodes = sorted((each for each in decodes if each.view.name not in bars.nodes), key=_SCORE)
    best: tuple[Estimate, Estimate] | None = None
    for prefill in sorted(prefills, key=_SCORE):
        if best is not None and prefill.score + decodes[0].score >= best[0].score + best[1].score:
            break
        name = prefill.view.name
        decode = next((each for each in decodes if bars.allow(name, each.view.name)), None)
        if decode is not None and (best is None or prefill.score + decode.score < best[0].score + best[1].score):
            best = prefill, decode
    return best
