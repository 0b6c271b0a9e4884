"""The prefix cache of a fake node of a hybrid model, which tells of every change as vLLM's KV events do.

It keeps what `PrefixIndex.after_prefill` says that vLLM keeps: every whole attention block, the last unit before the
prompt's last token, and one state there. What was not used for longest is evicted first. It is written apart from the
index, so that a soak can hold one against the other.
"""

import collections
from collections.abc import Callable, Sequence

from pdproxy.planning.block_hashes import HashAlgorithm, HashScheme, PromptHasher, root_hash
from tests.events.publisher import Event, removed, stored
from tests.fakes.prompt_cache import PromptCache

UNIT, BLOCK = 4, 8
"""Tokens for each hash, and in an attention block."""
ATTENTION, STATE = 0, 1
"""Groups of the cache."""
KINDS = ("full_attention", "mamba")
SCHEME = HashScheme(HashAlgorithm.SHA256_CBOR, UNIT, BLOCK, root_hash(HashAlgorithm.SHA256_CBOR), states=True)


class EventCache(PromptCache):
    """``most``: blocks of both groups together; ``tell``: takes the events of one prompt."""

    def __init__(self, most: int, tell: Callable[[list[Event]], None]) -> None:
        super().__init__()
        self._most = most
        self._tell = tell
        self._hasher = PromptHasher(SCHEME)
        self._blocks = collections.OrderedDict[tuple[int, int], None]()

    def compute(self, prompt: Sequence[int]) -> int:
        """The node computes a prompt: how many of its tokens it had not to."""
        cached = self.cached(prompt)
        self.keep(prompt)
        return cached

    def keep(self, prompt: Sequence[int]) -> None:
        """All of the prompt is cached now, and a state at its last boundary."""
        hashes, last = self.hashes(prompt), (len(prompt) - 1) // UNIT
        ends = {*range(BLOCK // UNIT, len(prompt) // UNIT + 1, BLOCK // UNIT), last} - {0}
        entries = [(ATTENTION, hashes[end - 1]) for end in sorted(ends)]
        entries += [(STATE, hashes[last - 1])] if last else []
        fresh = [entry for entry in entries if entry not in self._blocks]
        for entry in reversed(entries):
            self._blocks[entry] = None
            self._blocks.move_to_end(entry)
        events = [stored(block, group=group, kind=KINDS[group], size=BLOCK) for group, block in fresh]
        while len(self._blocks) > self._most:
            (group, block), _ = self._blocks.popitem(last=False)
            events.append(removed(block, group=group))
        if events:
            self._tell(events)

    def cached(self, prompt: Sequence[int]) -> int:
        """From where it could resume."""
        hashes, longest = self.hashes(prompt), (len(prompt) - 1) // UNIT
        held = [(ATTENTION, each) in self._blocks for each in hashes[:longest]]
        end, scale = 0, BLOCK // UNIT
        while end + scale <= longest and held[end + scale - 1]:
            end += scale
        end = next((at for at in range(min(end + scale - 1, longest), end, -1) if held[at - 1]), end)
        return next((at * UNIT for at in range(end, 0, -1) if (STATE, hashes[at - 1]) in self._blocks), 0)

    def clear(self) -> None:
        """The node's process ended."""
        self._blocks.clear()

    def attention(self) -> int:
        """Blocks of the attention group."""
        return sum(group == ATTENTION for group, _ in self._blocks)

    def some_block(self) -> tuple[int, int] | None:
        """Group and hash of the one that was used last."""
        return next(reversed(self._blocks), None)

    def hashes(self, prompt: Sequence[int]) -> Sequence[int]:
        """The prompt's, by this node's scheme."""
        hashes = self._hasher.hashes(prompt)
        assert hashes is not None
        return hashes
