"""How long nodes take to compute prompts and to take them over, learned from what they did. Pure: times are given.

Of a role, a line is learned: ``fixed + per_token * tokens`` seconds, by least squares over the last samples of all its
nodes (older ones weigh less and less), together with two points of `START`. Of a node, how many times as long it takes
as the role's line says; one without samples takes just as long.
"""

import dataclasses
import enum
from collections.abc import Mapping
from types import MappingProxyType

from pdproxy.planning.prefix import Place


class Work(enum.StrEnum):
    """What a node does with a prompt."""

    PREFILL = "prefill"
    """A prefill node computes its uncached tokens."""
    LOCAL = "local"
    """A decode node computes its uncached tokens itself."""
    HAND_OVER = "hand_over"
    """A decode node reads the tokens that it lacks, and the state, from a prefill node: from the ticket to the first
    event of its stream."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pace:
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
WEIGHT_AT_0, WEIGHT_FAR, FAR = 2.0, 0.1, 4096.0
"""Of the points of `START` at 0 and at `FAR` tokens, in samples. Prompts of one size tell nothing of what is fixed: the
point at 0 weighs more, so that they are taken to tell what a token takes."""
MOST_TIMES = 8.0
"""A sample counts as at most so many times what was expected: one stall must not make a node slow for long."""
MOST_WEIGHT = 1e100
MOST_NODES = 8192
"""Of which something is kept, by kind of work; the one met first is forgotten first: most have left the pool."""
LEAST_PER_TOKEN, MOST_PER_TOKEN, LEAST_FIXED, MOST_FIXED, MOST_FACTOR = 1e-7, 0.1, 1e-4, 5.0, 50.0
"""Bounds of what is learned, in seconds; a node is so many times as slow or as quick as its role at most."""


class _Line:
    """A role's samples, as sums of which older ones weigh less, and the line through them."""

    def __init__(self, start: Pace) -> None:
        far = start.seconds(FAR)
        self._start = (
            WEIGHT_AT_0 + WEIGHT_FAR, WEIGHT_FAR * FAR, WEIGHT_AT_0 * start.fixed + WEIGHT_FAR * far,
            WEIGHT_FAR * FAR * FAR, WEIGHT_FAR * FAR * far,
        )  # fmt: skip
        self._sums: tuple[float, ...] = (0.0,) * 5
        self.pace = start

    def add(self, tokens: float, seconds: float) -> None:
        new = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        self._sums = tuple(old * KEPT_OF_ROLE + more for old, more in zip(self._sums, new, strict=True))
        weight, x, y, xx, xy = map(sum, zip(self._sums, self._start, strict=True))
        slope = min(max((weight * xy - x * y) / (weight * xx - x * x), LEAST_PER_TOKEN), MOST_PER_TOKEN)
        self.pace = Pace(min(max((y - slope * x) / weight, LEAST_FIXED), MOST_FIXED), slope)


class Rates:
    """The paces of all nodes, by kind of work."""

    def __init__(self) -> None:
        self._lines = {work: _Line(START[work]) for work in Work}
        self._sums: dict[tuple[Work, str], tuple[float, float]] = {}
        """Of each node's samples: the seconds that they took, and that the role's line said."""
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

    def pace(self, work: Work, node: str) -> Pace:
        """Of one node."""
        pace, factor = self._lines[work].pace, self._factors[work].get(node, 1.0)
        return Pace(pace.fixed * factor, pace.per_token * factor)

    def computed(self, work: Work, place: Place, tokens: int, began: float, ended: float) -> None:
        """A place computed so many tokens; it began after it had ended what came before. Monotonic seconds."""
        since = max(began, self._last_end.get(place, began))
        self._last_end[place] = max(ended, since)
        self.took(work, place.node, tokens, max(0.0, ended - since))

    def took(self, work: Work, node: str, tokens: int, seconds: float) -> None:
        """A work of so many tokens took so many seconds."""
        seconds = min(seconds, MOST_TIMES * self.pace(work, node).seconds(tokens))
        self._lines[work].add(tokens, seconds)
        expected = self._lines[work].pace.seconds(tokens)
        self._count(node, tokens)
        if (work, node) not in self._sums and len(self._sums) >= MOST_NODES:
            self._forget(*next(iter(self._sums)))
        took, said = self._sums.get((work, node), (0.0, 0.0))
        took, said = took * KEPT_OF_NODE + seconds, said * KEPT_OF_NODE + expected
        self._sums[work, node] = took, said
        factor = (took + expected) / (said + expected)  # as if one sample more had taken what the role takes
        self._factors[work][node] = min(max(factor, 1 / MOST_FACTOR), MOST_FACTOR)

    def _count(self, node: str, tokens: int) -> None:
        self._recent[node] = self._recent.get(node, 0.0) + tokens * self._weight
        self._weight /= KEPT_OF_ROLE
        if self._weight > MOST_WEIGHT:
            self._recent = {name: did / self._weight for name, did in self._recent.items()}
            self._weight = 1.0

    def _forget(self, work: Work, node: str) -> None:
        del self._sums[work, node], self._factors[work][node]
        self._recent.pop(node, None)
        self._last_end = {place: end for place, end in self._last_end.items() if place.node != node}
