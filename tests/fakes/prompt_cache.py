"""The cached prompts of a fake node, as a hybrid model's node has them: where prompts ended, and where they parted."""

from collections.abc import Sequence


class PromptCache:
    """States after token ids: before the last token of each prompt, and at a branch point from its second meeting."""

    def __init__(self) -> None:
        self._prompts: list[tuple[int, ...]] = []
        self._states: set[tuple[int, ...]] = set()

    def compute(self, prompt: Sequence[int]) -> int:
        """The node computes a prompt: how many of its tokens it had not to."""
        cached = self.cached(prompt)
        shared = max((_common(prompt, other) for other in self._prompts), default=0)
        self._prompts.append(tuple(prompt))
        if 0 < shared < len(prompt):
            self._states.add(tuple(prompt[:shared]))
        self.keep(prompt)
        return cached

    def keep(self, prompt: Sequence[int]) -> None:
        """A state at its end."""
        self._states.add(tuple(prompt[:-1]))

    def cached(self, prompt: Sequence[int]) -> int:
        """From where it could resume."""
        ends = range(len(prompt) - 1, 0, -1)
        return next((end for end in ends if tuple(prompt[:end]) in self._states), 0)

    def clear(self) -> None:
        """The node evicts everything."""
        self._prompts.clear()
        self._states.clear()


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
