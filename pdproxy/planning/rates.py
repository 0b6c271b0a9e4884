"""How long nodes take to compute prompts and to take them over, learned from what they did. Pure: times are given.

Of a role, a line is learned: ``fixed + per_token * tokens`` seconds, by least squares over the last samples of all its
nodes (older ones weigh less and less), together with two points that stand for `START`. Of a node, how many times as
long it takes as the role's line says; one without samples takes just as long.

What is dear is not chosen, and then gives no samples. So that no node and no way is avoided for ever because of a few
slow ones, what was learned of it weighs less while others are chosen: a node that is slow indeed gets about one request
in a hundred.
"""

import enum
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from pdproxy.planning.prefix import Place
from pdproxy.planning.recent_work import RecentWork


class Work(enum.StrEnum):
    """What a node does with a prompt."""

    PREFILL = "prefill"
    """A prefill node computes its uncached tokens."""
    LOCAL = "local"
    """A decode node computes its uncached tokens itself."""
    HAND_OVER = "hand_over"
    """A decode node reads the tokens that it lacks, and the state, from a prefill node: from the ticket to the first
    event of its stream."""


class Pace(msgspec.Struct, frozen=True):
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
KEPT_OF_ROLE, KEPT_OF_NODE = 0.99, 0.95
"""Of a sample's weight, at each further sample: the last hundred of a role count, the last twenty of a node."""
KEPT_WHEN_PASSED_OVER = 0.95
"""Of the weight of all samples of a node, or of a way to compute a prompt, each time that another is chosen."""
WEIGHT_AT_0, WEIGHT_FAR, FAR = 2.0, 0.1, 4096.0
"""Of the points that stand for `START` at 0 and at `FAR` tokens, in samples. Prompts of one size tell nothing of what
is fixed: they are taken to tell what a token takes. So the far point moves with the samples, and that at 0 does not."""
MOST_TIMES = 8.0
"""A sample counts as at most so many times what was expected: one stall must not make a node slow for long."""
MOST_WEIGHT = 1e100
MOST_NODES = 8192
"""Of which something is kept, by kind of work; the one without a sample for longest is forgotten first."""
LEAST_SAMPLES = 0.05
"""With a weight of fewer samples a node is forgotten: it may have left the pool."""
LEAST_PER_TOKEN, MOST_PER_TOKEN, LEAST_FIXED, MOST_FIXED, MOST_FACTOR = 1e-7, 0.1, 1e-4, 5.0, 50.0
"""Bounds of what is learned, in seconds; a node is so many times as slow or as quick as its role at most."""


class _Line:
    """A role's samples, as sums of which older ones weigh less, and the line through them."""

    def __init__(self, start: Pace) -> None:
        self._start = start
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        """Of weights, and of x, y, xx and xy: x are tokens, y are seconds."""
        self.pace = start

    def add(self, tokens: float, seconds: float) -> None:
        weight, x, y, xx, xy = self._sums
        kept = KEPT_OF_ROLE
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

    def _fit(self) -> None:
        """Through the samples and the two points: what a token takes if ``START`` says right what is fixed decides the
        far one."""
        weight, x, y, xx, xy = self._sums
        fixed, far_xx = self._start.fixed, WEIGHT_FAR * FAR * FAR
        per_token = (xy - fixed * x + far_xx * self._start.per_token) / (xx + far_xx)
        far = fixed + FAR * min(max(per_token, LEAST_PER_TOKEN), MOST_PER_TOKEN)
        weight += WEIGHT_AT_0 + WEIGHT_FAR
        x += WEIGHT_FAR * FAR
        y += WEIGHT_AT_0 * fixed + WEIGHT_FAR * far
        xx += far_xx
        xy += WEIGHT_FAR * FAR * far
        slope = min(max((weight * xy - x * y) / (weight * xx - x * x), LEAST_PER_TOKEN), MOST_PER_TOKEN)
        self.pace = Pace(min(max((y - slope * x) / weight, LEAST_FIXED), MOST_FIXED), slope)


class _Samples(msgspec.Struct, frozen=True):
    """Of a node: the seconds that its samples took, that the role's line said, and that it said of the last one."""

    took: float = 0.0
    said: float = 0.0
    last: float = 0.0

    def factor(self) -> float:
        """As if one sample more had taken what the role takes."""
        return min(max((self.took + self.last) / (self.said + self.last), 1 / MOST_FACTOR), MOST_FACTOR)


