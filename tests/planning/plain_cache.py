"""What a place said of its cache, kept as plainly as can be, and vLLM's look-up in that; and a prompt to look up."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdproxy.planning.cache_events import BlocksRemoved, BlocksStored, GroupKind
from pdproxy.planning.prefix import Hit

ATTENTION, STATE = GroupKind.ATTENTION, GroupKind.STATE
UNIT, BLOCK = 2, 6
PROMPT = tuple(range(100, 112))
"""Twelve hashes: four blocks of three units of two tokens."""
TOKENS = len(PROMPT) * UNIT + 1


@dataclass
class PlainCache:
    """What a place said, and how vLLM looks a prompt up in that."""

    kinds: dict[int, GroupKind] = field(default_factory=dict)
    copies: Counter[tuple[int, int]] = field(default_factory=Counter)

    def take(self, event: BlocksStored | BlocksRemoved) -> None:
        assert event.group is not None
        if isinstance(event, BlocksStored):
            self.kinds[event.group] = event.kind
            self.copies.update((event.group, each) for each in event.hashes)
            return
        for each in event.hashes:
            if self.copies[event.group, each]:
                self.copies[event.group, each] -= 1

    def has(self, kind: GroupKind, each: int) -> bool:
        groups = [group for group, known in self.kinds.items() if known is kind]
        return bool(groups) and all(self.copies[group, each] for group in groups)

    def hit(self, hashes: Sequence[int], tokens: int, *, hybrid: bool) -> Hit:
        units = [*range(UNIT, tokens, UNIT)]
        attention = 0
        while attention + BLOCK in units and self.has(ATTENTION, hashes[(attention + BLOCK) // UNIT - 1]):
            attention += BLOCK
        inside = [end for end in units if attention < end < attention + BLOCK]
        attention = max([end for end in inside if self.has(ATTENTION, hashes[end // UNIT - 1])], default=attention)
        if not hybrid:
            return Hit(attention, attention)
        states = [end for end in units if self.has(STATE, hashes[end // UNIT - 1])]
        resume = max([end for end in states if end <= attention], default=0)
        return Hit(resume if max(states, default=0) > attention else attention, resume)
