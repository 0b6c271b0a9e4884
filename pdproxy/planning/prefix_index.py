"""The index of what every place has cached, from the places' own events: how much a place need not compute. Pure.

The rules are those by which vLLM's scheduler looks a prompt up (`vllm/v1/core/kv_cache_coordinator.py`, 0.32), which
`tests/vllm_compat/test_prefix_index.py` compares with vLLM itself:

- At least the prompt's last token is computed: a hit has at most tokens - 1.
- Attention: whole blocks from the first on, as far as each attention group has them; then, where hashes are finer than
  a block (`--prefix-match-unit`), the farthest unit inside of the next block that is there.
- State: a hit ends where each state group has a state; the deepest such boundary within the attention hit counts.
- EAGLE and MTP: attention looks one unit farther, if the place has state groups, and then gives one up.
- A place with a state deeper than its attention reaches gives a request with a ticket only what all groups share
  (`get_computed_blocks_for_connector`): its attention counts no farther than that.

Whether a place has state groups is told by its scheme; else by events, and then one place speaks for all of its scheme:
a decode node publishes no state group's events while it only reads what others computed.

Sliding windows are asked for whole (`cache_events.group_kind`). A node that reports its cache hits again as if they
were new blocks (`kv_cache_report_mode: full` in a request's `vllm_xargs`, which the proxy takes out of clients'
bodies) is believed to hold more than it does.
"""

import dataclasses
import heapq
import operator
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, repeat
from typing import NamedTuple

from pdproxy.planning.block_hashes import HashScheme
from pdproxy.planning.block_holders import BlockHolders
from pdproxy.planning.cache_events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent, GroupKind
from pdproxy.planning.place_numbers import PlaceNumbers
from pdproxy.planning.prefix import Hit, Place

MOST_BLOCKS = 1 << 19
"""Blocks of one place and kind, 45 MB. More than any node has: whoever publishes more is not believed."""
_MOST_GROUPS = 256
"""Cache groups of one place."""


@dataclasses.dataclass(slots=True, eq=False)
class _Record:
    """A place's bit, the groups that it has shown, whether all that it holds is known, the blocks that it stored."""

    bit: int
    kinds: dict[int, GroupKind] = dataclasses.field(default_factory=dict)
    known: bool = False
    stored: int = 0


class _Expectation(NamedTuple):
    """An expectation to take back when its time is up; `number` keeps the rest from being compared."""

    until: float
    number: int
    place: Place
    record: _Record
    hashes: Mapping[GroupKind, tuple[int, ...]]


