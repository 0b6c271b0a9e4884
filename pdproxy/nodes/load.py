"""The book of load: what waits and runs at each place, and how fast it was. Pure: times are given.

A place is one data-parallel rank of a node. The slots of legs write here (`pool_entry.Slot`); plans, the queue, metrics
and sizing read the same numbers.

**How fast places are.** For each kind of work a line is learned, ``fixed + per_token * tokens`` seconds: by least
squares over the last samples of all places, older ones weighing less, together with two points that stand for `START`.
For each place a factor is learned: how many times as long as the line it takes. A place without samples has factor 1.

A place that looks slow is not chosen, and then gives no samples. So that no place and no kind of work is avoided for
ever because of a few slow samples, its samples weigh less each time that another is chosen. A place that is really slow
gets about one request in a hundred.

**How busy places were.** A queue says what a place has to do now. Where conversations have gathered, it is empty at one
moment and long at the next. The share of its time for which a place computed prompts lately says how long those that
stay there will wait.

**What a prompt costs streams.** A second that a prompt is computed beside a stream is a second that the stream comes
later. To a stream that is a part of all its seconds; to a prompt a second is a part of those that prompts take. So a
stream's second weighs as much less than a prompt's as answers take longer than prompts, both as they were seen, but
`STEADY` times as much. Prompts are kept off a place for the sake of all its streams: an answer that joins others costs
less than one that would keep prompts off another place.
"""

import enum
import math
import operator
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from pdproxy.nodes.demand import Demand


class Work(enum.StrEnum):
    """Kinds of work that a place does with a prompt."""

    PREFILL = "prefill"
    """A prefill node computes its uncached tokens."""
    LOCAL = "local"
    """A decode node computes its uncached tokens itself."""
    HAND_OVER = "hand_over"
    """A decode node reads the tokens that it lacks, and the state, from a prefill node: from the ticket to the first
    event of its stream."""


class Pace(msgspec.Struct, frozen=True, gc=False):
    """Seconds that a work takes: ``fixed`` whatever its size, and ``per_token`` for each token."""

    fixed: float
    per_token: float

    def seconds(self, tokens: float) -> float:
        """For so many tokens."""
        return self.fixed + self.per_token * tokens


START: Mapping[Work, Pace] = MappingProxyType(
    {
        Work.PREFILL: Pace(0.01, 1 / 8000),
        Work.LOCAL: Pace(0.01, 1 / 8000),
        Work.HAND_OVER: Pace(0.02, 1 / 200_000),
    }
)
"""Before anything is known: about a small model on one GPU, whose attention blocks of 25 KB a token move at 5 GB/s."""
KEPT_OF_LINE, KEPT_OF_PLACE = 0.99, 0.95
"""The part of a sample's weight that each further sample leaves: the last hundred of a line count, the last twenty of a
place."""
KEPT_WHEN_PASSED_OVER = 0.95
"""The same for all samples of a place, or of a kind of work, each time that another is chosen."""
WEIGHT_AT_0, WEIGHT_FAR, FAR = 2.0, 0.1, 4096.0
"""Weights, in samples, of the points that stand for `START` at 0 and at `FAR` tokens. Prompts of one size tell nothing
of what is fixed: they are taken to tell what a token takes. So the far point moves with the samples, and that at 0 does
not."""
_WEIGHTS, _FAR_X, _FAR_XX = WEIGHT_AT_0 + WEIGHT_FAR, WEIGHT_FAR * FAR, WEIGHT_FAR * FAR * FAR
"""Their sums of weights, x and xx."""
MOST_TIMES = 8.0
"""A sample counts as at most so many times what was expected: one stall must not make a place slow for long."""
MOST_WEIGHT = 1e100
LEAST_SAMPLES = 0.05
"""The samples of a place that weigh less than so many are forgotten."""
LEAST_PER_TOKEN, MOST_PER_TOKEN, LEAST_FIXED, MOST_FIXED, MOST_FACTOR = 1e-7, 0.1, 1e-4, 5.0, 50.0
"""Bounds of what is learned, in seconds; a place is so many times as slow or as quick as the line at most."""

STEADY = 4.0
"""The part that a stream comes later weighs so many times that of a prompt. With 1 and 2 more streams are late between
tokens, with 8 prompts pile up at a load that turns (docs/decisions/planning-tried.md, "Nodes of both roles")."""
MEMORY = 30.0
"""Seconds after which a busy second counts a third of what it did."""
FIRST_SECONDS, FIRST_PROMPTS = 3.0, 20.0
"""The record of busy times begins with so many idle seconds, and so many prompts that took no time: the first prompts
that a proxy sees say little of how busy places are, and are longer than later ones, for nothing is cached yet."""
MOST_EXPONENT = 200.0


