"""An estimate of what places have cached, by what this proxy sent where: the source for nodes without KV events."""

import dataclasses
from collections.abc import Sequence

import msgspec

from pdproxy.clock import Clock
from pdproxy.legs.outline import BYTES_PER_TOKEN
from pdproxy.legs.prompt_text import MOST_BYTES, MOST_IDS, MOST_PARTS, prompt_ids, prompt_parts, prompt_salt
from pdproxy.nodes.node import UNKNOWN_BLOCK, Node, PoolState, Role
from pdproxy.nodes.pool import Pool
from pdproxy.orchestration.prefix_source import RealHit
from pdproxy.planning.cost import covered_tokens
from pdproxy.planning.plan_types import Plan
from pdproxy.planning.prefix import NO_HIT, Hit, HitPlaces, HitSource, Place, PromptHits, place_of
from pdproxy.planning.renderings import HashesByScheme, KnownPrefix, Rendering
from pdproxy.planning.text_chain import Chain, chain_of_completion, chain_of_ids, chain_of_text
from pdproxy.planning.text_index import KeptStates, TextIndex
from pdproxy.request import Endpoint, SubRequest


class _Asked(msgspec.Struct):
    """The note of a sub-request.

    ``chain``: its marks; ``cut``: of the beginning of a longer prompt. ``expected``: what its computing place was
    expected to resume.
    """

    chain: Chain
    cut: bool
    expected: int = 0


class TextPrefixSource:
    """A `PrefixSource` over a `TextIndex`, and the memory of an `EventPrefixSource`; nothing here waits."""

    def __init__(self, pool: Pool, clock: Clock, index: TextIndex | None = None) -> None:
        self._pool = pool
        self._clock = clock
        self._index = index or TextIndex()

    async def look_up(self, sub_request: SubRequest) -> PromptHits | None:
        """As `PrefixSource`; None for a prompt without text."""
        asked = self._ask(sub_request)
        chain = asked.chain
        if not chain.hashes:
            return None
        tokens, state = self._tokens(asked, sub_request), self._pool.state()
        if tokens <= state.least_block:
            return PromptHits(tokens, HitSource.APPROXIMATION, ())
        return PromptHits(tokens, HitSource.APPROXIMATION, self._hits(chain, state, tokens))

    def _hits(self, chain: Chain, state: PoolState, tokens: int) -> HitPlaces:
        """In whole blocks of the nodes. Nodes that are alike are one step together."""
        found = self._index.hits(chain, self._clock.now())
        if not found:
            return ()
        kinds, places = self._index.numbers.kinds(state), self._index.numbers.places
        return [
            (cut, places(mask & alike))
            for hit, mask in found
            for node, alike in kinds
            if mask & alike and (cut := _in_blocks(node, hit, tokens)) is not NO_HIT
        ]

    def routed(self, sub_request: SubRequest, plan: Plan) -> None:
        """The places of the plan will have the prompt; the one that computes it, its states."""
        asked = self._ask(sub_request)
        asked.expected = (plan.prefill_hit or plan.decode_hit).resume
        decode, prefill, keeps = plan.decode, plan.prefill, KeptStates.ALL
        places: dict[Place, KeptStates] = {}
        if prefill is not None:
            keeps = KeptStates.END if decode.prefix_match_unit else KeptStates.NONE
            if prefill.ranks == 1 or plan.prefill_rank is not None:  # else vLLM chooses, and does not say which
                places[place_of(prefill.name, plan.prefill_rank)] = KeptStates.ALL
        if decode.ranks == 1 or plan.decode_rank is not None:
            places[place_of(decode.name, plan.decode_rank)] = keeps
        self._index.sent(asked.chain, places, self._clock.now())

    def learn(self, sub_request: SubRequest, real: RealHit) -> None:
        """Learn how long the prompt was, and whether the place had the state that it was expected to have."""
        asked = self._ask(sub_request)
        if real.prompt is not None:
            self._index.counted(asked.chain, real.prompt)
        node = self._pool.node(real.place.node)
        block = UNKNOWN_BLOCK if node is None else node.match_block
        if real.cached + block < asked.expected:
            self._index.cached_less(asked.chain, real.place)
        elif real.cached > asked.expected + block:
            self._index.cached_more(asked.chain, real.place, real.cached, self._clock.now())

    def marks(self, sub_request: SubRequest) -> Sequence[int]:
        """As `PrefixSource`; none for a prompt without text. Of a very long prompt only the beginning is looked at."""
        return self._ask(sub_request).chain.hashes

    def known_prefix(self, sub_request: SubRequest) -> KnownPrefix:
        """The part of a prompt that tokenized prompts tell."""
        asked = self._ask(sub_request)
        known = self._index.known_prefix(asked.chain)
        if known.whole or not asked.cut:
            return known
        return dataclasses.replace(known, prompt=max(self._tokens(asked, sub_request), known.tokens + 1))

    def tokenized(self, sub_request: SubRequest, tokens: int, hashes: HashesByScheme) -> None:
        """A node tokenized the prompt."""
        asked = self._ask(sub_request)
        chain = asked.chain
        if chain.hashes:
            whole = BYTES_PER_TOKEN * sub_request.shape.prompt_tokens
            text = max(whole, chain.ends[-1] + 1) if asked.cut else chain.ends[-1]
            self._index.tokenized(chain, Rendering(tokens, text, hashes))

    def _ask(self, sub_request: SubRequest) -> _Asked:
        asked: _Asked | None = sub_request.notes.get(self)
        if asked is None:
            chain, cut = _chain(sub_request)
            sub_request.notes[self] = asked = _Asked(self._index.refined(chain), cut)
        return asked

    def _tokens(self, asked: _Asked, sub_request: SubRequest) -> int:
        return sub_request.shape.prompt_tokens if asked.cut else self._index.tokens(asked.chain)


