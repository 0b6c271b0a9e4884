"""Which nodes may exchange tickets, by what their known-answer tests showed: pure bookkeeping that is told the time.

A test is about a pair, and one that failed does not say which of the two is wrong. What tells is a third node:

- a node that passed a test, with anybody, is *proved*: nodes of one cohort that are right are right with each other;
- a pair that failed is barred until it passes;
- a node that is not proved and failed with a proved one is barred from everybody: it is the odd one of the two. As soon
  as it passes with any node, only the pairs that failed stay barred.
"""

import dataclasses
from collections.abc import Collection
from types import MappingProxyType

from pdproxy.nodes.node import Bars

Pair = tuple[str, str]
"""The names of a prefill and a decode node."""


@dataclasses.dataclass(frozen=True, slots=True)
class Backoff:
    """When a test that came to nothing good is made again: seconds, doubling from `first` to `longest`."""

    first: float = 30.0
    longest: float = 600.0

    def delay(self, times: int) -> float:
        """The wait after so many tries in a row, >= 1."""
        return float(min(self.longest, self.first * 2.0 ** min(times - 1, 16)))


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """Tests that came to nothing good.

    Attributes:
        why: what the last one showed, a sentence.
        times: how many in a row.
        due: monotonic seconds from which it may be tried again.
    """

    why: str
    times: int
    due: float


class Evidence:
    """What is known of the nodes that are there."""

    def __init__(self, backoff: Backoff | None = None) -> None:
        self._backoff = backoff or Backoff()
        self._proved: set[str] = set()
        self._failed: dict[Pair, Trial] = {}
        self._unanswered: dict[str, Trial] = {}

    def proved(self, name: str) -> bool:
        """Whether the node passed a test since it joined."""
        return name in self._proved

    def failed(self, pair: Pair) -> Trial | None:
        """The pair's failure, while it lasts."""
        return self._failed.get(pair)

    def due(self, now: float) -> list[Pair]:
        """Pairs that failed and are to be tried again now."""
        return [pair for pair, trial in self._failed.items() if trial.due <= now]

    def unproved_due(self, name: str, now: float) -> bool:
        """Whether a node of which it is not known if it is right or wrong is to be tried (again) now.

        Of one that failed with a proved node it is known: that pair is `due` to be tried again.
        """
        if name in self._proved or name in self.bars().nodes:
            return False
        return name not in self._unanswered or self._unanswered[name].due <= now

    def passes(self, pair: Pair) -> None:
        """A test was passed."""
        self._failed.pop(pair, None)
        for name in pair:
            self._proved.add(name)
            self._unanswered.pop(name, None)

    def fails(self, pair: Pair, why: str, now: float) -> None:
        """A test was failed."""
        self._failed[pair] = self._next(self._failed.get(pair), why, now)

    def is_silent(self, pair: Pair, why: str, now: float) -> None:
        """A test could not be made: that is no reason to keep anybody apart, nor to end a bar."""
        if pair in self._failed:
            self._failed[pair] = self._next(self._failed[pair], self._failed[pair].why, now)
        for name in pair:
            if name not in self._proved:
                self._unanswered[name] = self._next(self._unanswered.get(name), why, now)

    def starts_anew(self, name: str, now: float, fellows: Collection[str]) -> None:
        """The node joins, and may be another one than before: it must be proved, and its failures be tried at once.

        Failures with others than ``fellows``, the nodes that it could exchange tickets with, mean nothing any more.
        """
        self._proved.discard(name)
        self._unanswered.pop(name, None)
        for pair in [pair for pair in self._failed if name in pair]:
            other = pair[0] if pair[1] == name else pair[1]
            trial = self._failed.pop(pair)
            if other in fellows:
                self._failed[pair] = dataclasses.replace(trial, times=0, due=now)

    def keep_only(self, names: frozenset[str]) -> None:
        """Forget nodes that have left."""
        self._proved &= names
        self._failed = {pair: trial for pair, trial in self._failed.items() if names.issuperset(pair)}
        self._unanswered = {name: trial for name, trial in self._unanswered.items() if name in names}

    def bars(self) -> Bars:
        """Who exchanges no tickets, by all that is known now."""
        pairs = {pair: trial.why for pair, trial in self._failed.items()}
        nodes: dict[str, str] = {}
        for (prefill, decode), trial in self._failed.items():
            for name, other in ((prefill, decode), (decode, prefill)):
                if name not in self._proved and other in self._proved:
                    nodes.setdefault(name, trial.why)
        return Bars(MappingProxyType(pairs), MappingProxyType(nodes))

    def _next(self, before: Trial | None, why: str, now: float) -> Trial:
        times = 1 if before is None else before.times + 1
        return Trial(why, times, now + self._backoff.delay(times))
