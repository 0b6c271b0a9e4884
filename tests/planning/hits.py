"""Hits by place, as tests say them, and as plans and indices have them."""

from collections.abc import Iterable, Mapping

from pdproxy.nodes.node import PlaceSet
from pdproxy.planning.place_numbers import PlaceNumbers
from pdproxy.planning.prefix import Hit, HitPlaces, HitSource, Place, PromptHits


def hit_places(hits: Mapping[Place, Hit]) -> HitPlaces:
    """For a `PromptHits`."""
    return [
        (hit, PlaceSet([place for place, its in hits.items() if its == hit])) for hit in dict.fromkeys(hits.values())
    ]


def by_place(found: Iterable[tuple[Hit, int]], numbers: PlaceNumbers) -> dict[Place, Hit]:
    """The hit of each place, from an index's."""
    hits = [(hit, numbers.places(mask)) for hit, mask in found]
    named = PromptHits(0, HitSource.EVENTS, hits).by_place()
    assert len(named) == sum(len(places.places) for _, places in hits), "a place is there twice"
    return named
