"""What places have cached of a request's prompt, from their KV events: an `ExactSource` of the orchestration.

A look-up may take a call to a node, for the prompt's token ids. So it is not made where nothing can come of it: of a
prompt that is shorter than a block, where there is one place of each role, where no place's events are read, or where
such calls take longer than to compute the whole prompt: no plan can save more than that.
"""

import asyncio
import dataclasses
import weakref
from collections.abc import Mapping, Sequence

from pdproxy.clock import Clock
from pdproxy.events.places import PlaceCaches, SchemeIndex
from pdproxy.events.token_ids import TokenIds
from pdproxy.legs.shape import BYTES_PER_TOKEN, estimated_prompt_tokens
from pdproxy.nodes.node import Node, NodeView, Role
from pdproxy.nodes.pool import Pool
from pdproxy.observe.labels import Known
from pdproxy.planning.block_hashes import PLAIN, PromptExtras
from pdproxy.planning.cost import covered_tokens
from pdproxy.planning.plan_types import Plan
from pdproxy.planning.prefix import Hit, HitSource, Place, PromptHits
from pdproxy.planning.prefix_index import PrefixIndex
from pdproxy.planning.rates import Rates, Work
from pdproxy.request import Json, SubRequest

EXPECTED_SECONDS = 30.0
"""For how long what was routed to a place counts as cached there, unless its events say so before."""
MOST_TOKENS = 1 << 18
"""Longer prompts are not looked up."""
LONG_PROMPT = 4096
"""Tokens from which on a prompt is hashed in a thread: that takes milliseconds, in which streams would stand still."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Candidates:
    """The nodes that may get a request: ``render`` is the one to ask for token ids, ``prefills`` are there by name."""

    render: Node
    prefills: Mapping[str, Node]
    schemes: tuple[SchemeIndex, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt that was looked up: its hashes by each scheme."""

    tokens: int
    hashes: tuple[tuple[SchemeIndex, Sequence[int]], ...]
    asked: "weakref.ref[SubRequest]"