class Rates:
    """The paces of all nodes, by kind of work.

    Attributes:
        prefill_work: how busy prefill nodes were lately.
    """

    def __init__(self) -> None:
        self.prefill_work = RecentWork()
        self._lines = {work: _Line(START[work]) for work in Work}
        self._samples: dict[Work, dict[str, _Samples]] = {work: {} for work in Work}
        """By node; the one without a sample for longest is first."""
        self._factors: dict[Work, dict[str, float]] = {work: {} for work in Work}
        self._last_end: dict[Place, float] = {}
        self._recent: dict[str, float] = {}
        self._weight = 1.0
        """Of the next sample in ``_recent``: later ones weigh more, and so earlier ones less."""

    @property
    def recent(self) -> Mapping[str, float]:
        """Tokens that nodes worked on lately, by their names; of no scale, so that they can only be compared."""
        return self._recent

    def role(self, work: Work) -> Pace:
        """Of all nodes that do this work."""
        return self._lines[work].pace

    def factors(self, work: Work) -> Mapping[str, float]:
        """How many times as long as the role each node takes that has samples, by its name."""
        return self._factors[work]

    def least_factor(self, work: Work) -> float:
        """Of the quickest node."""
        return min(1.0, min(self._factors[work].values(), default=1.0))

    def pace(self, work: Work, node: str) -> Pace:
        """Of one node."""
        pace, factor = self._lines[work].pace, self._factors[work].get(node, 1.0)
        return Pace(pace.fixed * factor, pace.per_token * factor)

    def computed(self, work: Work, place: Place, tokens: int, began: float, ended: float, ranks: int = 1) -> None:
        """A place computed so many tokens; it began after it had ended what came before. Monotonic seconds.

        Args:
            ranks: of the node; each of them is a part of it.
        """
        since = max(began, self._last_end.get(place, began))
        self._last_end[place] = max(ended, since)
        seconds = max(0.0, ended - since)
        if work is Work.PREFILL:
            self.prefill_work.add(place.node, seconds / ranks, ended)
        self.took(work, place.node, tokens, seconds)

    def taken_over(self, place: Place, tokens: int, began: float, ended: float) -> None:
        """A decode place read so many tokens. What it computed meanwhile is no part of that. Monotonic seconds."""
        since = max(began, self._last_end.get(place, began))
        self.took(Work.HAND_OVER, place.node, tokens, max(0.0, ended - since))

    def took(self, work: Work, node: str, tokens: int, seconds: float) -> None:
        """A work of so many tokens took so many seconds."""
        seconds = min(seconds, MOST_TIMES * self.pace(work, node).seconds(tokens))
        self._lines[work].add(tokens, seconds)
        expected = self._lines[work].pace.seconds(tokens)
        self._count(node, tokens)
        samples = self._samples[work]
        old = samples.pop(node, None) or _Samples()
        if len(samples) >= MOST_NODES:
            self._forget(work, next(iter(samples)))
        self._know(
            work, node, _Samples(old.took * KEPT_OF_NODE + seconds, old.said * KEPT_OF_NODE + expected, expected)
        )
        avoided = next(iter(samples))
        if avoided != node:
            self._know_less(work, avoided)

    def passed_over(self, work: Work, node: str) -> None:
        """A node could have done this work, and the prompt was computed in another way, which was thought quicker."""
        self._lines[work].passed_over()
        self._know_less(work, node)

    def _know(self, work: Work, node: str, samples: _Samples) -> None:
        self._samples[work][node] = samples
        self._factors[work][node] = samples.factor()

    def _know_less(self, work: Work, node: str) -> None:
        known = self._samples[work].get(node)
        if known is not None:
            kept = KEPT_WHEN_PASSED_OVER
            self._know(work, node, _Samples(known.took * kept, known.said * kept, known.last))
            if known.said < LEAST_SAMPLES * known.last:
                self._forget(work, node)

    def _count(self, node: str, tokens: int) -> None:
        self._recent[node] = self._recent.get(node, 0.0) + tokens * self._weight
        self._weight /= KEPT_OF_ROLE
        if self._weight > MOST_WEIGHT:
            self._recent = {name: did / self._weight for name, did in self._recent.items()}
            self._weight = 1.0

    def _forget(self, work: Work, node: str) -> None:
        del self._samples[work][node], self._factors[work][node]
        if not any(node in samples for samples in self._samples.values()):
            self._recent.pop(node, None)
            self._last_end = {place: end for place, end in self._last_end.items() if place.node != node}
