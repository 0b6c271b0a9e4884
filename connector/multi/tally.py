"""How often each child was asked and won, until vLLM's pipeline carries it to the API server."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

COUNTERS: Mapping[str, str] = MappingProxyType(
    {
        "child_queries": "Requests for which a child was asked whether it has their prefix: wins, losses and misses.",
        "child_wins": "Requests whose prefix a child was chosen to load.",
        "child_losses": "Requests for which a child had something, and another child or the local cache had more.",
        "child_misses": "Requests for which a child had nothing, or did not say so in time.",
        "child_tokens_won": "Prompt tokens that a child was chosen to load.",
        "child_failed_loads": "Loads that a child began and could not finish.",
    }
)
"""Every counter, all with the label `child`."""


@dataclass(frozen=True)
class Balance:
    """Since the last drain: `counts` holds `[counter, child, increment > 0]`; `pending`, loads on their way by child,
    is what is true now, and empty if it has not changed. Lists and dicts, since they travel as msgpack."""

    counts: list[tuple[str, str, int]]
    pending: dict[str, int]


class Tally:
    """Adds up, in the scheduler's process. A counter only ever grows: an increment below 1 is an error of the caller
    that is left out, never subtracted."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._told: dict[str, int] = {}

    def add(self, counter: str, child: str, increment: int = 1) -> None:
        """One counter of `COUNTERS` of one child."""
        if increment > 0:
            self._counts[counter, child] += increment

    def drain(self, pending: Mapping[str, int]) -> Balance:
        """What came together; the counts start again from zero."""
        counts, self._counts = self._counts, Counter()
        changed = dict(pending) if pending != self._told else {}
        self._told = dict(pending)
        return Balance([(name, child, number) for (name, child), number in counts.items()], changed)
