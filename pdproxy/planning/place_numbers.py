"""Numbers of places, so that a set of places is one integer with a bit for each: a mask. Pure."""

from collections.abc import Sequence
from itertools import compress

from pdproxy.nodes.node import MOST_SETS, Node, PlaceSet, PoolState
from pdproxy.planning.prefix import Place


class PlaceNumbers:
    """The places that an index knows, each with a number of its own."""

    def __init__(self) -> None:
        self._bits: dict[Place, int] = {}
        self._places: list[Place | None] = []
        """By their numbers; None where a number is free."""
        self._sets: dict[int, PlaceSet] = {}
        self._kinds: tuple[PoolState, Sequence[tuple[Node, int]]] | None = None
        """As of this state of the pool."""

    def get(self, place: Place) -> int:
        """The bit of a place; 0 for one without a number."""
        return self._bits.get(place, 0)

    def add(self, place: Place) -> int:
        """The bit of a place that has none yet: that of the lowest number which is free."""
        if None not in self._places:
            self._places.append(None)
        at = self._places.index(None)
        self._places[at] = place
        self._bits[place] = bit = 1 << at
        self._changed()
        return bit

    def drop(self, place: Place) -> None:
        """The place's number is free; ignored where it has none."""
        bit = self._bits.pop(place, 0)
        if bit:
            self._places[bit.bit_length() - 1] = None
            self._changed()

    @property
    def all(self) -> int:
        """The mask of all numbers, including free ones."""
        return (1 << len(self._places)) - 1

    def places(self, mask: int) -> PlaceSet:
        """The places of a mask; for the same mask the same object, while it is remembered."""
        found = self._sets.get(mask)
        if found is None:
            if len(self._sets) >= MOST_SETS:
                self._sets.clear()
            chosen = compress(self._places, map("1".__eq__, reversed(f"{mask:b}")))
            found = self._sets[mask] = PlaceSet([place for place in chosen if place is not None])
        return found

    def kinds(self, state: PoolState) -> Sequence[tuple[Node, int]]:
        """A node of each `Node.match_rule`, and the mask of all places whose nodes have it."""
        if self._kinds is None or self._kinds[0] is not state:
            masks = [0] * len(state.rules)
            for place, bit in self._bits.items():
                rule = state.rule_of.get(place.node)
                if rule is not None:
                    masks[rule] |= bit
            self._kinds = state, list(zip(state.rules, masks, strict=True))
        return self._kinds[1]

    def _changed(self) -> None:
        self._sets.clear()
        self._kinds = None
