"""How long nodes take to compute prompts and to take them over, learned from what they did. Pure: times are given.

What is learned of a node is a line, ``fixed + per_token * tokens`` seconds, by least squares over its last samples
(older ones weigh less and less). Two points of the role's own line count as samples too, so that a node without any has
the role's line, and one with few stays near it; the role begins with two points of `START`.
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
KEPT = 0.95
"""Of a sample's weight, at each further sample: the last twenty count."""
MOST_TIMES = 8.0
"""A sample counts as at most so many times what was expected: one stall must not make a node slow for long."""
FAR = 4096.0
"""Tokens of the second point of a line that is taken for samples."""
MOST_NODES = 8192
"""Whose paces are kept, by kind of work; the one that was met first is forgotten first: most have left the pool."""
LEAST_PER_TOKEN, MOST_PER_TOKEN, MOST_FIXED = 1e-7, 0.1, 5.0
"""Bounds of what is learned, in seconds."""


class _Samples:
    """Sums over samples, of which older ones weigh less."""

    __slots__ = ("seconds", "tokens", "tokens_seconds", "tokens_squared", "weight")

    def __init__(self) -> None:
        self.weight = self.tokens = self.seconds = self.tokens_squared = self.tokens_seconds = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        self.weight = self.weight * KEPT + 1
        self.tokens = self.tokens * KEPT + tokens
        self.seconds = self.seconds * KEPT + seconds
        self.tokens_squared = self.tokens_squared * KEPT + tokens * tokens
        self.tokens_seconds = self.tokens_seconds * KEPT + tokens * seconds

    def line(self, start: Pace) -> Pace:
        """Through these samples, and the points of ``start`` at 0 and at `FAR` tokens."""
        far = start.seconds(FAR)
        weight, tokens = self.weight + 2, self.tokens + FAR
        seconds = self.seconds + start.fixed + far
        squared, product = self.tokens_squared + FAR * FAR, self.tokens_seconds + FAR * far
        slope = (weight * product - tokens * seconds) / (weight * squared - tokens * tokens)
        slope = min(max(slope, LEAST_PER_TOKEN), MOST_PER_TOKEN)
        return Pace(min(max((seconds - slope * tokens) / weight, 0.0), MOST_FIXED), slope)


class Rates:
    """The paces of all nodes, by kind of work."""

    def __init__(self) -> None:
        self._roles = {work: _Samples() for work in Work}
        self._nodes: dict[tuple[Work, str], _Samples] = {}
        self._last_end: dict[Place, float] = {}
        self._mean = dict(START)
        self._learned: dict[Work, dict[str, Pace]] = {work: {} for work in Work}
        self._per_token: dict[Work, dict[str, float]] = {work: {} for work in Work}

    def pace(self, work: Work, node: str) -> Pace:
        """Of one node; that of its role where it has no samples."""
        return self._learned[work].get(node) or self._mean[work]

    def role(self, work: Work) -> Pace:
        """Of all nodes that do this work."""
        return self._mean[work]

    def per_token(self, work: Work) -> tuple[Mapping[str, float], float]:
        """`Pace.per_token` of the nodes that have samples, by name, and that of all others: for loops over nodes."""
        return self._per_token[work], self._mean[work].per_token

    def computed(self, work: Work, place: Place, tokens: int, began: float, ended: float) -> None:
        """A place computed so many tokens; it began after it had ended what came before. Monotonic seconds."""
        since = max(began, self._last_end.get(place, began))
        self._last_end[place] = max(ended, since)
        self.took(work, place.node, tokens, max(0.0, ended - since))

    def took(self, work: Work, node: str, tokens: int, seconds: float) -> None:
        """A work of so many tokens took so many seconds."""
        seconds = min(seconds, MOST_TIMES * self.pace(work, node).seconds(tokens))
        self._roles[work].add(tokens, seconds)
        if (work, node) not in self._nodes and len(self._nodes) >= MOST_NODES:
            self._forget(*next(iter(self._nodes)))
        samples = self._nodes.setdefault((work, node), _Samples())
        samples.add(tokens, seconds)
        self._mean[work] = mean = self._roles[work].line(START[work])
        self._learned[work][node] = learned = samples.line(mean)
        self._per_token[work][node] = learned.per_token

    def _forget(self, work: Work, node: str) -> None:
        del self._nodes[work, node], self._learned[work][node], self._per_token[work][node]
        self._last_end = {place: end for place, end in self._last_end.items() if place.node != node}
