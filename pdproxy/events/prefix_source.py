"""The prefix source that reads KV events: an `ExactSource` of the orchestration.

A look-up needs the prompt's hashes (`prompt_hashes`). It is not made where nothing can come of it: of a prompt that is
shorter than a block, where there is one place of each role, or where no place's events are read.
"""

import asyncio
import dataclasses
import operator
from collections.abc import Iterator, Mapping, Sequence

from pdproxy.background import Background
from pdproxy.clock import Clock
from pdproxy.events.places import PlaceCaches, SchemeIndex
from pdproxy.events.prompt_hashes import MOST_TOKENS, HashFinder, Ids, PromptHashes
from pdproxy.events.token_ids import Waiting
from pdproxy.legs.outline import BYTES_PER_TOKEN
from pdproxy.nodes.node import Node, NodeView, PlaceSet, PoolState, Role, ServingNodes
from pdproxy.nodes.pool import Pool
from pdproxy.observe.event_metrics import EventMetrics
from pdproxy.observe.labels import LookUp
from pdproxy.planning.cost import covered_tokens
from pdproxy.planning.plan_types import Plan
from pdproxy.planning.prefix import Hit, HitPlaces, HitSource, Place, PromptHits
from pdproxy.planning.prefix_index import PrefixIndex
from pdproxy.planning.turnover import Turnover
from pdproxy.request import SubRequest

EXPECTED_SECONDS = 30.0
"""For how long what was routed to a place counts as cached there, unless its events say so before."""


_LOAD = operator.attrgetter("load")


@dataclasses.dataclass(frozen=True, slots=True)
class _Candidates:
    """The nodes that may get a request.

    Attributes:
        views: of these the prefill nodes, or all where there is none: they can be asked for token ids.
        schemes: by which any of them hashes prompts.
        all_read: something is known of each of them from its events.
    """

    views: Sequence[NodeView]
    schemes: tuple[SchemeIndex, ...]
    all_read: bool

    @property
    def render(self) -> Node:
        """The one to ask for token ids."""
        return min(self.views, key=_LOAD).node


@dataclasses.dataclass(slots=True)
class _Prompt:
    """A prompt that was looked up. ``plan``: where it was routed to last."""

    found: PromptHashes
    plan: Plan | None = None


