"""The keeps of a simulated node, of conversations and of prompts that wait, as of this project's connector. Pure.

Both are orders of eviction (`HybridCache.hold`): they hold up nothing. If all that is left is held, keeps go first:
those whose time is over, then the one whose age times blocks for each token is largest; then what waiting prompts hold,
the last one's first. A full share takes a further keep only in the place of overdue ones. A node with vLLM's own
connector has none of this.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from deploy.bench.hybrid_cache import CacheShape, HashedPrompt, Hold, HybridCache

OVERDUE, PAUSES = 4.0, 8
"""As of `connector.keeps`, which needs vLLM."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Keep:
    hold: Hold
    since: float
    until: float

    def cheapness(self, now: float) -> tuple[bool, float]:
        """The larger, the sooner it is given up."""
        return now >= self.until, (now - self.since) * self.hold.blocks / max(1, self.hold.tokens)


class NodeKeeps:
    """The keeps of one node, and its cache.

    Args:
        share: of the cache's blocks, for all keeps; 0: nothing is kept, and nothing held for prompts that wait.
        now: seconds.
    """

    def __init__(self, shape: CacheShape, share: float, now: Callable[[], float]) -> None:
        self.cache = HybridCache(shape, self._give_up)
        self._room = int(share * shape.blocks)
        self._now = now
        self._keeps: dict[str, _Keep] = {}
        self._waiting: dict[int, Hold] = {}
        self._pause = math.inf
        """The mean time after which the latest next turns came."""

    def wait(self, prompt: HashedPrompt) -> None:
        """A prompt has come: what it will resume from is held until it is computed."""
        if self._room:
            found = self._waiting[id(prompt)] = self.cache.resumable(prompt)
            self.cache.hold(found)

    def compute(self, prompt: HashedPrompt, order: Mapping[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """The prompt's turn: how many of its tokens are computed, and what is told of its keep.

        ``order``: the field ``pdproxy_keep`` of its leg.
        """
        if (held := self._waiting.pop(id(prompt), None)) is not None:
            self.cache.release(held)
        keep = None if order is None else self._keeps.pop(str(order["id"]), None)
        if keep is not None:
            self.cache.release(keep.hold)
            self._came_back(self._now() - keep.since)
        computed = self.cache.compute(prompt)
        if order is None or not self._room:
            return computed, {}
        hit = min(prompt.tokens - computed, keep.hold.tokens) if keep is not None else 0
        hold, why = self.cache.resumable(prompt, ended=True), ""
        if not order["seconds"]:
            why = "not_asked"
        elif not hold.tokens:
            why = "nothing_cached"
        elif not self._make_room(hold):
            why = "too_large"
        else:
            now = self._now()
            self._keeps[str(order["id"])] = _Keep(hold, now, now + order["seconds"])
            self.cache.hold(hold)
        kept = Hold((), 0, 0) if why else hold
        return computed, {"hit": hit, "tokens": kept.tokens, "blocks": kept.blocks, "why": why}

    def forget(self, ids: Iterable[str]) -> None:
        """End the keeps of these conversations."""
        for each in ids:
            self._end(each)

    def _make_room(self, hold: Hold) -> bool:
        if hold.blocks > self._room:
            return False
        while self.cache.held_with(hold, (keep.hold for keep in self._keeps.values())) > self._room:
            overdue = self._overdue()
            if not overdue:
                return False
            self._end_cheapest(overdue)
        return True

    def _overdue(self) -> list[str]:
        now, longest = self._now(), OVERDUE * self._pause
        return [name for name, keep in self._keeps.items() if now - keep.since > longest or now >= keep.until]

    def _came_back(self, pause: float) -> None:
        known = self._pause < math.inf
        self._pause = self._pause + (pause - self._pause) / PAUSES if known else pause

    def _end_cheapest(self, among: Iterable[str]) -> None:
        now = self._now()
        self._end(max(among, key=lambda each: self._keeps[each].cheapness(now)))

    def _end(self, name: str) -> None:
        keep = self._keeps.pop(name, None)
        if keep is not None:
            self.cache.release(keep.hold)

    def _give_up(self) -> None:
        if self._keeps:
            self._end_cheapest(self._keeps)
        else:
            _, hold = self._waiting.popitem()
            self.cache.release(hold)
