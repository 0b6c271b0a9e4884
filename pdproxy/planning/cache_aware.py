"""The policy `cache`: the places that cost a prompt least, by what they have cached of it. Pure.

The costs of prefill and of decode places are found apart (`cost`), and the best of each cohort go together, for what a
hand-over costs depends on the decode place alone. Only places that have something cached are looked at one by one; all
others differ by their load alone. Of places that cost nearly the same, the request's session decides, or what they did
lately.

A node of both roles may compute the prompt, take it over, or do both: the best pair of two nodes is compared with the
best node of both roles alone. Its streams are slower while it computes, which costs them (`Load.stall_weight`); so a
prompt is computed where few streams run, and an answer is generated where few prompts are computed, where that pays.
"""

import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from pdproxy.nodes.node import Bars, NodeView, Role
from pdproxy.planning.cost import (
    NOTHING_LOST,
    Cost,
    Estimate,
    HandOverCost,
    LocalCost,
    PlaceHit,
    PrefillCost,
    SharedHandOverCost,
    SharedLocalCost,
    SharedPrefillCost,
    lost_tokens,
)
from pdproxy.planning.plan import Candidates
from pdproxy.planning.plan_types import Plan
from pdproxy.planning.prefix import NO_HIT, Hit, HitSource, Place
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
_SCORE, _RECENT = operator.attrgetter("score"), operator.attrgetter("recent")