class EventPrefixSource:
    """Looks prompts up in the index that `EventSubscriber` keeps."""

    def __init__(
        self,
        pool: Pool,
        caches: PlaceCaches,
        finder: HashFinder,
        clock: Clock,
        metrics: EventMetrics,
        background: Background,
    ) -> None:
        self._pool = pool
        self._caches = caches
        self._finder = finder
        self._clock = clock
        self._metrics = metrics
        self._background = background
        self._turnover = Turnover()
        self._by_model: dict[str, _Candidates] = {}
        self._of: tuple[PoolState, Mapping[str, SchemeIndex]] | None = None
        """The nodes, and what is known of them, of which these are candidates."""

    async def look_up(self, sub_request: SubRequest) -> PromptHits | None:
        """The cached part of the prompt; None where nothing is known, or it is not worth its cost. Never raises."""
        candidates = self._candidates(sub_request)
        if candidates is None or _is_short(sub_request, candidates.schemes):
            return None
        if sub_request.shape.prompt_tokens > 2 * MOST_TOKENS:
            return None
        found = await self._find(sub_request, candidates)
        sub_request.notes[self] = _Prompt(found)
        if not found.hashes:
            return None
        return PromptHits(found.tokens, HitSource.EVENTS, self._hits(found, candidates), self._stays())

    def routed(self, sub_request: SubRequest, plan: Plan) -> None:
        """The request goes there: the place that computes it counts as having the prompt, until its events say so, or
        for a while. A decode place that gets a ticket has nothing of it until it has read that: a prompt which it were
        to compute meanwhile, as it could from a prefix that is expected there, would be computed whole.
        """
        prompt: _Prompt | None = sub_request.notes.get(self)
        if prompt is None:
            return
        prompt.plan = plan
        self._expect_prompt(prompt.found, plan)
        if prompt.found.ids is Ids.WANTED:
            prompt.found = dataclasses.replace(prompt.found, ids=Ids.NONE)
            self._background.start("token ids", self._ask_behind(sub_request, prompt))

    def reads(self, node: str) -> bool:
        """Whether what this node has cached is known from its events, in part at least."""
        return node in self._caches.known

    def reads_all(self, sub_request: SubRequest) -> bool:
        """Whether it `reads` all nodes that may get this prompt."""
        candidates = self._candidates(sub_request)
        return candidates is not None and candidates.all_read

    def _stays(self) -> Mapping[Place, float]:
        """See `PromptHits`."""
        now = self._clock.now()
        if self._turnover.is_due(now):
            self._turnover.note_stored(self._stored(), now)
        return self._turnover.stays

    def _stored(self) -> Iterator[tuple[Place, int, int]]:
        """Each place whose events are read, with the blocks that it has stored and the most that it can hold."""
        for view in self._pool.state().nodes:
            node = view.node
            if node.capacity is not None and node.block_size:
                most = node.capacity.tokens // node.block_size // node.ranks
                for feed in self._caches.of_node(node.name):
                    yield feed.place, feed.scheme.index.stored(feed.place), most

    async def _find(self, sub_request: SubRequest, candidates: _Candidates) -> PromptHashes:
        """The known hashes of the prompt, or all of them where it pays to wait for a node that tells them."""
        found = await self._finder.known_hashes(sub_request, candidates.schemes)
        if not self._finder.pays(found):
            by = LookUp.KNOWN if found.known else LookUp.NOTHING
            self._metrics.looked_up(LookUp.GIVEN if found.ids is Ids.GIVEN else by)
            return found
        self._metrics.looked_up(LookUp.ASKED)
        exact = await self._finder.ask_node(sub_request, candidates.schemes, candidates.render, Waiting.PLAN)
        if exact is None:
            return dataclasses.replace(found, ids=Ids.NONE)
        self._learn(found, exact, candidates)
        return exact

    async def _ask_behind(self, sub_request: SubRequest, prompt: _Prompt) -> None:
        """All of the prompt's hashes, while the request is under way: for those that go on from it."""
        await asyncio.sleep(0)  # the legs go out first
        candidates = self._candidates(sub_request)
        if candidates is None or sub_request.held.dropped:
            return
        exact = await self._finder.ask_node(sub_request, candidates.schemes, candidates.render, Waiting.NOTHING)
        if exact is None or prompt.plan is None:
            return
        self._learn(prompt.found, exact, candidates, prompt.plan.prefill or prompt.plan.decode)
        prompt.found = exact
        self._expect_prompt(exact, prompt.plan)

    def _learn(
        self, before: PromptHashes, exact: PromptHashes, candidates: _Candidates, computing: Node | None = None
    ) -> None:
        """Whether a place had more than was known; not of the node that computes the prompt meanwhile."""
        best = max((hit.resume for hit, _ in self._hits(before, candidates)), default=0)
        more = (
            hit.resume - best
            for hit, places in self._hits(exact, candidates)
            if computing is None or any(name != computing.name for name, _ in places.places)
        )
        self._finder.was_cached(before, exact.tokens, max(0, *more, 0))

    def _hits(self, prompt: PromptHashes, candidates: _Candidates) -> HitPlaces:
        hits, state, now = list[tuple[Hit, PlaceSet]](), self._pool.state(), self._clock.now()
        for scheme in candidates.schemes:
            hashes = prompt.hashes.get(scheme.index.scheme)
            if hashes is not None:
                hits += _hits(scheme.index, hashes, prompt.tokens, scheme.index.numbers.kinds(state), now)
        return hits

    def _expect_prompt(self, prompt: PromptHashes, plan: Plan) -> None:
        if plan.prefill is not None:
            covered = covered_tokens(plan.prefill, prompt.tokens)
            self._expect(prompt, plan.prefill, plan.prefill_rank, covered)
        else:
            self._expect(prompt, plan.decode, plan.decode_rank, prompt.tokens)

    def _expect(self, prompt: PromptHashes, node: Node, rank: int | None, tokens: int) -> None:
        scheme = self._caches.scheme(node.hashing)
        hashes = None if scheme is None else prompt.hashes.get(scheme.index.scheme)
        if rank is None and node.ranks > 1:
            return  # vLLM chooses
        place = Place(node.name, rank or 0)
        if scheme is None or hashes is None or not self._caches.has(place):
            return
        hit, block = scheme.index.after_prefill(tokens), scheme.index.scheme.block_size
        if not prompt.exact:  # of a prefix its whole blocks are known, and no state is kept there
            hit = Hit(min(hit.attention, prompt.known) // block * block, 0)
        until = self._clock.now() + EXPECTED_SECONDS
        scheme.index.expect(place, hashes, hit, until)

    def _candidates(self, sub_request: SubRequest) -> _Candidates | None:
        """None where there is nothing to choose, nothing is known, or the model is an adapter, or may be."""
        if self._caches.empty:
            return None
        state, known, model = self._pool.state(), self._caches.known, sub_request.request.model
        if self._of is None or self._of[0] is not state or self._of[1] is not known:
            self._of = state, known
            self._by_model.clear()
        found = self._by_model.get(model)
        if found is None:
            found = _candidates(state.served(model), known, model)
            if found is not None:  # so that clients' words do not fill the memory
                self._by_model[model] = found
        return found


def _candidates(served: ServingNodes, known: Mapping[str, SchemeIndex], model: str) -> _Candidates | None:
    if served.alone:
        return None
    prefills, decodes = served.all.prefills, served.all.decodes
    schemes = {
        id(scheme): scheme
        for view in (*prefills, *decodes)
        if view.node.model == model and (scheme := known.get(view.name)) is not None
    }
    if not schemes:
        return None
    all_read = all(view.name in known for view in (*prefills, *decodes))
    return _Candidates(prefills or decodes, tuple(schemes.values()), all_read)


def _hits(
    index: PrefixIndex, hashes: Sequence[int], tokens: int, kinds: Sequence[tuple[Node, int]], now: float
) -> Iterator[tuple[Hit, PlaceSet]]:
    """The hits of places; those of a prefill node are of what its leg computes, whose last token is never a hit."""
    by_leg: dict[int, list[tuple[Hit, int]]] = {}
    for node, alike in kinds:
        leg = covered_tokens(node, tokens) if Role.PREFILL in node.roles else tokens
        if leg not in by_leg:
            by_leg[leg] = index.hits(hashes, leg, now)
        for hit, mask in by_leg[leg]:
            if mask & alike:
                yield hit, index.numbers.places(mask & alike)


def _is_short(sub_request: SubRequest, schemes: Sequence[SchemeIndex]) -> bool:
    """Whether the prompt surely has not a block's tokens, but for what a template adds: a token is a byte at least."""
    longest = sub_request.shape.prompt_tokens * BYTES_PER_TOKEN
    return longest < min(scheme.index.scheme.block_size for scheme in schemes)
