"""An estimate of what places have cached, by what was sent to them: for nodes without KV events. Pure: times are given.

A prompt is a chain of marks (`text_chain`). A place that was sent a prompt is taken to have the attention blocks up to
each of its marks. It has states, as vLLM 0.32 keeps them, where a prompt ended, and where a prompt parts from what the
place met before, from the second one on. A completion's prompt, text or ids, has no mark where one that it goes on from
ended: `TextIndex.refined` puts one there.

It is an approximation. Nodes evict, restart, and are sent prompts by others; tokens are estimated from bytes. What
nodes say they had cached corrects it. Two texts of equal hash would only send a prompt to a node that has nothing.

For nodes that publish KV events it remembers the block hashes of prompts that were tokenized: of a prompt that goes on
from such a one they are known without its token ids. Where two of them part, comparing their hashes tells how many
tokens lie before; elsewhere within a prompt that is estimated, with less rather than more.
"""

import bisect
import collections
import enum
import itertools
import math
import operator
from array import array
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from pdproxy.planning.place_numbers import PlaceNumbers
from pdproxy.planning.prefix import Hit, Place
from pdproxy.planning.renderings import KnownPrefix, Rendering, Renderings
from pdproxy.planning.text_chain import Chain

MOST_MARKS = 100_000
"""Kept of all prompts; those that were not met for longest are forgotten first. About 50 MB."""
LIFE = 900.0
"""Seconds after which a place that met a mark is taken to have evicted it."""
BYTES_PER_TOKEN = 4.0
"""Before a model has answered."""
MOST_TAILS = 4
"""Lengths that are remembered of the pieces with which prompts ended after one mark; the last ones."""
SURE = 0.9
"""The share of the tokens that a text within a prompt is estimated to have, which it surely has."""
MOST_ENDING = 64
"""Tokens at a prompt's end that may not be there any more in a prompt that goes on from it, as of a template that asks
for an answer in other words than it shows one. What differs by more was not rendered as before."""
_TAILS = operator.attrgetter("tails")
_KEPT = 0.98
"""Weight that each further answer leaves of an answer in the number of bytes to a token."""


class KeptStates(enum.Enum):
    """The states that a place keeps of a prompt that it is sent."""

    ALL = enum.auto()
    """The place computes the prompt: it keeps a state at its end, and one where it parts from earlier prompts."""
    END = enum.auto()
    """The place takes the prompt over, with a state that can be resumed from."""
    NONE = enum.auto()
    """The place takes the prompt over, and keeps no state."""


class _Places(msgspec.Struct, gc=False):
    """Places that have something, each with when it last got or used that; monotonic seconds.

    ``times``: by the place's bit. ``mask``: of these places. ``earliest``: no time is before it.
    """

    times: dict[int, float] = {}
    mask: int = 0
    earliest: float = -math.inf

    def since(self, oldest: float) -> int:
        """The mask of the places whose time is not before this; the other places are forgotten."""
        if self.earliest < oldest:
            self.times = times = {bit: time for bit, time in self.times.items() if time >= oldest}
            self.mask, self.earliest = sum(times), min(times.values(), default=-math.inf)
        return self.mask


class _Mark(msgspec.Struct):
    """Where a mark was met.

    ``tokens``: up to here, where a node counted them; 0 for unknown. ``tails``: lengths of the last pieces of prompts
    that ended before a next mark. ``rendered``: the last mark of the prompt through here that was tokenized last; None
    for none. ``shared``: tokens that those have in common which part here; None where none was compared.
    """

    met: _Places = msgspec.field(default_factory=_Places)
    states: _Places | None = None
    tokens: int = 0
    tails: tuple[int, ...] = ()
    rendered: int | None = None
    shared: int | None = None

    def keep_state(self, bit: int, now: float) -> None:
        """The place with this bit has a state here."""
        if self.states is None:
            self.states = _Places()
        self.states.times[bit] = now
        self.states.mask |= bit


class _Marks(collections.OrderedDict[int, _Mark]):
    """The mark of each hash, made where it is first asked for; the one that was not met for longest is first."""

    def __missing__(self, value: int) -> _Mark:
        self[value] = made = _Mark()
        return made