def _chain(sub_request: SubRequest) -> tuple[Chain, bool]:
    """The marks of a prompt, and whether it is longer than what is looked at."""
    endpoint, model = sub_request.endpoint, sub_request.request.model
    salt = prompt_salt(endpoint, model, sub_request.body)
    ids, parts = _ids_or_parts(sub_request)
    if ids:
        return chain_of_ids(model, salt, ids), len(ids) >= MOST_IDS
    cut = len(parts) >= MOST_PARTS or sum(map(len, parts)) >= MOST_BYTES
    if endpoint is Endpoint.COMPLETIONS and len(parts) == 1:
        return chain_of_completion(model, salt, parts[0]), cut
    return chain_of_text(model, salt, parts), cut


def _ids_or_parts(sub_request: SubRequest) -> tuple[Sequence[int], list[bytes]]:
    """The token ids of a prompt, or the parts of its text."""
    text, fields = sub_request.text, sub_request.body
    if text is not None:
        taken = text.take_fields()
        if taken is None:
            return text.ids, text.take_parts()
        fields = taken
    if isinstance(fields.get("prompt"), str):  # decoded, as of most completions
        return (), prompt_parts(fields)
    ids = prompt_ids(fields)
    return ids, [] if ids else prompt_parts(fields)


def _in_blocks(node: Node, hit: Hit, tokens: int) -> Hit:
    """A hit in whole blocks of its node, which computes the last token in any case; `NO_HIT` where none is left.

    A node without state groups resumes wherever its attention blocks end; others at a state, which is kept at the last
    boundary before the last token that was computed. Of a prefill leg that is earlier than the prompt's.
    """
    block, leg, earlier, attention = node.match_block, tokens, hit.resume, hit.attention
    if Role.PREFILL in node.roles and node.keeps_states:
        leg = covered_tokens(node, tokens) if tokens else 0
        earlier = covered_tokens(node, earlier) if earlier else 0
    if attention >= leg:
        attention = leg - 1
    attention -= attention % block
    if attention <= 0:
        return NO_HIT
    if not node.keeps_states:
        return Hit(attention, attention)
    resume = (earlier - 1) // block * block if earlier else 0
    return Hit(attention, min(resume, attention))