@dataclasses.dataclass(frozen=True, slots=True)
class CacheAware:
    """Chooses by cost.

    Attributes:
        itl_budget: seconds for which a decode node's streams may get no token since it computes a prompt that a prefill
            node could; 0: it never does. Nodes of both roles compute beside their streams whatever it says: there, a
            step takes as many prompt tokens as vLLM's ``--max-num-batched-tokens`` says.
    """

    itl_budget: float = ITL_BUDGET

    def node(self, candidates: Candidates, role: Role, turn: int, local: LocalReason | None = None) -> Plan | None:
        """Without a partner a decode node computes the prompt itself."""
        compared = Comparison(self, candidates)
        cost: Cost = compared.prefill
        if role is Role.DECODE:
            cost = compared.local() if candidates.needs.partner is None else compared.hand_over
        best = compared.best(cost, candidates.open(role), compared.hits(cost.role), turn)
        return best and compared.alone(best, compared.reason(best, role), local)

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
            one = prefill.view is decode.view  # what is best for both is best alone
            if alone is not None and (one or alone.score < prefill.score + decode.score):
                return compared.alone(alone, compared.reason(alone, Role.DECODE), LocalReason.ALONE)
        resuming = compared.resuming() if compared.hits(Role.DECODE) else None
        if resuming is not None and (
            resuming.seconds + compared.again(resuming, prefill) < prefill.seconds + decode.seconds
        ):
            return compared.alone(resuming, RouteReason.RESUMES, LocalReason.CACHED)
        return compared.plan(prefill, decode)


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

    __slots__ = ("_deepest", "_furthest", "_hits", "_lost", "_policy", "candidates", "hand_over", "prefill", "tokens")

    def __init__(self, policy: CacheAware, candidates: Candidates) -> None:
        needs, book = candidates.needs, candidates.book
        prefix = needs.prefix
        self._policy = policy
        self.candidates = candidates
        self._hits = _by_role(candidates, prefix.hits) if prefix is not None and prefix.hits else _NOTHING_CACHED
        self.tokens = needs.tokens if prefix is None else prefix.tokens
        cached = self._hits[Role.PREFILL]
        self._furthest: dict[Role, int] = {}
        self._deepest = deepest = max([hit.attention for view, _, hit in cached if view.node.keeps_states], default=0)
        self._lost = NOTHING_LOST if prefix is None else lost_tokens(needs.next_turn, prefix.stays)
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

    def hits(self, role: Role) -> Sequence[PlaceHit]:
        """The hits of places of a role."""
        return self._hits[role]

    def best_pair(self, turn: int) -> tuple[Estimate, Estimate] | None:
        """The pair that costs least among the best pairs of all cohorts; None where there is no pair."""
        candidates, best = self.candidates, None
        groups = candidates.cohorts()
        for group in groups:
            prefill_hits, decode_hits = self._hits[Role.PREFILL], self._hits[Role.DECODE]
            if len(groups) > 1:
                prefill_hits, decode_hits = (
                    _of_cohort(prefill_hits, group.cohort),
                    _of_cohort(decode_hits, group.cohort),
                )
            if candidates.bars:
                found = best_allowed_pair(
                    self.all_estimates(self.prefill, group.prefills, prefill_hits),
                    self.all_estimates(self.hand_over, group.decodes, decode_hits),
                    candidates.bars,
                )
            else:
                prefill = self.best(self.prefill, group.prefills, prefill_hits, turn)
                decode = self.best(self.hand_over, group.decodes, decode_hits, turn)
                found = None if prefill is None or decode is None else (prefill, decode)
            if found is not None and (best is None or found[0].score + found[1].score < best[0].score + best[1].score):
                best = found
        return best

    def best_alone(self, turn: int) -> Estimate | None:
        """The node of both roles that serves the whole request at the least cost."""
        views = [view for view in self.candidates.open(Role.DECODE) if len(view.node.roles) > 1]
        hits = [hit for hit in self.hits(Role.DECODE) if len(hit[0].node.roles) > 1]
        return self.best(self.local(), views, hits, turn)

    def resuming(self) -> Estimate | None:
        """The decode place that resumes by itself and computes the rest soonest, within the budget for its streams.
        Nodes of both roles are left to `best_alone`."""
        if self._policy.itl_budget <= 0:
            return None
        hits = [each for each in self.hits(Role.DECODE) if each[2].resume > 0 and len(each[0].node.roles) == 1]
        if not hits:
            return None
        cost = LocalCost(self.tokens, self.candidates.book)
        scores = cost.scores(hits)
        by_score = (cost.at(*hits[index]) for index in sorted(range(len(hits)), key=scores.__getitem__))
        return next((each for each in by_score if cost.stall(each) <= self._budget(each)), None)

    def _budget(self, alone: Estimate) -> float:
        """Less where all that is cached is on a prefill place too, which then will not have what is computed now."""
        whole = self._policy.itl_budget
        return whole if self._only_there(alone) else FIRST_TURN * whole

    def _only_there(self, alone: Estimate) -> int:
        """How many tokens a decode place has that no prefill place has."""
        return max(0, alone.hit.resume - self.furthest(Role.PREFILL))

    def again(self, alone: Estimate, prefill: Estimate) -> float:
        """Seconds that prefill places will need later where a decode place computes the prompt alone now.

        That is for what this prefill place would compute now, so that a move to a place which is less busy is not
        thought to be saved when it is put off; without what only the decode place has, which is lacking either way.
        """
        return self.prefill.own_seconds(self.tokens - prefill.hit.resume - self._only_there(alone))

    def furthest(self, role: Role) -> int:
        """The most tokens of which a place of that role need not compute any."""
        found = self._furthest.get(role)
        if found is None:
            found = self._furthest[role] = max([hit.resume for _, _, hit in self._hits[role]], default=0)
        return found

    def all_estimates(self, cost: Cost, views: Sequence[NodeView], hits: Sequence[PlaceHit]) -> list[Estimate]:
        """The cost of the places that have something cached, and of the lightest rank of each other node."""
        known = {view.name for view, _, _ in hits}
        fresh = [cost.at(view, view.lightest, NO_HIT) for view in views if view.name not in known]
        return [cost.at(*each) for each in hits] + fresh

    def best(self, cost: Cost, views: Sequence[NodeView], hits: Sequence[PlaceHit], turn: int) -> Estimate | None:
        """The place that costs least; of nearly equal ones the session's own, or each in its turn."""
        if not views:
            return None
        needs = self.candidates.needs
        if needs.prefix is None and needs.session is not None:
            hits = self._guessed(views, needs.session)
        if len(views) == 1 and len(views[0].places) == 1:  # nothing to compare
            return cost.at(*hits[0]) if hits else cost.at(views[0], views[0].lightest, NO_HIT)
        scores = cost.scores(hits)
        least = min(scores, default=math.inf)
        most = _near(least)
        fresh: Sequence[NodeView] = ()
        if not hits or most >= cost.least_fresh(views, self.candidates.heaviest(cost.role)):
            fresh_scores = cost.fresh(views)
            most = _near(min(least, *fresh_scores))
            fresh = [view for view, score in zip(views, fresh_scores, strict=True) if score <= most]
        near = [each for each, score in zip(hits, scores, strict=True) if score <= most]
        views = [view for view, _, _ in near]
        if fresh:
            known = {view.name for view in views}
            views += (fresh := [view for view in fresh if view.name not in known])
        index = self._which(views, turn)
        return cost.at(*near[index]) if index < len(near) else self._fresh_estimate(cost, fresh[index - len(near)])

    def _which(self, views: Sequence[NodeView], turn: int) -> int:
        """The session's own, where what is cached is an estimate: all turns are at one place then, and proxies find the
        same one. Else, of a few from the turn's on, the one that did least lately: what is cached there draws more."""
        needs = self.candidates.needs
        if needs.session is not None and (needs.prefix is None or needs.prefix.source is HitSource.APPROXIMATION):
            return own_index(views, needs.session)
        few = [(turn + step) % len(views) for step in range(min(FEW, len(views)))]
        did = [sum(map(_RECENT, views[index].places)) for index in few]
        return few[did.index(min(did))]

    def _fresh_estimate(self, cost: Cost, view: NodeView) -> Estimate:
        """With what its lightest rank has cached after all, where that hardly matters."""
        hits = self._hits[cost.role]
        hit = next((hit for each, place, hit in hits if each is view and place is view.lightest), NO_HIT)
        return cost.at(view, view.lightest, hit)

    def _guessed(self, views: Sequence[NodeView], session: int) -> list[PlaceHit]:
        own, tokens = views[own_index(views, session)], int(self.tokens * SESSION_SHARE)
        return [(own, own.places[session % len(own.places)], Hit(tokens, tokens))]

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

    def plan(self, prefill: Estimate, decode: Estimate) -> Plan:
        """One place computes the prompt, and another one takes it over."""
        return Plan(
            prefill.view.node, decode.view.node, None, None, None, self._rank(prefill), self._rank(decode),
            self.reason(prefill, Role.PREFILL), self.tokens, prefill.hit, decode.hit,
            self.tokens - prefill.hit.resume, prefill.seconds, decode.seconds,
        )  # fmt: skip

    def alone(self, chosen: Estimate, reason: RouteReason, local: LocalReason | None) -> Plan:
        """One place does everything."""
        return Plan(
            None, chosen.view.node, local, None, None, None, self._rank(chosen),
            reason, self.tokens, None, chosen.hit, self.tokens - chosen.hit.resume, chosen.seconds,
        )  # fmt: skip

    def _rank(self, chosen: Estimate) -> int | None:
        """The rank is named where there are several."""
        several = len(chosen.view.places) > 1 and self.candidates.needs.names_rank
        return chosen.place.rank if several else None


