"""The policy `cache`: the places that cost a prompt least, by what they have cached of it. Pure.

Prefill and decode places are priced apart (`cost`) and the best of each cohort go together, for what a hand-over costs
depends on the decode place alone. Only places that have something cached are priced one by one; all others differ by
their load alone. Places that cost nearly the same are chosen by the request's session, or by what they did lately.
"""

import dataclasses
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from pdproxy.nodes.node import Bars, NodeView, Role
from pdproxy.observe.labels import RouteReason
from pdproxy.planning.cost import NO_HIT, HandOverPrice, LocalPrice, PrefillPrice, Price, Quote, may_keep_states
from pdproxy.planning.plan import Candidates
from pdproxy.planning.plan_types import Choice, Decision
from pdproxy.planning.prefix import Hit, HitSource, Place
from pdproxy.planning.rates import Rates
from pdproxy.planning.session import own_index

ITL_BUDGET = 0.1
"""Seconds; the default of ``policy.itl_budget``."""
NEAR_SECONDS, NEAR_SHARE = 0.002, 0.05
"""Costs that differ by less than this, or than this share, are the same: no estimate is better than that."""
FEW = 8
"""Of places that cost nearly the same, how many are compared by what they did lately."""
SESSION_SHARE = 0.5
"""Of a prompt, what its session's own place is taken to have cached where nothing is known."""
FIRST_TURN = 0.6
"""Of `CacheAware.itl_budget`, for the first turn that a decode place computes where a prefill place could resume as
far: the next turn is about as long, and where that one is over the budget, a prefill place computes both."""
_SCORE = operator.attrgetter("score")


@dataclasses.dataclass(frozen=True, slots=True)
class CacheAware:
    """Chooses by cost.

    Attributes:
        itl_budget: seconds for which a decode node's streams may get no token since it computes a prompt that a prefill
            node could; 0: it never does.
    """

    itl_budget: float = ITL_BUDGET

    def node(self, candidates: Candidates, role: Role, turn: int) -> Choice | None:
        """Without a partner a decode node computes the prompt itself."""
        market = Market(self, candidates)
        prefill = role is Role.PREFILL
        price = market.prefill if prefill else market.local if candidates.needs.partner is None else market.hand_over
        best = market.best(price, candidates.open(role), market.hits(role), turn)
        return best and market.choice(best, market.decision(market.reason(best, role), best))

    def pair(self, candidates: Candidates, turn: int) -> tuple[Choice | None, Choice] | None:
        if not candidates.may_pair:
            return None
        market = Market(self, candidates)
        pairs = [pair for pair in market.pairs(turn) if pair is not None]
        if not pairs:
            return None
        prefill, decode = pairs[0] if len(pairs) == 1 else min(pairs, key=_together)
        alone = market.alone()
        if alone is not None and alone.seconds + market.again(alone, prefill) < prefill.seconds + decode.seconds:
            return None, market.choice(alone, market.decision(RouteReason.RESUMES, alone))
        decision = market.decision(market.reason(prefill, Role.PREFILL), prefill, decode)
        return market.choice(prefill, None), market.choice(decode, decision)


def _near(score: float) -> float:
    """The most that costs as much as this."""
    return score + max(NEAR_SECONDS, NEAR_SHARE * score)


def _together(pair: tuple[Quote, Quote]) -> float:
    return pair[0].score + pair[1].score