class TextIndex:
    """The marks of all prompts that were sent somewhere, or tokenized.

    Attributes:
        numbers: the numbers of the places that were sent prompts lately.
    """

    def __init__(self, most_marks: int = MOST_MARKS, life: float = LIFE, renderings: Renderings | None = None) -> None:
        self._most_marks = most_marks
        self._renderings = Renderings() if renderings is None else renderings
        self._endings = collections.defaultdict[str, int](int)
        """Tokens at the end of each model's prompts that were seen to be missing in those that go on from them."""
        self._life = life
        self.numbers = PlaceNumbers()
        self._sent: dict[Place, float] = {}
        """When each of these places was last sent a prompt."""
        self._marks = _Marks()
        self._sizes = collections.defaultdict[str, list[float]](lambda: [BYTES_PER_TOKEN, 1.0])
        """Bytes and tokens of the prompts of each model, later ones with more weight."""

    def __len__(self) -> int:
        return len(self._marks)

    def tokens(self, chain: Chain, end: int | None = None) -> int:
        """About how many tokens the whole prompt has, or its first ``end`` marks."""
        ends, hashes, find = chain.ends, chain.hashes, self._marks.get
        end = len(ends) if end is None else end
        if not end or chain.in_tokens:
            return ends[end - 1] if end else 0
        for known in range(end, 0, -1):
            mark = find(hashes[known - 1])
            if mark is not None and mark.tokens:
                if known == end:
                    return mark.tokens
                return mark.tokens + math.ceil((ends[end - 1] - ends[known - 1]) / self._bytes_per_token(chain.model))
        return math.ceil(ends[end - 1] / self._bytes_per_token(chain.model))

    def refined(self, chain: Chain) -> Chain:
        """With marks where prompts ended that this one goes on from, after the last of its marks behind which any did.

        Others may have gone on from there before: what this prompt shares with them goes beyond that end.
        """
        most, marks = min(self._known(chain), len(chain.hashes) - 1), self._marks
        tails = map(_TAILS, map(marks.__getitem__, reversed(chain.hashes[:most])))
        for at in itertools.compress(range(most, 0, -1), tails):
            if found := self._ends_after(chain, at):
                hashes = array("q", (*chain.hashes[:at], *(value for _, value in found), *chain.hashes[at:]))
                ends = array("q", (*chain.ends[:at], *(end for end, _ in found), *chain.ends[at:]))
                return msgspec.structs.replace(chain, hashes=hashes, ends=ends, pieces=())
        return msgspec.structs.replace(chain, pieces=())

    def _ends_after(self, chain: Chain, at: int) -> list[tuple[int, int]]:
        """Where prompts ended within the piece after its ``at``-th mark: the ends and their hashes."""
        before, end, piece = chain.hashes[at - 1], chain.ends[at - 1], chain.pieces[at]
        tails = sorted(length for length in self._marks[before].tails if length < len(piece))
        found = ((end + length, hash((before, piece[:length]))) for length in tails)
        return [(end, value) for end, value in found if value in self._marks]

    def hits(self, chain: Chain, now: float) -> list[tuple[Hit, int]]:
        """How many tokens of the prompt places may have cached, not yet cut to blocks, and the mask of these places."""
        known, oldest = self._known(chain), now - self._life
        if not known:
            return []
        path = list(map(self._marks.__getitem__, chain.hashes[:known]))
        states, found = _states(path, oldest), list[tuple[Hit, int]]()
        left, end = path[0].met.since(oldest), known  # who met any mark met the first
        while left:
            here = path[end - 1].met.since(oldest) & left
            if here:
                left ^= here
                found += self._by_state(path, chain, end, states, here)
            end -= 1
        return found

    def _by_state(
        self, path: Sequence[_Mark], chain: Chain, end: int, states: Sequence[tuple[int, int]], left: int
    ) -> Iterator[tuple[Hit, int]]:
        """The hits of places whose last mark is the ``end``-th, by the last mark at which they have a state."""
        attention = self._until(path, chain, end)
        for state, mask in states:
            if here := mask & left:
                left ^= here
                yield Hit(attention, self._until(path, chain, state)), here
        if left:
            yield Hit(attention, 0), left

    def _until(self, path: Sequence[_Mark], chain: Chain, end: int) -> int:
        """Tokens up to the mark that is the ``end``-th; 0 before the first."""
        return (path[end - 1].tokens or self.tokens(chain, end)) if end else 0

    def sent(self, chain: Chain, places: Mapping[Place, KeptStates], now: float) -> None:
        """The prompt goes to these places."""
        hashes, marks = chain.hashes, self._marks
        if not hashes:
            return
        keeping = {self._bit(place, now): keeps for place, keeps in places.items()}
        last = marks.get(hashes[-1])
        had = 0 if last is None else last.met.since(now - self._life)
        for bit, keeps in keeping.items():
            if keeps is KeptStates.ALL and not had & bit:
                self._branch(chain, bit, now)
        met, mask, touched = dict.fromkeys(keeping, now), sum(keeping), self._touched(chain)
        for mark in touched:
            mark.met.times.update(met)
            mark.met.mask |= mask
        for bit, keeps in keeping.items():
            if keeps is not KeptStates.NONE:
                touched[0].keep_state(bit, now)
        if len(marks) > self._most_marks:
            self._drop_oldest()

    def _bit(self, place: Place, now: float) -> int:
        """The bit of a place that is sent a prompt now. A new place may get the number of one that was sent none for so
        long that it counts as having nothing."""
        self._sent[place] = now
        bit = self.numbers.get(place)
        if bit:
            return bit
        for each in [each for each, last in self._sent.items() if last < now - self._life]:
            del self._sent[each]
            self.numbers.drop(each)
        return self.numbers.add(place)

    def _branch(self, chain: Chain, bit: int, now: float) -> None:
        """The place has a state from now on where the prompt parts from what it met before."""
        for end in range(self._known(chain), 0, -1):
            mark = self._marks[chain.hashes[end - 1]]
            if mark.met.since(now - self._life) & bit:
                mark.keep_state(bit, now)
                return

    def counted(self, chain: Chain, tokens: int) -> None:
        """A node counted the tokens of the whole prompt."""
        if not chain.ends or chain.in_tokens:
            return
        mark = self._marks.get(chain.hashes[-1])
        if mark is not None:
            mark.tokens = tokens
        sums = self._sizes[chain.model]
        sums[:] = sums[0] * _KEPT + chain.ends[-1], sums[1] * _KEPT + tokens

    def known_prefix(self, chain: Chain) -> KnownPrefix:
        """The part of a prompt that the hashes of tokenized prompts tell."""
        last = self._known(chain)
        prompt, met = self.tokens(chain), self.tokens(chain, last)
        end, rendering = self._last_rendered(chain)
        if rendering is None:
            return KnownPrefix(prompt, met)
        if end == len(chain.hashes) and self._ends_here(chain, end, rendering):
            return KnownPrefix(rendering.tokens, rendering.tokens, rendering.tokens, rendering)
        tokens, counted = self._counted_shared(chain, end, rendering), self.tokens(chain, end)
        if tokens is None:
            tokens = self._estimated_shared(chain, end, rendering)
        else:
            met += tokens - counted
        return KnownPrefix(max(prompt, tokens + 1), max(met, tokens), tokens, rendering)

    def tokenized(self, chain: Chain, rendering: Rendering) -> None:
        """A node tokenized the whole prompt."""
        end, before = self._last_rendered(chain)
        if before is not None:
            self._compare(chain, end, before, rendering)
        touched = self._touched(chain)
        for at, mark in zip(range(len(touched), 0, -1), touched, strict=True):
            mark.rendered = chain.hashes[-1]
            mark.shared = None if at > end else mark.shared
        self._renderings.keep(chain.hashes[-1], rendering)
        self.counted(chain, rendering.tokens)
        self._drop_oldest()

    def cached_less(self, chain: Chain, place: Place) -> None:
        """The place had less than its states promised: they are gone, but for the one at the end of this prompt."""
        bit = self.numbers.get(place)
        for value in chain.hashes[:-1]:
            mark = self._marks.get(value)
            if mark is not None and mark.states is not None and mark.states.times.pop(bit, None) is not None:
                mark.states.mask ^= bit

    def cached_more(self, chain: Chain, place: Place, cached: int, now: float) -> None:
        """The place resumed after so many tokens: there is a state, unknown until now, at the last mark before."""
        ends = range(1, len(chain.hashes) + 1)
        end = bisect.bisect_right(ends, cached, key=lambda each: self.tokens(chain, each))
        mark = self._marks.get(chain.hashes[end - 1]) if end else None
        if mark is not None:
            mark.keep_state(self._bit(place, now), now)

    def _last_rendered(self, chain: Chain) -> tuple[int, Rendering | None]:
        """The last of its marks that a prompt went through whose rendering is kept, and that rendering."""
        for end in range(self._known(chain), 0, -1):
            rendered = self._marks[chain.hashes[end - 1]].rendered
            rendering = None if rendered is None else self._renderings.get(rendered)
            if rendering is not None:
                return end, rendering
        return 0, None

    def _ends_here(self, chain: Chain, end: int, rendering: Rendering) -> bool:
        """Whether the prompt of a mark's rendering ends at that mark."""
        value = chain.hashes[end - 1]
        return self._marks[value].rendered == value and rendering.text == chain.ends[end - 1]

    def _counted_shared(self, chain: Chain, end: int, rendering: Rendering) -> int | None:
        """How many tokens of a mark's rendering a prompt has that parts from it there; None where none did yet."""
        shared = self._marks[chain.hashes[end - 1]].shared
        if shared is None and self._ends_here(chain, end, rendering):
            return max(0, rendering.tokens - self._endings[chain.model])
        return shared

    def _estimated_shared(self, chain: Chain, end: int, rendering: Rendering) -> int:
        """The same by the length of the text between two marks where it is known, or the prompt's ends."""
        marks = ((self._marks[chain.hashes[at - 1]].shared, chain.ends[at - 1]) for at in range(end - 1, 0, -1))
        tokens, begin = next(((shared, at) for shared, at in marks if shared is not None), (0, 0))
        part = (chain.ends[end - 1] - begin) / max(1, rendering.text - begin)
        return tokens + int(SURE * part * max(0, rendering.tokens - tokens))

    def _compare(self, chain: Chain, end: int, before: Rendering, now: Rendering) -> None:
        """Two prompts part at a mark: what they have in common is shared there, and no mark before shares more."""
        common, value = before.common(now), chain.hashes[end - 1]
        if self._ends_here(chain, end, before):
            missing = before.tokens - common - before.unit + 1
            if 0 < missing <= MOST_ENDING:
                self._endings[chain.model] = max(missing, self._endings[chain.model])
            self._renderings.drop(value)  # its marks are all this prompt's
        for at in range(1, end):
            mark = self._marks[chain.hashes[at - 1]]
            mark.shared = None if mark.shared is None else min(mark.shared, common)
        self._marks[value].shared = common

    def _touched(self, chain: Chain) -> list[_Mark]:
        """All marks of a prompt, the last first: what is forgotten first is then a chain's end, not its beginning."""
        marks, hashes = self._marks, chain.hashes
        touched = list(map(marks.__getitem__, reversed(hashes)))
        collections.deque(map(marks.move_to_end, reversed(hashes)), maxlen=0)
        if chain.tail is not None:
            self._end_within(*chain.tail)
        return touched

    def _drop_oldest(self) -> None:
        while len(self._marks) > self._most_marks:
            self._marks.popitem(last=False)

    def _end_within(self, before: int, length: int) -> None:
        """Remember where a prompt ends between two marks, for the one that goes on from there."""
        mark = self._marks.get(before)
        if mark is not None and length not in mark.tails[-1:]:
            mark.tails = (*(each for each in mark.tails if each != length), length)[-MOST_TAILS:]

    def _known(self, chain: Chain) -> int:
        """How many of the first marks were met anywhere."""
        hashes, marks = chain.hashes, self._marks
        if not hashes or hashes[-1] in marks:  # a prompt that is asked again
            return len(hashes)
        return bisect.bisect_left(hashes, True, key=lambda value: value not in marks)

    def _bytes_per_token(self, model: str) -> float:
        size, tokens = self._sizes.get(model) or (BYTES_PER_TOKEN, 1.0)
        return max(size / tokens, 0.5)


def _states(path: Sequence[_Mark], oldest: float) -> list[tuple[int, int]]:
    """The marks at which places have a state that they have kept or used since then, the last one first."""
    return [
        (end, mask)
        for end in range(len(path), 0, -1)
        if (states := path[end - 1].states) is not None and (mask := states.since(oldest))
    ]
