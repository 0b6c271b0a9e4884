"""What places may have cached, by what was sent to them: for nodes that publish no KV events. Pure: times are given.

A prompt is a chain of *marks*: one after each `CHUNK` bytes of a part of its text, and one at each part's end, each a
hash of all that comes before it. A place that was sent a prompt is taken to have the attention blocks up to each of its
marks. It has states, as vLLM 0.32 keeps them, where a prompt ended, and where a prompt parts from what the place met
before, from the second one on.

It is an approximation. Nodes evict, restart, and are sent prompts by others; tokens are estimated from bytes. What
nodes say they had cached corrects it. Two texts of equal hash would only send a prompt to a node that has nothing.
"""

import bisect
import collections
import dataclasses
import enum
import math
from collections.abc import Sequence

from pdproxy.planning.prefix import Hit, Place

CHUNK = 512
"""Bytes between two marks of one part."""
IDS = 128
"""Token ids between two marks, where the client sent ids."""
MOST_MARKS = 100_000
"""Kept of all prompts; those that were not met for longest are forgotten first. About 50 MB."""
LIFE = 900.0
"""Seconds after which a place that met a mark is taken to have evicted it."""
BYTES_PER_TOKEN = 4.0
"""Before a model has answered."""
_KEPT = 0.98
"""Of an answer's weight in the number of bytes to a token, at each further answer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Chain:
    """A prompt's marks.

    Attributes:
        model: as clients name it.
        hashes: of everything up to each mark.
        ends: where each mark is: bytes from the beginning, or tokens.
        in_tokens: the client sent token ids, so that ``ends`` are tokens.
    """

    model: str
    hashes: tuple[int, ...]
    ends: tuple[int, ...]
    in_tokens: bool = False


def chain_of_text(model: str, salt: str, parts: Sequence[bytes]) -> Chain:
    """The marks of a text in parts."""
    last, end = hash(salt), 0
    hashes, ends = list[int](), list[int]()
    for part in parts:
        for begin in range(0, len(part) or 1, CHUNK):
            chunk = part[begin : begin + CHUNK]
            last, end = hash((last, chunk)), end + len(chunk)
            hashes.append(last)
            ends.append(end)
    return Chain(model, tuple(hashes), tuple(ends))


def chain_of_ids(model: str, salt: str, ids: Sequence[int]) -> Chain:
    """The marks of token ids."""
    last, hashes = hash(salt), list[int]()
    for begin in range(0, len(ids), IDS):
        last = hash((last, tuple(ids[begin : begin + IDS])))
        hashes.append(last)
    ends = tuple(min(begin + IDS, len(ids)) for begin in range(0, len(ids), IDS))
    return Chain(model, tuple(hashes), ends, in_tokens=True)


class Keeps(enum.Enum):
    """What states a place keeps of a prompt that it is sent."""

    ALL = enum.auto()
    """It computes the prompt: one at its end, and one where it parts from what the place met before."""
    END = enum.auto()
    """It takes the prompt over, with a state that can be resumed from."""
    NONE = enum.auto()
    """It takes the prompt over, and keeps no state."""


@dataclasses.dataclass(slots=True)
class _Mark:
    """Where a mark was met; monotonic seconds. ``tokens``: up to here, where a node counted them; 0 for unknown."""

    met: dict[Place, float]
    states: dict[Place, float] | None = None
    tokens: int = 0


class TextIndex:
    """The marks of all prompts that were sent somewhere."""

    def __init__(self, most_marks: int = MOST_MARKS, life: float = LIFE) -> None:
        self._most_marks = most_marks
        self._life = life
        self._marks: collections.OrderedDict[int, _Mark] = collections.OrderedDict()
        self._sizes = collections.defaultdict[str, list[float]](lambda: [BYTES_PER_TOKEN, 1.0])
        """Bytes and tokens of the prompts of each model, later ones with more weight."""

    def __len__(self) -> int:
        return len(self._marks)

    def tokens(self, chain: Chain, end: int | None = None) -> int:
        """About how many tokens the whole prompt has, or its first ``end`` marks."""
        end = len(chain.ends) if end is None else end
        if chain.in_tokens:
            return chain.ends[end - 1] if end else 0
        for known in range(end, 0, -1):
            mark = self._marks.get(chain.hashes[known - 1])
            if mark is not None and mark.tokens:
                rest = chain.ends[end - 1] - chain.ends[known - 1]
                return mark.tokens + math.ceil(rest / self._bytes_per_token(chain.model))
        return math.ceil((chain.ends[end - 1] if end else 0) / self._bytes_per_token(chain.model))

    def look_up(self, chain: Chain, now: float) -> dict[Place, Hit]:
        """How many tokens of the prompt each place may have cached; not yet cut to blocks."""
        known = self._known(chain)
        depths, states = dict[Place, int](), dict[Place, int]()
        for end in range(known, 0, -1):
            mark = self._marks[chain.hashes[end - 1]]
            if len(mark.met) > len(depths):
                depths |= {
                    place: end for place, met in mark.met.items() if place not in depths and self._live(met, now)
                }
            for place, met in (mark.states or {}).items():
                if place in depths and self._live(met, now):
                    states.setdefault(place, end)
        tokens = {end: self.tokens(chain, end) for end in {0, *depths.values(), *states.values()}}
        return {place: Hit(tokens[end], tokens[states.get(place, 0)]) for place, end in depths.items()}

    def sent(self, chain: Chain, place: Place, keeps: Keeps, now: float) -> None:
        """The prompt goes to a place."""
        before = self._met(chain, place, now)
        for value in reversed(chain.hashes):  # so that what is forgotten first is a chain's end, not its beginning
            mark = self._marks.get(value)
            if mark is None:
                mark = self._marks[value] = _Mark({})
            mark.met[place] = now
            self._marks.move_to_end(value)
        if keeps is Keeps.ALL and 0 < before < len(chain.hashes):
            self._keep_state(chain, before, place, now)
        if keeps is not Keeps.NONE:
            self._keep_state(chain, len(chain.hashes), place, now)
        while len(self._marks) > self._most_marks:
            self._marks.popitem(last=False)

    def counted(self, chain: Chain, tokens: int) -> None:
        """A node counted the tokens of the whole prompt."""
        if not chain.ends or chain.in_tokens:
            return
        mark = self._marks.get(chain.hashes[-1])
        if mark is not None:
            mark.tokens = tokens
        sums = self._sizes[chain.model]
        sums[:] = sums[0] * _KEPT + chain.ends[-1], sums[1] * _KEPT + tokens

    def cached_less(self, chain: Chain, place: Place) -> None:
        """The place had less than its states promised: they are gone, but for the one at the end of this prompt."""
        for value in chain.hashes[:-1]:
            mark = self._marks.get(value)
            if mark is not None and mark.states:
                mark.states.pop(place, None)

    def cached_more(self, chain: Chain, place: Place, cached: int, now: float) -> None:
        """The place resumed after so many tokens: there is a state, unknown until now, at the last mark before."""
        ends = range(1, len(chain.hashes) + 1)
        end = bisect.bisect_right(ends, cached, key=lambda each: self.tokens(chain, each))
        if end:
            self._keep_state(chain, end, place, now)

    def _known(self, chain: Chain) -> int:
        """How many of the first marks were met anywhere."""
        return bisect.bisect_left(chain.hashes, True, key=lambda value: value not in self._marks)

    def _met(self, chain: Chain, place: Place, now: float) -> int:
        """How many of the first marks this place has met."""
        for end in range(self._known(chain), 0, -1):
            met = self._marks[chain.hashes[end - 1]].met.get(place)
            if met is not None:
                return end if self._live(met, now) else 0
        return 0

    def _keep_state(self, chain: Chain, end: int, place: Place, now: float) -> None:
        mark = self._marks.get(chain.hashes[end - 1]) if end else None
        if mark is not None:
            mark.states = {**(mark.states or {}), place: now}

    def _live(self, met: float, now: float) -> bool:
        return now - met <= self._life

    def _bytes_per_token(self, model: str) -> float:
        size, tokens = self._sizes.get(model) or (BYTES_PER_TOKEN, 1.0)
        return max(size / tokens, 0.5)