class Market:
    """What the places of one request ask for it.

    Attributes:
        candidates: the nodes that may get it.
        tokens: in its prompt.
        prefill: the price of prefill places.
        hand_over: of decode places that get a ticket.
    """

    def __init__(self, policy: CacheAware, candidates: Candidates) -> None:
        needs = candidates.needs
        prefix, rates = needs.prefix, needs.rates or Rates()
        self._policy = policy
        self.candidates = candidates
        self._rates = rates
        self._hits = _by_role(candidates, prefix.hits) if prefix is not None and prefix.hits else _NOTHING_CACHED
        self.tokens = needs.tokens if prefix is None else prefix.tokens
        stateful = [hit.attention for view, _, hit in self._hits[Role.PREFILL] if may_keep_states(view.node)]
        deepest = max(stateful, default=0)
        work = rates.prefill_work if self._hits[Role.PREFILL] else None
        self.prefill = PrefillPrice(self.tokens, rates, deepest, work)
        self.hand_over = HandOverPrice(self.tokens, rates)

    @property
    def local(self) -> LocalPrice:
        """The price of decode places that compute; made anew each time, for few plans ask for it."""
        return LocalPrice(self.tokens, self._rates)

    def hits(self, role: Role) -> "Sequence[_PlaceHit]":
        """What places of a role have cached."""
        return self._hits[role]

    def pairs(self, turn: int) -> "Iterable[tuple[Quote, Quote] | None]":
        """The best pair of each cohort."""
        candidates = self.candidates
        prefill_hits, decode_hits = self._hits[Role.PREFILL], self._hits[Role.DECODE]
        only = len(candidates.cohort_names) == 1
        for cohort, (prefills, decodes) in zip(candidates.cohort_names, candidates.by_cohort(), strict=True):
            sellers = prefills, prefill_hits if only else _of_cohort(prefill_hits, cohort)
            takers = decodes, decode_hits if only else _of_cohort(decode_hits, cohort)
            if candidates.bars:
                quotes = self.all_quotes(self.prefill, *sellers), self.all_quotes(self.hand_over, *takers)
                yield best_allowed_pair(*quotes, candidates.bars)
                continue
            prefill, decode = self.best(self.prefill, *sellers, turn), self.best(self.hand_over, *takers, turn)
            yield None if prefill is None or decode is None else (prefill, decode)

    def alone(self) -> Quote | None:
        """The decode place that resumes by itself and computes the rest soonest, within the budget for its streams."""
        if self._policy.itl_budget <= 0:
            return None
        price = self.local
        resuming = [price.quote(*each) for each in self.hits(Role.DECODE) if each[2].resume > 0]
        allowed = (quote for quote in resuming if price.stall(quote.view, quote.rank, quote.hit) <= self._budget(quote))
        return min(allowed, key=_SCORE, default=None)

    def _budget(self, alone: Quote) -> float:
        """Less where all that is cached is on a prefill place too, which then will not have what is computed now."""
        whole = self._policy.itl_budget
        return whole if self._only_there(alone) else FIRST_TURN * whole

    def _only_there(self, alone: Quote) -> int:
        """How many tokens a decode place has that no prefill place has."""
        return max(0, alone.hit.resume - self.furthest(Role.PREFILL))

    def again(self, alone: Quote, prefill: Quote) -> float:
        """Seconds that prefill places will need later where a decode place computes the prompt alone now.

        That is for what this prefill place would compute now, so that a move to a place which is less busy is not
        thought to be saved when it is put off; without what only the decode place has, which is lacking either way.
        """
        return self.prefill.own_seconds(self.tokens - prefill.hit.resume - self._only_there(alone))

    def furthest(self, role: Role) -> int:
        """The most tokens of which a place of that role need not compute any."""
        return max((hit.resume for _, _, hit in self.hits(role)), default=0)

    def all_quotes(self, price: Price, views: Sequence[NodeView], hits: "Sequence[_PlaceHit]") -> list[Quote]:
        """Of the places that have something cached, and of the lightest rank of each other node."""
        known = {view.name for view, _, _ in hits}
        fresh = [price.quote(view, view.rank, NO_HIT) for view in views if view.name not in known]
        return [price.quote(*each) for each in hits] + fresh

    def best(self, price: Price, views: Sequence[NodeView], hits: "Sequence[_PlaceHit]", turn: int) -> Quote | None:
        """The cheapest; of nearly equal ones the session's own, or each in its turn."""
        if not views:
            return None
        needs = self.candidates.needs
        if needs.prefix is None and needs.session is not None:
            hits = self._guessed(views, needs.session)
        quotes = [price.quote(*each) for each in hits]
        least = min(map(_SCORE, quotes), default=math.inf)
        fresh: Sequence[NodeView] = ()
        if not quotes or _near(least) >= price.least_fresh(views, self.candidates.heaviest(views[0].node.role)):
            scores = price.fresh(views)
            least = min(least, *scores)
            most = _near(least)
            fresh = [view for view, score in zip(views, scores, strict=True) if score <= most]
        near = [quote for quote in quotes if quote.score <= _near(least)]
        known = {quote.view.name for quote in near}
        fresh = [view for view in fresh if view.name not in known] if known else fresh
        index = self._which([*(quote.view for quote in near), *fresh], turn)
        return near[index] if index < len(near) else self._fresh_quote(price, fresh[index - len(near)])

    def _which(self, views: Sequence[NodeView], turn: int) -> int:
        """The session's own, where what is cached is an estimate: all turns are at one place then, and proxies find the
        same one. Else, of a few from the turn's on, the one that did least lately: what is cached there draws more."""
        needs = self.candidates.needs
        if needs.session is not None and (needs.prefix is None or needs.prefix.source is HitSource.APPROXIMATION):
            return own_index(views, needs.session)
        recent, few = self._rates.recent, [(turn + step) % len(views) for step in range(min(FEW, len(views)))]
        did = [recent.get(views[index].node.name, 0.0) for index in few]
        return few[did.index(min(did))]

    def _fresh_quote(self, price: Price, view: NodeView) -> Quote:
        """With what its lightest rank has cached after all, where that hardly matters."""
        hit = next(
            (hit for each, rank, hit in self._hits[view.node.role] if each is view and rank == view.rank), NO_HIT
        )
        return price.quote(view, view.rank, hit)

    def _guessed(self, views: Sequence[NodeView], session: int) -> "list[_PlaceHit]":
        own, tokens = views[own_index(views, session)], int(self.tokens * SESSION_SHARE)
        return [(own, session % own.node.ranks, Hit(tokens, tokens))]

    def reason(self, chosen: Quote, role: Role) -> RouteReason:
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

    def decision(self, reason: RouteReason, computing: Quote, decode: Quote | None = None) -> Decision:
        """What is planned: one place computes the prompt, and ``decode`` takes it over where that is another one."""
        computed = self.tokens - computing.hit.resume
        if decode is None:
            return Decision(reason, self.tokens, None, computing.hit, computed, computing.seconds, 0.0)
        return Decision(
            reason, self.tokens, computing.hit, decode.hit, computed, computing.seconds, decode.seconds
        )  # fmt: skip

    def choice(self, quote: Quote, decision: Decision | None) -> Choice:
        """A place as a policy's choice; its rank is named where there are several."""
        node = quote.view.node
        several = node.ranks > 1 and self.candidates.needs.names_rank
        return Choice(node, None, quote.rank if several else None, decision)


