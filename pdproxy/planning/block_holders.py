"""Which places hold which blocks, in every cache group of one kind. Pure.

For each hash one integer with a bit for each place that holds it in all of its groups of the kind: a look-up then
reads one dictionary for all places and groups. Where a place has another number of copies than one in each group
(vLLM's cache does not merge equal blocks, and groups are filled and evicted one after the other), the numbers stand
beside it.
"""

from array import array
from collections.abc import Iterable

_SLACK = 1024
"""Hashes that the list of a place's blocks may have beyond twice those that it still holds."""


class _PlaceBlocks:
    """One place's part.

    Attributes:
        groups: the place of each group in the lists of copies.
        odd: copies in each group, of blocks that have not exactly one in all.
        log: every marked block, for the day when the place is forgotten; and some that were, and are no more.
        whole: marked blocks.
    """

    def __init__(self) -> None:
        self.groups: dict[int, int] = {}
        self.odd: dict[int, list[int]] = {}
        self.log = array("Q")
        self.whole = 0


class BlockHolders:
    """Places are bits: integers with one bit set, each place's own.

    Attributes:
        masks: by hash, the places that hold it in each of their groups. Changed by the methods alone.
    """

    def __init__(self) -> None:
        self.masks: dict[int, int] = {}
        self._places: dict[int, _PlaceBlocks] = {}

    def blocks(self, bit: int) -> int:
        """Different hashes that the place holds in any group; those of which it has several copies count twice."""
        place = self._places.get(bit)
        return place.whole + len(place.odd) if place else 0

    def join(self, bit: int, group: int) -> None:
        """The place has this group. What it holds in other groups is not in this one."""
        place = self._places.setdefault(bit, _PlaceBlocks())
        if group in place.groups:
            return
        for counts in place.odd.values():
            counts.append(0)
        ones = [1] * len(place.groups)
        for block in set(place.log):
            if ones and block not in place.odd and self.masks.get(block, 0) & bit:
                place.odd[block] = [*ones, 0]
            self._unmark(place, bit, block)
        place.groups[group] = len(ones)

    def add(self, bit: int, group: int, hashes: Iterable[int]) -> None:
        """One more copy of each in this group of the place; `join` was called for the group."""
        place = self._places[bit]
        masks, at, alone = self.masks, place.groups[group], len(place.groups) == 1
        for block in hashes:
            if alone and block not in place.odd and not masks.get(block, 0) & bit:
                self._mark(place, bit, block)
            else:
                self._change(place, bit, block, at, 1)

    def remove(self, bit: int, group: int, hashes: Iterable[int]) -> None:
        """One copy less of each that the group of the place holds; the place may not have been known from its start."""
        place = self._places.get(bit)
        if place is None or group not in place.groups:
            return
        at, alone = place.groups[group], len(place.groups) == 1
        for block in hashes:
            if alone and block not in place.odd and self.masks.get(block, 0) & bit:
                self._unmark(place, bit, block)
            else:
                self._change(place, bit, block, at, -1)

    def drop(self, bit: int, hashes: Iterable[int]) -> None:
        """All copies of those of these that the place holds."""
        place = self._places.get(bit)
        if place is None:
            return
        for block in hashes:
            if self.masks.get(block, 0) & bit:
                place.odd.pop(block, None)
                self._unmark(place, bit, block)

    def drop_holder(self, bit: int) -> None:
        """The place holds nothing, and its groups are unknown."""
        place = self._places.pop(bit, None)
        if place:
            for block in place.log:
                self._unmark(place, bit, block)

    def _change(self, place: _PlaceBlocks, bit: int, block: int, at: int, by: int) -> None:
        """Nothing changes where that would leave less than no copy."""
        marked = bool(self.masks.get(block, 0) & bit)
        counts = place.odd.get(block) or [int(marked)] * len(place.groups)
        if counts[at] + by < 0:
            return
        counts[at] += by
        if min(counts) > 0 and not marked:
            self._mark(place, bit, block)
        elif min(counts) == 0 and marked:
            self._unmark(place, bit, block)
        if max(counts) == min(counts) <= 1:
            place.odd.pop(block, None)
        else:
            place.odd[block] = counts

    def _mark(self, place: _PlaceBlocks, bit: int, block: int) -> None:
        mask = self.masks.get(block, 0)
        self.masks[block] = mask | bit if mask else bit  # most blocks are at one place: those share one object
        place.log.append(block)
        place.whole += 1
        if len(place.log) > 2 * place.whole + _SLACK:
            place.log = array("Q", {each for each in place.log if self.masks.get(each, 0) & bit})

    def _unmark(self, place: _PlaceBlocks, bit: int, block: int) -> None:
        mask = self.masks.get(block, 0)
        if mask == bit:
            del self.masks[block]
        elif mask & bit:
            self.masks[block] = mask ^ bit
        place.whole -= bool(mask & bit)
