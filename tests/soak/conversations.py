"""Prompts that grow: conversations with few beginnings, each turn of which contains the ones before."""

import random

from tests.soak.asking import VOCABULARY

OPENINGS, OPEN = 4, 24
"""Different beginnings, and conversations that are held at a time."""
LONGEST = 350
"""Words of a conversation before another one takes its place."""


class Conversations:
    """Shared by all clients: two may take turns in one conversation, or ask the same."""

    def __init__(self, seed: int) -> None:
        dice = random.Random(seed)
        self._openings = [_words(dice, 40) for _ in range(OPENINGS)]
        self._held = [""] * OPEN

    def prompt(self, dice: random.Random) -> str:
        """The next turn of any."""
        at = dice.randrange(OPEN)
        before = self._held[at]
        if not before or len(before.split()) > LONGEST:
            before = dice.choice(self._openings)
        turn = before if dice.random() < 0.1 else f"{before} {_words(dice, dice.randint(1, 40))}"
        self._held[at] = turn
        return turn


def _words(dice: random.Random, number: int) -> str:
    return " ".join(dice.choices(VOCABULARY, k=number))
