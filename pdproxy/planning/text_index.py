"""What places may have cached, by what was sent to them: for nodes that publish no KV events. Pure: times are given.

A prompt is a chain of *marks*: one after each `CHUNK` bytes of a part of its text, and one at each part's end, each a
hash of all that comes before it. A place that was sent a prompt is taken to have the attention blocks up to each of its
marks. It has states, as vLLM 0.32 keeps them, where a prompt ended, and where a prompt parts from what the place met
before, from the second one on. A completion's prompt, text or ids, has no mark where one that it goes on from ended:
`TextIndex.refined` puts one there.

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
MOST_TAILS = 4
"""Lengths that are remembered of the pieces with which prompts ended after one mark; the last ones."""
_KEPT = 0.98
"""Of an answer's weight in the number of bytes to a token, at each further answer."""


Piece = bytes | tuple[int, ...]
"""Of a prompt: text, or token ids."""


@dataclasses.dataclass(frozen=True, slots=True)
class Chain:
    """A prompt's marks.

    Attributes:
        model: as clients name it.
        hashes: of everything up to each mark.
        ends: where each mark is: bytes from the beginning, or tokens.
        pieces: what is between each mark and the one before it; none once `TextIndex.refined` has looked at them.
        tail: of a completion's prompt whose last piece is shorter than others: the hash of the mark before that piece,
            and its length. Of a chat there is none: a template puts something between a message's end and the answer.
        in_tokens: the client sent token ids, so that ``ends`` are tokens.
    """

    model: str
    hashes: tuple[int, ...]
    ends: tuple[int, ...]
    pieces: tuple[Piece, ...] = ()
    tail: tuple[int, int] | None = None
    in_tokens: bool = False


def chain_of_text(model: str, salt: str, parts: Sequence[bytes]) -> Chain:
    """The marks of a text in parts, each of which a later prompt has whole or not at all."""
    pieces = [piece for part in parts for piece in _pieces(part)]
    return dataclasses.replace(_chain(model, salt, pieces, CHUNK), tail=None)


def chain_of_completion(model: str, salt: str, prompt: bytes) -> Chain:
    """The marks of a text from whose end later ones may go on."""
    return _chain(model, salt, _pieces(prompt), CHUNK)


def _pieces(text: bytes) -> list[bytes]:
    return [text[begin : begin + CHUNK] for begin in range(0, len(text) or 1, CHUNK)]


def chain_of_ids(model: str, salt: str, ids: Sequence[int]) -> Chain:
    """The marks of token ids."""
    pieces = [tuple(ids[begin : begin + IDS]) for begin in range(0, len(ids), IDS)]
    return dataclasses.replace(_chain(model, salt, pieces, IDS), in_tokens=True)


def _chain(model: str, salt: str, pieces: Sequence[Piece], size: int) -> Chain:
    """``size``: of a piece that does not end its part."""
    before, last, end = 0, hash(salt), 0
    hashes, ends = list[int](), list[int]()
    for piece in pieces:
        before, last, end = last, hash((last, piece)), end + len(piece)
        hashes.append(last)
        ends.append(end)
    ends_within = len(pieces) > 1 and len(pieces[-1]) < size
    tail = (before, len(pieces[-1])) if ends_within else None
    return Chain(model, tuple(hashes), tuple(ends), tuple(pieces), tail)


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
    """Where a mark was met; monotonic seconds.

    ``tokens``: up to here, where a node counted them; 0 for unknown. ``tails``: lengths of the last pieces of prompts
    that ended before a next mark.
    """

    met: dict[Place, float]
    states: dict[Place, float] | None = None
    tokens: int = 0
    tails: tuple[int, ...] = ()


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

    def refined(self, chain: Chain) -> Chain:
        """With marks, after the last one that was met, where prompts ended that this one goes on from."""
        at = self._known(chain)
        mark = self._marks.get(chain.hashes[at - 1]) if 0 < at < len(chain.hashes) else None
        if mark is None or not mark.tails:
            return dataclasses.replace(chain, pieces=())
        before, end, piece = chain.hashes[at - 1], chain.ends[at - 1], chain.pieces[at]
        found = ((end + length, hash((before, piece[:length]))) for length in sorted(mark.tails) if length < len(piece))
        more = [(end, value) for end, value in found if value in self._marks]
        hashes = (*chain.hashes[:at], *(value for _, value in more), *chain.hashes[at:])
        ends = (*chain.ends[:at], *(end for end, _ in more), *chain.ends[at:])
        return dataclasses.replace(chain, hashes=hashes, ends=ends, pieces=())

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
        self._end_within(chain)
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

    def _end_within(self, chain: Chain) -> None:
        """Remember where a prompt ends between two marks, for the one that goes on from there."""
        mark = self._marks.get(chain.tail[0]) if chain.tail is not None else None
        if mark is not None and chain.tail is not None:
            length = chain.tail[1]
            mark.tails = (*(each for each in mark.tails if each != length), length)[-MOST_TAILS:]

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