class _Line:
    """The samples of one kind of work, as sums in which older ones weigh less, and the line through them."""

    __slots__ = ("_start", "_sums", "pace")

    def __init__(self, start: Pace) -> None:
        self._start = start
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        """Weights, and x, y, xx and xy: x are tokens, y are seconds."""
        self.pace = start

    def add(self, tokens: float, seconds: float) -> None:
        weight, x, y, xx, xy = self._sums
        kept = KEPT_OF_LINE
        self._sums = (
            weight * kept + 1.0, x * kept + tokens, y * kept + seconds,
            xx * kept + tokens * tokens, xy * kept + tokens * seconds,
        )  # fmt: skip
        self._fit()

    def passed_over(self) -> None:
        weight, x, y, xx, xy = self._sums
        kept = KEPT_WHEN_PASSED_OVER
        self._sums = (weight * kept, x * kept, y * kept, xx * kept, xy * kept)
        self._fit()

    @property
    def has_samples(self) -> bool:
        """Whether there was a sample at all."""
        return self._sums[0] > 0.0

    def _fit(self) -> None:
        """Through the samples and the two points. Where the far one lies follows from what a token takes if ``START``
        says right what is fixed."""
        weight, x, y, xx, xy = self._sums
        fixed = self._start.fixed
        per_token = (xy - fixed * x + _FAR_XX * self._start.per_token) / (xx + _FAR_XX)
        far = fixed + FAR * min(max(per_token, LEAST_PER_TOKEN), MOST_PER_TOKEN)
        weight += _WEIGHTS
        x += _FAR_X
        y += WEIGHT_AT_0 * fixed + WEIGHT_FAR * far
        xx += _FAR_XX
        xy += _FAR_X * far
        slope = min(max((weight * xy - x * y) / (weight * xx - x * x), LEAST_PER_TOKEN), MOST_PER_TOKEN)
        self.pace = Pace(min(max((y - slope * x) / weight, LEAST_FIXED), MOST_FIXED), slope)


class _Samples(msgspec.Struct, frozen=True):
    """Samples of one kind of work at one place: seconds taken, seconds by the line, and those of the last sample."""

    took: float = 0.0
    said: float = 0.0
    last: float = 0.0

    def factor(self) -> float:
        """As if one sample more had taken what the line says."""
        return min(max((self.took + self.last) / (self.said + self.last), 1 / MOST_FACTOR), MOST_FACTOR)


_NO_SAMPLES = _Samples()


class PlaceLoad:
    """One data-parallel rank of a node: what it has to do, and how fast it was.

    Attributes:
        rank: of the node.
        legs: in flight.
        queued: tokens that are to be computed of the prompts that wait or are computed.
        prompts: how many these are; ``keys``: how many of each API key.
        tokens, sequences: what decode legs take of the caches.
        crowd: what the legs weigh, in sequences: one each, and more where they nearly fill the caches.
        prefill, local, hand_over: how many times as long as the line such work takes here.
        busy: seconds for which it computed prefill legs, older ones weighing less: `Load.busy_weight` scales them.
        recent: tokens that it worked on lately; of no scale, so that they can only be compared.
    """

    __slots__ = (
        "_ended", "_since", "busy", "crowd", "hand_over", "keys", "legs", "local", "prefill", "prompts",
        "queued", "rank", "recent", "sequences", "tokens",
    )  # fmt: skip

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.legs = self.queued = self.prompts = self.tokens = self.sequences = 0
        self.keys: dict[str, int] = {}
        self.prefill = self.local = self.hand_over = 1.0
        self.crowd = self.busy = self.recent = 0.0
        self._since = 0.0
        """When it began to work on the prompt that it computes now."""
        self._ended = -math.inf
        """When it had computed the last one."""

    def take_prompt(self, key: str, tokens: int, now: float) -> None:
        """A prompt of this API key is given to the place: so many tokens are to be computed."""
        if not self.prompts:
            self._since = now
        self.prompts += 1
        self.queued += tokens
        self.keys[key] = self.keys.get(key, 0) + 1

    def drop_prompt(self, key: str, tokens: int) -> None:
        """The prompt is computed, or not to be computed here any more; the same numbers as it came with."""
        self.prompts -= 1
        self.queued -= tokens
        left = self.keys[key] - 1
        if left:
            self.keys[key] = left
        else:
            del self.keys[key]

    def end_prompt(self, began: float, now: float) -> float:
        """A prompt that was given to the place then is computed now: the seconds that this took by itself, without
        those for which it waited for others."""
        seconds = max(0.0, now - max(began, self._ended))
        self._ended = max(now, self._ended)
        self._since = now
        return seconds

    def seconds_alone(self, began: float, now: float) -> float:
        """How long ago something began, without the time for which the place computed prompts meanwhile."""
        return max(0.0, now - max(began, self._ended))

    def seconds_left(self, pace: Pace, now: float) -> float:
        """How long it still needs for its prompts, at this pace of its own. The one that it computes now may be late;
        those behind it still take as long as ever."""
        if not self.prompts:
            return 0.0
        seconds = self.prompts * pace.fixed + self.queued * pace.per_token
        return seconds - min(now - self._since, seconds / self.prompts)