_NOTHING_CACHED: Mapping[Role, Sequence[PlaceHit]] = MappingProxyType(dict.fromkeys(Role, ()))


def _of_cohort(hits: Sequence[PlaceHit], cohort: str) -> list[PlaceHit]:
    return [hit for hit in hits if hit[0].node.cohort in ("", cohort)]


def _by_role(candidates: Candidates, hits: Mapping[Place, Hit]) -> Mapping[Role, Sequence[PlaceHit]]:
    """Hits on places that may get the request. A leg that cannot name a rank meets any of its node's."""
    if not candidates.needs.names_rank:
        hits = _mean_over_ranks(candidates, hits)
    found: dict[Role, list[PlaceHit]] = {Role.PREFILL: [], Role.DECODE: []}
    views = candidates.by_name()
    for place, hit in hits.items():
        view = views.get(place.node)
        if view is not None and place.rank < len(view.places):
            ranked = (view, view.places[place.rank], hit)
            for role in view.node.roles:
                found[role].append(ranked)
    return found


def _mean_over_ranks(candidates: Candidates, hits: Mapping[Place, Hit]) -> Mapping[Place, Hit]:
    sums: dict[str, tuple[int, int]] = {}
    for place, hit in hits.items():
        attention, resume = sums.get(place.node, (0, 0))
        sums[place.node] = attention + hit.attention, resume + hit.resume
    views = candidates.by_name()
    ranks = {name: views[name].node.ranks for name in sums if name in views}
    return {Place(name): Hit(*(tokens // ranks[name] for tokens in sums[name])) for name in ranks}


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
