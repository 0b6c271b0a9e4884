"""Shares of API keys: what each may have and has running, and which run more than their share. Pure: times are given.

The order in which prompts leave the queue (`planning.queue`) is fair among those that wait, but what runs on nodes
cannot be taken back: a key that asked for everything before another one came would keep it. So while several keys
ask, one that runs more than its share leaves a part of the room free, and one that would with its next prompt gives
prefill nodes little work ahead: its next prompts wait in the queue, where those of the others pass
them. A key alone has everything.
"""

import collections
import dataclasses
import enum
from collections.abc import Mapping

PRESENT_SECONDS = 60.0
"""For so long after its last request a key counts among those that ask."""


@dataclasses.dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of all requests of one key together. None: no limit.

    Attributes:
        weight: of its share, against the other keys' weights.
        open: requests that run or wait at once; more are refused.
        concurrency: prompts that run at once; more wait.
        requests_per_minute: refused beyond it, as are tokens.
        input_tokens_per_minute: of prompts.
        output_tokens_per_minute: of answers.
        kept_tokens: of conversations that nodes are asked to keep at once; further ones are not kept.
    """

    weight: float = 1.0
    open: int | None = None
    concurrency: int | None = None
    requests_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    kept_tokens: int | None = None


NO_LIMITS = KeyLimits()


class LimitsByKey:
    """The limits of all keys by name; they may be replaced while requests run, and hold at once."""

    def __init__(self, by_name: Mapping[str, KeyLimits] | None = None) -> None:
        self._by_name = dict(by_name or {})
        self.changes = 0
        """How often they were replaced."""

    def of_key(self, key: str) -> KeyLimits:
        """The limits of a key."""
        return self._by_name.get(key, NO_LIMITS)

    def replace(self, limits: "LimitsByKey") -> None:
        """From now on those hold."""
        self._by_name = limits._by_name
        self.changes += 1


NEWEST_PROMPT = 0.1
"""Its part in the mean length of its key's prompts."""


@dataclasses.dataclass(slots=True)
class _Asker:
    """A key that asks: when it did last, and how long its prompts are, in tokens."""

    last: float
    prompt: float


class ShareUse(enum.IntEnum):
    """How much of its share a key uses. The greater, the less it may begin."""

    WITHIN = 0
    """One more prompt of its usual size is within its share too, or nobody else asks, or it runs nothing."""
    FULL = 1
    """The key runs at most its share, and one more would be more than that."""
    OVER = 2
    """The key runs more than its share."""


class KeyShares:
    """The running prompts of each key, and the keys that ask. Every change is O(1).

    A key's share is its weight against the weights of all keys that have asked lately. What it runs is counted in
    tokens, as its prompts' costs in the queue are.
    """

    def __init__(self, limits: LimitsByKey) -> None:
        self._limits = limits
        self._asked = collections.OrderedDict[str, _Asker]()
        """The one that asked longest ago is first."""
        self._prompts = 0.0
        """The sum of their lengths, one for each key."""
        self._costs: dict[str, float] = {}
        self._running: dict[str, int] = {}
        self._total = 0.0
        self._weights = (-1, -1, 0.0)
        """The sum of the weights of all keys that ask, and the changes of limits and of keys for which it holds."""
        self._joined = 0

    def running(self, key: str) -> int:
        """How many prompts of a key run."""
        return self._running.get(key, 0)

    def may_run(self, key: str) -> bool:
        """Whether its own limit lets one more run."""
        most = self._limits.of_key(key).concurrency
        return most is None or self.running(key) < most

    def asked(self, key: str, now: float, prompt: int = 0) -> None:
        """A prompt of a key has come, of about so many tokens."""
        asker = self._asked.get(key)
        if asker is None:
            self._asked[key] = _Asker(now, prompt)
            self._prompts += prompt
            self._joined += 1
            return
        asker.last = now
        longer = NEWEST_PROMPT * (prompt - asker.prompt)
        asker.prompt += longer
        self._prompts += longer
        self._asked.move_to_end(key)

    def asks_longer(self, key: str) -> bool:
        """Whether a key's prompts are longer than those of all keys that ask, on the mean, each key counting once."""
        asker = self._asked.get(key)
        return asker is not None and asker.prompt * len(self._asked) > self._prompts

    def began(self, key: str, cost: float) -> None:
        """A prompt of a key runs."""
        self._running[key] = self._running.get(key, 0) + 1
        self._costs[key] = self._costs.get(key, 0.0) + cost
        self._total += cost

    def ended(self, key: str, cost: float) -> None:
        """The prompt runs no more; the same cost as it began with."""
        self._total -= cost
        if self._running[key] > 1:
            self._running[key] -= 1
            self._costs[key] -= cost
        else:
            del self._running[key], self._costs[key]
        if not self._running:
            self._total = 0.0

    def share_use(self, key: str, now: float) -> ShareUse:
        """How much a key uses of its share of all that runs."""
        if len(self._asked) < 2 or key not in self._costs:
            return ShareUse.WITHIN
        self._forget_before(now - PRESENT_SECONDS)
        if len(self._asked) < 2:
            return ShareUse.WITHIN
        cost, weight, weights = self._costs[key], self._limits.of_key(key).weight, self._all_weights()
        if cost * weights > weight * self._total:
            return ShareUse.OVER
        one = cost / self._running[key]
        return ShareUse.FULL if (cost + one) * weights > weight * (self._total + one) else ShareUse.WITHIN

    def _forget_before(self, moment: float) -> None:
        while self._asked and next(iter(self._asked.values())).last < moment:
            self._prompts -= self._asked.popitem(last=False)[1].prompt
            self._joined += 1

    def _all_weights(self) -> float:
        changes, joined, weights = self._weights
        if (changes, joined) != (self._limits.changes, self._joined):
            weights = sum(self._limits.of_key(key).weight for key in self._asked)
            self._weights = (self._limits.changes, self._joined, weights)
        return weights
