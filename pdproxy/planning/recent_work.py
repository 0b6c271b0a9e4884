"""What share of their time nodes computed prompts lately. Pure: times are given.

A queue says what a place has to do now. Where conversations have gathered, the queue is empty at one moment and long at
the next; how busy a place was lately says how long those that stay there will wait.
"""

import math
from collections.abc import Mapping

MEMORY = 30.0
"""Seconds after which work counts a third of what it did."""
FIRST_SECONDS, FIRST_PROMPTS = 3.0, 20.0
"""Of no work and of prompts that took no time, with which a record begins: the first prompts that a proxy sees say
little of how busy nodes are, and are longer than those that follow, for nothing is cached yet."""
MOST_EXPONENT = 200.0
LEAST_SECONDS = 1e-6
"""A node that did less than that, of what still counts, is forgotten."""


class RecentWork:
    """The seconds for which nodes computed, older ones weighing less; as of the last prompt that any of them computed.

    Sums are kept as of the time at which the record began, so that a prompt changes one number, not that of all nodes.

    Attributes:
        weight: of a second in ``busy``: their product is the share of its time for which a node was busy.
        usual: seconds that a prompt took, on average over all nodes.
    """

    def __init__(self) -> None:
        self._busy: dict[str, float] = {}
        self._seconds = self._prompts = 0.0
        self._origin: float | None = None
        self._latest = self._began = 0.0
        self.weight = self.usual = 0.0

    @property
    def busy(self) -> Mapping[str, float]:
        """By node's name; of those that did nothing lately there is none."""
        return self._busy

    def share(self, node: str) -> float:
        """Of its time, for which a node was busy."""
        return self._busy.get(node, 0.0) * self.weight

    def add(self, node: str, seconds: float, ended: float) -> None:
        """A node computed a prompt for so long. ``ended``: monotonic seconds."""
        if self._origin is None:
            self._origin = self._began = self._latest = ended - seconds
        self._latest = max(ended, self._latest)
        if self._latest - self._origin > MOST_EXPONENT * MEMORY:
            self._rebase()
        grown = math.exp((self._latest - self._origin) / MEMORY)
        self._busy[node] = self._busy.get(node, 0.0) + seconds * grown
        self._seconds += seconds * grown
        self._prompts += grown
        seen = MEMORY * -math.expm1((self._began - self._latest) / MEMORY)
        self.weight = 1 / (grown * (seen + FIRST_SECONDS))
        self.usual = self._seconds / (self._prompts + FIRST_PROMPTS * grown)

    def _rebase(self) -> None:
        """All as of now, so that no number grows for ever."""
        assert self._origin is not None
        shrunk = math.exp((self._origin - self._latest) / MEMORY)
        self._origin = self._latest
        kept = ((name, seconds * shrunk) for name, seconds in self._busy.items())
        self._busy = {name: seconds for name, seconds in kept if seconds >= LEAST_SECONDS}
        self._seconds *= shrunk
        self._prompts *= shrunk
