"""The values that say what places have cached of one prompt. Plans are made from them. Pure."""

import enum
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import msgspec

from pdproxy.nodes.node import PlaceSet


class Place(NamedTuple):
    """One data-parallel rank of a node: it has caches of its own."""

    node: str
    rank: int = 0


def place_of(node: str, rank: int | None) -> Place:
    """The place of a rank, or of a node's only one."""
    return Place(node, rank or 0)


class Hit(msgspec.Struct, frozen=True, gc=False):
    """How many of a prompt's first tokens a place has cached; 0 <= resume <= attention < the prompt's tokens.

    Attributes:
        attention: A(n): the longest prefix of which every attention block is there. Enough for a place that gets a
            ticket, for the mamba state arrives with that; vLLM then uses whole blocks of it. Where a state lies deeper
            than that prefix, vLLM uses none of it beyond `resume`, and so this is no more.
        resume: R(n): the longest prefix from which the place can go on by itself: every attention block is there, and
            at its end the state of each state group.
    """

    attention: int
    resume: int


NO_HIT = Hit(0, 0)
"""Nothing is cached."""


HitPlaces: TypeAlias = Sequence[tuple[Hit, PlaceSet]]
"""Hits, each with the places that have it: many have the same, of a system prompt. No place is in two sets."""


class HitSource(enum.StrEnum):
    """Where the knowledge comes from."""

    EVENTS = "events"
    """The nodes' own KV events."""
    APPROXIMATION = "approximation"
    """The hits are guessed from what this proxy sent: nodes may have evicted it, and others may have sent more."""


class PromptHits(msgspec.Struct, frozen=True):
    """The places that have some of one prompt cached, and how much.

    Attributes:
        tokens: in the prompt; an estimate where its token ids are not known.
        hits: places that have none of it are left out.
        stays: seconds for which a block that nobody uses stays in a place's cache; places where that is long, or of
            which nothing is known, are left out.
    """

    tokens: int
    source: HitSource
    hits: HitPlaces
    stays: Mapping[Place, float] = MappingProxyType({})

    def by_place(self) -> dict[Place, Hit]:
        """The hit of each place."""
        return {Place(*place): hit for hit, places in self.hits for place in places.places}