_FACTOR = {work: operator.attrgetter(work.value) for work in Work}


class Load:
    """The facts of all places together: the lines, how busy they were, and how many nodes the last hour needed.

    Attributes:
        demand: what was asked of nodes during the last hour.
        busy_weight: the weight of a second in `PlaceLoad.busy`: their product is the share of its time for which a
            place was busy.
        usual: seconds that a prompt took, on average over all prefill places.
        stall_weight: the weight of a second that a stream comes later, in seconds of waiting for a first token.
    """

    def __init__(self) -> None:
        self.demand = Demand()
        self._lines = {work: _Line(START[work]) for work in Work}
        self._samples: dict[Work, dict[PlaceLoad, _Samples]] = {work: {} for work in Work}
        """The place without a sample for longest is first."""
        self._least_factors: dict[Work, float] = {}
        """Those that were asked for since a place became slower than it was."""
        self._recent_weight = 1.0
        """The weight of the next sample in `PlaceLoad.recent`: later ones weigh more, and so earlier ones less."""
        self._worked: set[PlaceLoad] = set()
        """Those that ever did something, to scale what they did."""
        self._busy_seconds = self._busy_prompts = 0.0
        self._origin: float | None = None
        """Busy seconds are kept as of then, so that a prompt changes one number, not that of all places."""
        self._latest = self._first = 0.0
        self.busy_weight = self.usual = self.stall_weight = 0.0
        self._answers = self._answer_seconds = 0.0
        """How many there were, older ones weighing less, and how long they took."""

    def pace(self, work: Work) -> Pace:
        """The line of this kind of work."""
        return self._lines[work].pace

    def pace_at(self, work: Work, place: PlaceLoad) -> Pace:
        """The pace of one place."""
        pace, factor = self._lines[work].pace, _FACTOR[work](place)
        return Pace(pace.fixed * factor, pace.per_token * factor)

    def least_factor(self, work: Work) -> float:
        """The factor of the quickest place."""
        least = self._least_factors.get(work)
        if least is None:
            found = min(1.0, min(map(_FACTOR[work], self._samples[work]), default=1.0))
            least = self._least_factors[work] = found
        return least

    def seconds_left(self, work: Work, place: PlaceLoad, now: float) -> float:
        """How long a place still needs for the prompts that it has; infinite while nothing is known of such work."""
        if place.prompts and not self._lines[work].has_samples:
            return math.inf
        return place.seconds_left(self.pace_at(work, place), now)

    def answer_stalls(self, place: PlaceLoad) -> float:
        """How much later an answer comes for the prompts that a place will compute meanwhile, if it computes for as
        much of its time as it did lately, in seconds of waiting for a first token."""
        if not self._answers:
            return 0.0
        seconds = min(1.0, place.busy * self.busy_weight) * self._answer_seconds / self._answers
        return STEADY * self.stall_weight * seconds / (1 + place.legs - place.prompts)

    # -- what places did

    def streamed(self, streams: int, tokens: int, seconds: float) -> None:
        """A stream ended, of so many tokens that came in so many seconds; so many, with itself, ran on its node."""
        self.demand.decoded(streams, tokens, seconds)
        self._answers = self._answers * KEPT_OF_LINE + 1
        self._answer_seconds = self._answer_seconds * KEPT_OF_LINE + seconds
        self._weigh_stalls()

    def computed(self, work: Work, place: PlaceLoad, tokens: int, began: float, now: float) -> float:
        """A place has computed so many tokens that were given to it then: the seconds that it took. Monotonic time."""
        seconds = place.end_prompt(began, now)
        self.learn(work, place, tokens, seconds)
        return seconds

    def prefilled(self, place: PlaceLoad, ranks: int, seconds: float, arrived: float, now: float) -> None:
        """A prefill place computed a prompt for so long that came to the proxy then; its node has so many ranks."""
        self._count_busy(place, seconds / ranks, now)
        self.demand.prefilled(arrived, seconds / ranks, now)

    def learn(self, work: Work, place: PlaceLoad, tokens: int, seconds: float) -> None:
        """A work of so many tokens took a place so many seconds."""
        line, samples = self._lines[work], self._samples[work]
        seconds = min(seconds, MOST_TIMES * line.pace.seconds(tokens) * _FACTOR[work](place))
        line.add(tokens, seconds)
        expected = line.pace.seconds(tokens)
        self._count_recent(place, tokens)
        before, kept = samples.pop(place, _NO_SAMPLES), KEPT_OF_PLACE
        self._know(work, place, _Samples(before.took * kept + seconds, before.said * kept + expected, expected))
        avoided = next(iter(samples))
        if avoided is not place:
            self._know_less(work, avoided)

    def passed_over(self, work: Work, place: PlaceLoad) -> None:
        """A place could have done this work, and the prompt was computed in another way, which was thought quicker."""
        self._lines[work].passed_over()
        self._know_less(work, place)

    def drop_place(self, place: PlaceLoad) -> None:
        """Its node has left the pool."""
        for samples in self._samples.values():
            samples.pop(place, None)
        self._least_factors.clear()
        self._worked.discard(place)

    def _know(self, work: Work, place: PlaceLoad, samples: _Samples) -> None:
        self._samples[work][place] = samples
        self._set_factor(work, place, samples.factor())

    def _set_factor(self, work: Work, place: PlaceLoad, factor: float) -> None:
        least = self._least_factors.get(work)
        if least is not None:
            if factor <= least:
                self._least_factors[work] = factor
            elif _FACTOR[work](place) == least:  # it may have been the quickest
                del self._least_factors[work]
        setattr(place, work.value, factor)

    def _know_less(self, work: Work, place: PlaceLoad) -> None:
        known = self._samples[work].get(place)
        if known is None:
            return
        kept = KEPT_WHEN_PASSED_OVER
        if known.said < LEAST_SAMPLES * known.last:
            del self._samples[work][place]
            self._set_factor(work, place, 1.0)
        else:
            self._know(work, place, _Samples(known.took * kept, known.said * kept, known.last))

    def _count_recent(self, place: PlaceLoad, tokens: int) -> None:
        self._worked.add(place)
        place.recent += tokens * self._recent_weight
        self._recent_weight /= KEPT_OF_LINE
        if self._recent_weight > MOST_WEIGHT:
            for each in self._worked:
                each.recent /= self._recent_weight
            self._recent_weight = 1.0

    def _count_busy(self, place: PlaceLoad, seconds: float, ended: float) -> None:
        if self._origin is None:
            self._origin = self._first = self._latest = ended - seconds
        self._latest = max(ended, self._latest)
        if self._latest - self._origin > MOST_EXPONENT * MEMORY:
            self._rescale_busy(self._origin)
            self._origin = self._latest
        grown = math.exp((self._latest - self._origin) / MEMORY)
        self._worked.add(place)
        place.busy += seconds * grown
        self._busy_seconds += seconds * grown
        self._busy_prompts += grown
        seen = MEMORY * -math.expm1((self._first - self._latest) / MEMORY)
        self.busy_weight = 1 / (grown * (seen + FIRST_SECONDS))
        self.usual = self._busy_seconds / (self._busy_prompts + FIRST_PROMPTS * grown)
        self._weigh_stalls()

    def _weigh_stalls(self) -> None:
        """At most 1, where answers are shorter than prompts."""
        seconds = STEADY * self.usual * self._answers
        self.stall_weight = seconds / max(seconds, self._answer_seconds) if seconds else 0.0

    def _rescale_busy(self, origin: float) -> None:
        """All as of now, so that no number grows for ever."""
        shrunk = math.exp((origin - self._latest) / MEMORY)
        for place in self._worked:
            place.busy *= shrunk
        self._busy_seconds *= shrunk
        self._busy_prompts *= shrunk