_PlaceHit = tuple[NodeView, int, Hit]


_NOTHING_CACHED: Mapping[Role, Sequence[_PlaceHit]] = MappingProxyType(dict.fromkeys(Role, ()))


def _of_cohort(hits: Sequence[_PlaceHit], cohort: str) -> list[_PlaceHit]:
    return [hit for hit in hits if hit[0].node.cohort in ("", cohort)]


def _by_role(candidates: Candidates, hits: Mapping[Place, Hit]) -> Mapping[Role, Sequence[_PlaceHit]]:
    """What of the hits is on places that may get the request. A leg that cannot name a rank meets any of its node's."""
    if not candidates.needs.names_rank:
        hits = _mean_over_ranks(candidates, hits)
    found: dict[Role, list[_PlaceHit]] = {Role.PREFILL: [], Role.DECODE: []}
    named = candidates.named
    for (name, rank), hit in hits.items():
        view = named(name)
        if view is not None and rank < view.node.ranks:
            found[view.node.role].append((view, rank, hit))
    return found


def _mean_over_ranks(candidates: Candidates, hits: Mapping[Place, Hit]) -> Mapping[Place, Hit]:
    sums: dict[str, tuple[int, int]] = {}
    for place, hit in hits.items():
        attention, resume = sums.get(place.node, (0, 0))
        sums[place.node] = attention + hit.attention, resume + hit.resume
    views = {name: candidates.named(name) for name in sums}
    ranks = {name: view.node.ranks for name, view in views.items() if view is not None}
    return {Place(name): Hit(*(tokens // ranks[name] for tokens in sums[name])) for name in ranks}


def best_allowed_pair(prefills: list[Quote], decodes: list[Quote], bars: Bars) -> tuple[Quote, Quote] | None:
    """The pair of the lowest score together between which a ticket may pass; None where all are barred."""
    decodes = sorted((quote for quote in decodes if quote.view.name not in bars.nodes), key=_SCORE)
    best: tuple[Quote, Quote] | None = None
    for prefill in sorted(prefills, key=_SCORE):
        if best is not None and prefill.score + decodes[0].score >= best[0].score + best[1].score:
            break
        name = prefill.view.name
        decode = next((each for each in decodes if bars.allow(name, each.view.name)), None)
        if decode is not None and (best is None or prefill.score + decode.score < best[0].score + best[1].score):
            best = prefill, decode
    return best