class PrefixIndex:
    """All places that hash by one scheme.

    Attributes:
        numbers: the numbers of the places of which anything is known.
    """

    def __init__(self, scheme: HashScheme, most_blocks: int = MOST_BLOCKS) -> None:
        self.scheme = scheme
        self._most_blocks = most_blocks
        self._scale = scheme.block_size // scheme.unit
        self._drop = scheme.unit if scheme.drops_unit else 0
        self._held = {kind: BlockHolders() for kind in GroupKind}
        self._expected = {kind: BlockHolders() for kind in GroupKind}
        self._expectations: list[_Expectation] = []
        self._numbers = count()
        self._records: dict[Place, _Record] = {}
        self.numbers = PlaceNumbers()
        self._attentive = 0
        self._states = scheme.states

    def __len__(self) -> int:
        """Different hashes, each counted once for each kind of group that has it anywhere."""
        return sum(len(held.masks) for held in self._held.values())

    def apply(self, place: Place, event: CacheEvent) -> None:
        """Take in what a place published. Events of one place come in its order, without gaps; at a gap: `forget`."""
        match event:
            case BlocksStored():
                self._store(place, event)
            case BlocksRemoved():
                self._remove(place, event)
            case CacheCleared():
                self.drop_place(place)
                self._record(place).known = True

    def drop_place(self, place: Place) -> None:
        """The place is gone, or events of it were lost: nothing is known of it, nor expected."""
        record = self._records.pop(place, None)
        if record is None:
            return
        for holders in (*self._held.values(), *self._expected.values()):
            holders.drop_holder(record.bit)
        self._attentive &= ~record.bit
        self.numbers.drop(place)

    def knows_all_of(self, place: Place) -> bool:
        """Whether all that the place holds is known, so that what is not here is not there.

        True from its first `CacheCleared` on; whoever sees a place's very first event applies one before it.
        """
        record = self._records.get(place)
        return record is not None and record.known

    def blocks(self, place: Place, kind: GroupKind) -> int:
        """How many the place holds, about."""
        record = self._records.get(place)
        return self._held[kind].blocks(record.bit) if record else 0

    def stored(self, place: Place) -> int:
        """How many blocks of all groups it has stored since it is known; 0 for a place that is not."""
        record = self._records.get(place)
        return record.stored if record else 0

    def expect(self, place: Place, hashes: Sequence[int], hit: Hit, until: float) -> None:
        """A prompt with these hashes was sent there: until that time the place counts as having so much of it.

        That is said of what it has not yet, and until its own events say that it has: what it then removes is gone,
        and so is what it had and removes before it computes the prompt.

        `hit`: see `after_prefill`; with `resume` 0 for a place that will keep no state.
        """
        record, unit = self._record(place), self.scheme.unit
        ends = {
            *range(self._scale, hit.attention // unit + 1, self._scale),
            hit.attention // unit,
            hit.resume // unit,
        } - {0}
        expected = {
            GroupKind.ATTENTION: tuple(hashes[end - 1] for end in ends),
            GroupKind.STATE: tuple(hashes[end - 1] for end in ends & {hit.resume // unit}),
        }
        for kind, each in expected.items():
            held = self._held[kind].masks
            expected[kind] = each = tuple(block for block in each if not held.get(block, 0) & record.bit)
            self._expected[kind].join(record.bit, 0)
            self._expected[kind].add(record.bit, 0, each)
        heapq.heappush(self._expectations, _Expectation(until, next(self._numbers), place, record, expected))

    def after_prefill(self, tokens: int) -> Hit:
        """The tokens that a place will have of a prompt of so many that it computes, for prompts that begin with it.

        vLLM keeps every whole block and, with a unit finer than a block, the last unit before the prompt's end; and one
        state, at the last boundary before the end, a unit earlier with EAGLE and MTP. It keeps more states with
        `--prefix-cache-retention-interval`, and where it found out that prompts share a prefix.
        """
        unit, block = self.scheme.unit, self.scheme.block_size
        last = (tokens if self._drop else tokens - 1) // unit * unit
        return Hit(attention=max(tokens // block * block, last), resume=max(last - self._drop, 0))

    def hits(self, hashes: Sequence[int], tokens: int, now: float) -> list[tuple[Hit, int]]:
        """The hits of places for a prompt of `tokens` tokens, each with the mask of the places that have it; places
        that have nothing of the prompt are left out.

        `hashes`: by `PromptHasher` of this index's scheme. `now`: on the clock of the times given to `expect`.
        """
        self._expire(now)
        hits = list[tuple[Hit, int]]()
        boundaries: list[tuple[int, int]] | None = None
        plain = self._plain()
        longest = (tokens - 1) // self.scheme.unit * self.scheme.unit
        for end, mask in self._attention_ends(hashes, tokens):
            attention = min(end, longest) - self._drop
            if attention > 0 and mask & plain:
                hits.append((Hit(attention, attention), mask & plain))
            if end > self._drop and mask & ~plain:
                boundaries = self._boundaries(hashes, tokens) if boundaries is None else boundaries
                hits += _resumable(end - self._drop, mask & ~plain, boundaries)
        return hits

    def _store(self, place: Place, event: BlocksStored) -> None:
        record, holders = self._record(place), self._held[event.kind]
        if record.kinds.get(event.group) is not event.kind:
            if event.group in record.kinds:  # another engine than before, without a word of it
                self.drop_place(place)
                record = self._record(place)
            self._join(record, event.group, event.kind)
        holders.add(record.bit, event.group, event.hashes)
        record.stored += len(event.hashes)
        expected = self._expected[event.kind]
        if expected.masks:
            met = [block for block in event.hashes if block in expected.masks]
            expected.drop(record.bit, [block for block in met if holders.masks.get(block, 0) & record.bit])
        if holders.blocks(record.bit) > self._most_blocks or len(record.kinds) > _MOST_GROUPS:
            self.drop_place(place)

    def _remove(self, place: Place, event: BlocksRemoved) -> None:
        record = self._records.get(place)
        if record is None:
            return
        for group, kind in record.kinds.items():
            if event.group in (group, None):
                self._held[kind].remove(record.bit, group, event.hashes)

    def _record(self, place: Place) -> _Record:
        """The record of a place; made where there is none."""
        record = self._records.get(place)
        if record is None:
            record = self._records[place] = _Record(self.numbers.add(place))
        return record

    def _join(self, record: _Record, group: int, kind: GroupKind) -> None:
        record.kinds[group] = kind
        self._held[kind].join(record.bit, group)
        if kind is GroupKind.ATTENTION:
            self._attentive |= record.bit
        else:
            self._states = True

    def _plain(self) -> int:
        """Places whose models have attention alone."""
        if self._states is None:
            return self._attentive
        return 0 if self._states else -1

    def _expire(self, now: float) -> None:
        while self._expectations and self._expectations[0].until <= now:
            done = heapq.heappop(self._expectations)
            if self._records.get(done.place) is done.record:
                for kind, hashes in done.hashes.items():
                    self._expected[kind].remove(done.record.bit, 0, hashes)

    def _holders(self, kind: GroupKind, hashes: Sequence[int]) -> Iterator[int]:
        """For each hash the places that have it, as a mask."""
        held = map(self._held[kind].masks.get, hashes, repeat(0))
        expected = self._expected[kind].masks
        return map(operator.or_, held, map(expected.get, hashes, repeat(0))) if expected else held

    def _attention_ends(self, hashes: Sequence[int], tokens: int) -> Iterator[tuple[int, int]]:
        """How many tokens of attention places have before a unit is dropped, and which places have so many."""
        longest = min((tokens - 1 + self._drop) // self.scheme.unit, len(hashes))
        blocks = hashes[self._scale - 1 : longest : self._scale]
        left = self.numbers.all
        for block, holders in enumerate(self._holders(GroupKind.ATTENTION, blocks)):
            ended = left & ~holders
            if ended:
                yield from self._inside_block(hashes[:longest], block * self._scale, ended)
                left &= holders
                if not left:
                    return
        yield from self._inside_block(hashes[:longest], len(blocks) * self._scale, left)

    def _inside_block(self, hashes: Sequence[int], start: int, mask: int) -> Iterator[tuple[int, int]]:
        """The same for places that have no whole block after the first `start` units, but may have units of it."""
        units = hashes[start : start + self._scale - 1]
        for at, holders in reversed([*enumerate(self._holders(GroupKind.ATTENTION, units), start + 1)]):
            if mask & holders:
                yield at * self.scheme.unit, mask & holders
                mask &= ~holders
        if start:
            yield start * self.scheme.unit, mask

    def _boundaries(self, hashes: Sequence[int], tokens: int) -> list[tuple[int, int]]:
        """Boundaries before the prompt's last token at which places have a state, and which; the deepest first."""
        unit = self.scheme.unit
        masks = self._holders(GroupKind.STATE, hashes[: (tokens - 1) // unit])
        return [(at * unit, mask) for at, mask in enumerate(masks, 1) if mask][::-1]


def _resumable(attention: int, mask: int, boundaries: list[tuple[int, int]]) -> Iterator[tuple[Hit, int]]:
    """The hits of places with so much attention, and the places of each; those that have nothing are left out."""
    deeper = 0
    for at, holders in boundaries:
        if at > attention:
            deeper |= holders
            continue
        if mask & holders & deeper:
            yield Hit(at, at), mask & holders & deeper
        if mask & holders & ~deeper:
            yield Hit(attention, at), mask & holders & ~deeper
        mask &= ~holders
    if mask & ~deeper:
        yield Hit(attention, 0), mask & ~deeper