class EventPrefixSource:
    """Looks prompts up in the index that `EventSubscriber` keeps."""

    def __init__(self, pool: Pool, caches: PlaceCaches, token_ids: TokenIds, clock: Clock, rates: Rates) -> None:
        self._pool = pool
        self._caches = caches
        self._token_ids = token_ids
        self._clock = clock
        self._rates = rates
        self._prompts: dict[int, _Prompt] = {}
        """By the identity of a sub-request, while that lives."""

    async def look_up(self, sub_request: SubRequest) -> PromptHits | None:
        """What is cached of the prompt; None where nothing is known, or it is not worth its cost. Never raises."""
        candidates = self._candidates(sub_request)
        if candidates is None or _is_short(sub_request.body, candidates.schemes):
            return None
        estimated = estimated_prompt_tokens(sub_request.body)
        if estimated > 2 * MOST_TOKENS:
            return None
        worth = self._rates.role(Work.PREFILL).seconds(estimated)
        ids = await self._token_ids.of(sub_request.endpoint, sub_request.body, candidates.render, worth)
        if ids is None or len(ids) > MOST_TOKENS:
            return None
        extras = _extras(sub_request.body)
        hashed = [(scheme, await _hashes(scheme, ids, extras)) for scheme in candidates.schemes]
        known = tuple((scheme, hashes) for scheme, hashes in hashed if hashes is not None)
        if not known:
            return None
        key = id(sub_request)
        over = weakref.ref(sub_request, lambda _: self._prompts.pop(key, None))
        self._prompts[key] = _Prompt(len(ids), known, over)
        hits: dict[Place, Hit] = {}
        for scheme, hashes in known:
            hits.update(_look_up(scheme.index, hashes, len(ids), candidates.prefills, self._clock.now()))
        return PromptHits(len(ids), HitSource.EVENTS, hits)

    def routed(self, sub_request: SubRequest, plan: Plan) -> None:
        """The request goes there: the place that computes it counts as having the prompt, until its events say so, or
        for a while. A decode place that gets a ticket has nothing of it until it has read that: a prompt which it were
        to compute meanwhile, as it could from a prefix that is expected there, would be computed whole.
        """
        prompt = self._prompts.get(id(sub_request))
        if prompt is None:
            return
        if plan.prefill is not None:
            covered = covered_tokens(plan.prefill, prompt.tokens)
            self._expect(prompt, plan.prefill, plan.prefill_rank, covered)
        else:
            self._expect(prompt, plan.decode, plan.decode_rank, prompt.tokens)

    def reads(self, node: str) -> bool:
        """Whether what this node has cached is known from its events, in part at least."""
        return any(feed.known is not Known.NOTHING for feed in self._caches.of_node(node))

    def _expect(self, prompt: _Prompt, node: Node, rank: int | None, tokens: int) -> None:
        scheme = self._caches.scheme(node.hashing)
        hashes = next((hashes for each, hashes in prompt.hashes if each is scheme), None)
        if rank is None and node.ranks > 1:
            return  # vLLM chooses
        place = Place(node.name, rank or 0)
        if scheme is None or hashes is None or not self._caches.has(place):
            return
        until = self._clock.now() + EXPECTED_SECONDS
        scheme.index.expect(place, hashes, scheme.index.after_prefill(tokens), until)

    def _candidates(self, sub_request: SubRequest) -> _Candidates | None:
        """None where there is nothing to choose, nothing is known, or the model is an adapter, or may be."""
        snapshot, model = self._pool.snapshot(), sub_request.request.model
        places = snapshot.roster.served(model).places
        by_role = {role: [snapshot.nodes[at] for at in places.of(role)] for role in Role}
        if all(sum(view.node.ranks for view in views) < 2 for views in by_role.values()):
            return None
        views = [view for role in Role for view in by_role[role] if view.node.model == model]
        schemes = tuple({id(scheme): scheme for scheme in map(self._known_scheme, views) if scheme}.values())
        if not schemes:
            return None
        render = min(by_role[Role.PREFILL] or by_role[Role.DECODE], key=lambda view: view.load)
        return _Candidates(render.node, {view.node.name: view.node for view in by_role[Role.PREFILL]}, schemes)

    def _known_scheme(self, view: NodeView) -> SchemeIndex | None:
        """The scheme of a node of which anything is known."""
        feeds = self._caches.of_node(view.node.name)
        return next((feed.scheme for feed in feeds if feed.known is not Known.NOTHING), None)


async def _hashes(scheme: SchemeIndex, ids: Sequence[int], extras: PromptExtras) -> Sequence[int] | None:
    if len(ids) < LONG_PROMPT:
        return scheme.hasher.hashes(ids, extras)
    return await asyncio.to_thread(scheme.hasher.hashes, ids, extras)


def _look_up(
    index: PrefixIndex, hashes: Sequence[int], tokens: int, prefills: Mapping[str, Node], now: float
) -> Mapping[Place, Hit]:
    """What each place has of the prompt; a prefill node, of what its leg computes, whose last token is never a hit."""
    hits = dict(index.look_up(hashes, tokens, now))
    legs = {covered_tokens(node, tokens) for node in prefills.values()}
    shorter = {covered: index.look_up(hashes, covered, now) for covered in legs}
    for place in [place for place in hits if place.node in prefills]:
        hit = shorter[covered_tokens(prefills[place.node], tokens)].get(place)
        if hit is None:
            del hits[place]
        else:
            hits[place] = hit
    return hits


def _is_short(body: Json, schemes: Sequence[SchemeIndex]) -> bool:
    """Whether the prompt surely has not a block's tokens, but for what a template adds: a token is a byte at least."""
    longest = estimated_prompt_tokens(body) * BYTES_PER_TOKEN
    return longest < min(scheme.index.scheme.block_size for scheme in schemes)


def _extras(body: Json) -> PromptExtras:
    salt = body.get("cache_salt")
    return PromptExtras(salt=salt) if isinstance(salt, str) and salt else PLAIN
