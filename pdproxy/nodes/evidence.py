"""Which nodes may exchange tickets, by the results of their known-answer tests. Pure: times are arguments.

A test is about a pair, and one that failed does not say which of the two nodes is wrong. A third node does:

- a node that passed a test, with any other, is *proved*: nodes of one cohort that are right are right with each other;
- a pair that failed is barred until it passes;
- a node that is not proved and failed with a proved one is barred from all: it is the wrong one of the two. As soon as
  it passes with any node, only the pairs that failed stay barred.
"""

import dataclasses
from collections.abc import Collection

from pdproxy.nodes.node import Bars

Pair = tuple[str, str]
"""The names of a prefill and a decode node."""
FIRST_DELAY = 30.0
"""Seconds until a test that was not passed is repeated; doubles with each repetition."""
LONGEST_DELAY = 600.0


@dataclasses.dataclass(frozen=True, slots=True)
class Unpassed:
    """Tests in a row that were not passed: the last one's result in a sentence, and how many they are.

    ``due``: monotonic seconds from which the test may be repeated.
    """

    why: str
    times: int
    due: float


class Evidence:
    """The results so far, of nodes that are there."""

    def __init__(self) -> None:
        self._proved: set[str] = set()
        self._failed: dict[Pair, Unpassed] = {}
        self._unanswered: dict[str, Unpassed] = {}

    def proved(self, name: str) -> bool:
        """Whether the node passed a test since it joined."""
        return name in self._proved

    def due(self, now: float) -> list[Pair]:
        """Pairs that failed and are to be tested again now."""
        return [pair for pair, failure in self._failed.items() if failure.due <= now]

    def unproved_due(self, name: str, now: float) -> bool:
        """Whether a node that is neither proved nor known to be wrong is to be tested (again) now.

        One that failed with a proved node is known to be wrong: that pair is `due` to be tested again.
        """
        if name in self._proved or name in self.bars().nodes:
            return False
        return name not in self._unanswered or self._unanswered[name].due <= now

    def record_passed(self, pair: Pair) -> None:
        """A test was passed."""
        self._failed.pop(pair, None)
        for name in pair:
            self._proved.add(name)
            self._unanswered.pop(name, None)

    def record_failed(self, pair: Pair, why: str, now: float) -> None:
        """A test was failed."""
        self._failed[pair] = next_try(self._failed.get(pair), why, now)

    def record_unanswered(self, pair: Pair, why: str, now: float) -> None:
        """A test could not be made: that neither bars a pair nor ends a bar."""
        if pair in self._failed:
            self._failed[pair] = next_try(self._failed[pair], self._failed[pair].why, now)
        for name in pair:
            if name not in self._proved:
                self._unanswered[name] = next_try(self._unanswered.get(name), why, now)

    def node_joins(self, name: str, now: float, partners: Collection[str]) -> None:
        """The node joins, and may be another one than before: it must be proved, and its failures be tested at once.

        Failures with nodes other than ``partners``, which it can exchange tickets with now, are forgotten.
        """
        self._proved.discard(name)
        self._unanswered.pop(name, None)
        for pair in [pair for pair in self._failed if name in pair]:
            failure = self._failed.pop(pair)
            if any(other in partners for other in pair if other != name):
                self._failed[pair] = dataclasses.replace(failure, times=0, due=now)

    def keep_only(self, names: frozenset[str]) -> None:
        """Forget nodes that have left."""
        self._proved &= names
        self._failed = {pair: failure for pair, failure in self._failed.items() if names.issuperset(pair)}
        self._unanswered = {name: unanswered for name, unanswered in self._unanswered.items() if name in names}

    def bars(self) -> Bars:
        """The pairs and nodes that exchange no tickets, by all results so far."""
        pairs = {pair: failure.why for pair, failure in self._failed.items()}
        nodes: dict[str, str] = {}
        for (prefill, decode), failure in self._failed.items():
            for name, other in ((prefill, decode), (decode, prefill)):
                if name not in self._proved and other in self._proved:
                    nodes.setdefault(name, failure.why)
        return Bars(pairs, nodes)


def next_try(before: Unpassed | None, why: str, now: float, longest: float = LONGEST_DELAY) -> Unpassed:
    """One more time in a row that something was not passed; ``longest``: seconds until the next try at most."""
    times = 1 if before is None else before.times + 1
    return Unpassed(why, times, now + min(longest, FIRST_DELAY * 2.0 ** min(times - 1, 16)))
