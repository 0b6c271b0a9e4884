"""Prompts that a node has tokenized, kept as their block hashes: bounded, and compared with each other. Pure."""

import bisect
import dataclasses
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from pdproxy.planning.block_hashes import HashScheme

HashesByScheme: TypeAlias = Mapping[HashScheme, Sequence[int]]
"""The hashes of one prompt: one for each whole unit of each scheme."""
MOST_HASHES = 1 << 20
"""Kept of all prompts: 8 MiB, of prompts with 16 million tokens where a hash is made of 16."""
_OVERHEAD = 64
"""Hashes that have the size of what else is kept of each prompt."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rendering:
    """A prompt as its tokens are.

    Attributes:
        text: the length of the text that it was rendered from, in bytes.
    """

    tokens: int
    text: int
    hashes: HashesByScheme

    @property
    def unit(self) -> int:
        """Tokens to which two renderings can be compared: of the scheme with the smallest unit; 0 without any."""
        return min((scheme.unit for scheme in self.hashes), default=0)

    def common(self, other: "Rendering") -> int:
        """With how many tokens both begin, in whole units: each hash stands for all tokens before it."""
        return max((self._common(other, scheme) for scheme in self.hashes if scheme in other.hashes), default=0)

    def _common(self, other: "Rendering", scheme: HashScheme) -> int:
        mine, theirs = self.hashes[scheme], other.hashes[scheme]
        both = range(min(len(mine), len(theirs)))
        return scheme.unit * bisect.bisect_left(both, True, key=lambda at: mine[at] != theirs[at])


@dataclasses.dataclass(frozen=True, slots=True)
class KnownPrefix:
    """The part of a prompt that is known by its text.

    Attributes:
        prompt: about how many tokens it has; exactly, where all of it is known.
        met: of these, about how many belong to text that was met before.
        tokens: of these, how many surely have the hashes of ``rendering``; 0 for none.
        rendering: an earlier prompt's that begins so; this very prompt's, where all of it is known.
    """

    prompt: int
    met: int = 0
    tokens: int = 0
    rendering: Rendering | None = None

    @property
    def whole(self) -> bool:
        """All of it is known."""
        return self.tokens == self.prompt and self.rendering is not None


class Renderings:
    """The last ones, by a number for each prompt."""

    def __init__(self, most_hashes: int = MOST_HASHES) -> None:
        self._most_hashes = most_hashes
        self._kept: OrderedDict[int, Rendering] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, prompt: int) -> Rendering | None:
        """None where it was never kept, or is no more. It then counts as used."""
        found = self._kept.get(prompt)
        if found is not None:
            self._kept.move_to_end(prompt)
        return found

    def keep(self, prompt: int, rendering: Rendering) -> None:
        """In the place of an earlier one; those that were not used for longest are dropped."""
        self.drop(prompt)
        self._kept[prompt] = rendering
        self._size += _size(rendering)
        while self._size > self._most_hashes:
            self.drop(next(iter(self._kept)))

    def drop(self, prompt: int) -> None:
        """Keep it no longer."""
        dropped = self._kept.pop(prompt, None)
        if dropped is not None:
            self._size -= _size(dropped)


def _size(rendering: Rendering) -> int:
    return _OVERHEAD + sum(map(len, rendering.hashes.values()))
