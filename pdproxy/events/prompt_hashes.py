"""The block hashes of a request's prompt, from the cheapest source: its own token ids, earlier prompts, a node.

A prompt that goes on from one that was tokenized before has that one's hashes as far as their texts are equal
(`TextMemory`): no node is asked for them. Of the rest the hashes are not known, which is all the same as long as no
place has it cached. How much of such rests was cached shows when the ids are there, and they are asked for behind each
plan in any case. So a plan waits for them only where they are expected to save more than they take: where other proxies
send to the same nodes, after a restart, and where a text was met whose hashes were never learned.
"""

import asyncio
import dataclasses
import enum
from array import array
from collections.abc import Sequence
from typing import Protocol

from pdproxy.events.places import SchemeIndex
from pdproxy.events.token_ids import TokenIds, Waiting, given_ids, tokenize_body
from pdproxy.nodes.load import Load, Work
from pdproxy.nodes.node import Node
from pdproxy.planning.block_hashes import PLAIN, HashScheme, PromptExtras
from pdproxy.planning.renderings import HashesByScheme, KnownPrefix
from pdproxy.raw_json import value_of
from pdproxy.request import Json, SubRequest

MOST_TOKENS = 1 << 18
"""Longer prompts are not looked up."""
LONG_PROMPT = 4096
"""Tokens from which on a prompt is hashed in a thread: that takes milliseconds, in which streams would stand still."""
KEPT_OF_SHARE = 0.8
"""Weight that each further prompt leaves of the share that was found cached of prompts' rests: the last five count."""


class TextMemory(Protocol):
    """Remembers by their text what is known of prompts that were tokenized."""

    def known_prefix(self, sub_request: SubRequest) -> KnownPrefix:
        """The known part of a prompt."""

    def tokenized(self, sub_request: SubRequest, tokens: int, hashes: HashesByScheme) -> None:
        """A node tokenized the prompt."""


class Ids(enum.Enum):
    """Whether a prompt's token ids are, or could be, known."""

    GIVEN = enum.auto()
    """The request has them."""
    KNOWN = enum.auto()
    """A node told them, of this prompt or of an equal one."""
    WANTED = enum.auto()
    """A node can be asked for them."""
    NONE = enum.auto()
    """A node was asked, or would not render the prompt as it renders the request."""


@dataclasses.dataclass(frozen=True, slots=True)
class PromptHashes:
    """The hashes of a prompt, as far as they are known.

    Attributes:
        tokens: in the prompt: about, where its ids are not known.
        known: of these, the first ones whose hashes are known.
        met: of these, about how many belong to text that was met before.
    """

    tokens: int
    known: int
    met: int
    hashes: HashesByScheme
    ids: Ids

    @property
    def exact(self) -> bool:
        """All its hashes are known."""
        return self.ids in (Ids.GIVEN, Ids.KNOWN)


class HashFinder:
    """Finds them. A prompt's rest is what follows the text that was met before."""

    def __init__(self, texts: TextMemory, token_ids: TokenIds, load: Load) -> None:
        self._texts = texts
        self._token_ids = token_ids
        self._load = load
        self._cached_rest = {True: 0.0, False: 1.0}
        """The share of prompts' rests that some place had cached: for prompts that had met text, and for others."""

    async def known_hashes(self, sub_request: SubRequest, schemes: Sequence[SchemeIndex]) -> PromptHashes:
        """The hashes that are known without asking a node."""
        ids = given_ids(sub_request)
        if ids is not None:
            return await _hashed(ids, schemes, _extras(sub_request.body), Ids.GIVEN)
        known = self._texts.known_prefix(sub_request)
        hashes = {} if known.rendering is None else _first(known.rendering.hashes, schemes, known.tokens)
        if known.whole and hashes:
            return PromptHashes(known.prompt, known.prompt, known.prompt, hashes, Ids.KNOWN)
        can_ask = tokenize_body(sub_request) is not None
        tokens = known.tokens if hashes else 0
        return PromptHashes(known.prompt, tokens, known.met, hashes, Ids.WANTED if can_ask else Ids.NONE)

    def pays(self, prompt: PromptHashes) -> bool:
        """Whether a plan should wait for the ids: text that was met is cached somewhere, the rest perhaps."""
        if prompt.ids is not Ids.WANTED:
            return False
        unknown = max(0, prompt.met - prompt.known)
        cached = unknown + self._cached_rest[prompt.met > 0] * max(0, prompt.tokens - prompt.met)
        return self._token_ids.pays(cached * self._load.pace(Work.PREFILL).per_token)

    async def ask_node(
        self, sub_request: SubRequest, schemes: Sequence[SchemeIndex], node: Node, waits: Waiting
    ) -> PromptHashes | None:
        """All of it, from a node; None where that does not tell it in time. It is remembered for later prompts."""
        question, extras = tokenize_body(sub_request), _extras(sub_request.body)
        ids = None if question is None else await self._token_ids.fetch(question, node, waits)
        if ids is None:
            return None
        prompt = await _hashed(ids, schemes, extras, Ids.KNOWN)
        self._texts.tokenized(sub_request, prompt.tokens, prompt.hashes)
        return prompt

    def was_cached(self, before: PromptHashes, tokens: int, missed: int) -> None:
        """Some place had so many tokens of such a long prompt cached beyond what was known before."""
        rest, kept = max(1, tokens - before.known), KEPT_OF_SHARE
        share = min(1.0, missed / rest)
        self._cached_rest[before.met > 0] = self._cached_rest[before.met > 0] * kept + share * (1 - kept)


async def _hashed(ids: Sequence[int], schemes: Sequence[SchemeIndex], extras: PromptExtras, known: Ids) -> PromptHashes:
    hashes: dict[HashScheme, Sequence[int]] = {}
    for scheme in schemes if len(ids) <= MOST_TOKENS else ():
        made = await _hashes(scheme, ids, extras)
        if made is not None:
            hashes[scheme.index.scheme] = array("Q", made)
    return PromptHashes(len(ids), len(ids), len(ids), hashes, known)


async def _hashes(scheme: SchemeIndex, ids: Sequence[int], extras: PromptExtras) -> Sequence[int] | None:
    if len(ids) < LONG_PROMPT:
        return scheme.hasher.hashes(ids, extras)
    return await asyncio.to_thread(scheme.hasher.hashes, ids, extras)


def _first(hashes: HashesByScheme, schemes: Sequence[SchemeIndex], tokens: int) -> HashesByScheme:
    """Those of the first tokens."""
    wanted = (each.index.scheme for each in schemes)
    return {scheme: hashes[scheme][: tokens // scheme.unit] for scheme in wanted if scheme in hashes}


def _extras(body: Json) -> PromptExtras:
    salt = value_of(body.get("cache_salt"))
    return PromptExtras(salt=salt) if isinstance(salt, str) and salt else PLAIN
