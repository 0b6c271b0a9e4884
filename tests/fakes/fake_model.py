"""The fake model: a pure function from all token ids so far to the next one, and from token ids to text.

A stream that was continued elsewhere can therefore be checked token by token. Like a real detokenizer, it has tokens
that are half a character (no text until the next one), and it holds text back for stop strings.
"""

import dataclasses
import itertools
import zlib
from collections.abc import Iterator, Sequence

HALF = 11
"""Ids that this divides are half a character."""
BROKEN = "<broken>"
"""The text that comes out where a prompt ends in half a character: a continuation must never begin there."""


def tokenize(text: str) -> list[int]:
    """One id a word; never a half character."""
    ids = [3 + zlib.crc32(word.encode()) % 997 for word in text.split()] or [3]
    return [token + 1 if token % HALF == 0 else token for token in ids]


def next_tokens(prompt: Sequence[int], choice: int = 0) -> Iterator[int]:
    """The tokens after ``prompt``, without an end; each choice of a request has other ones."""
    state = 17 + choice
    for token in prompt:
        state = (state * 31 + token) % 100003
    while True:
        token = 3 + state % 997
        yield token
        state = (state * 31 + token) % 100003


class Detokenizer:
    """The text of generated tokens; half a character at the end is not there yet."""

    def __init__(self) -> None:
        self._halves = 0

    def text(self, tokens: Sequence[int]) -> str:
        """The text that these tokens add."""
        added = []
        for token in tokens:
            if token % HALF == 0:
                self._halves += 1
            else:
                added.append(f"{'é' * self._halves} t{token}")
                self._halves = 0
        return "".join(added)


@dataclasses.dataclass(frozen=True, slots=True)
class Generated:
    """One step of generation: tokens, the text that came out, and why it ended (None: it goes on)."""

    tokens: list[int]
    text: str
    finish: str | None = None
    stop: str | None = None


def generate(
    prompt: Sequence[int], count: int, stops: Sequence[str] = (), burst: int = 1, choice: int = 0
) -> Iterator[Generated]:
    """The answer in steps of ``burst`` tokens, ended by ``count`` (length) or a stop string."""
    text, tokens = ChoiceText(prompt, count, stops), next_tokens(prompt, choice)
    while text.left:
        yield text.feed(list(itertools.islice(tokens, min(burst, text.left))))


class ChoiceText:
    """The text of one choice as its tokens come.

    Attributes:
        left: tokens that may still come; 0 after the end.
        produced: tokens that came.
    """

    def __init__(self, prompt: Sequence[int], count: int, stops: Sequence[str] = ()) -> None:
        self._stops = stops
        self._held = max((len(stop) - 1 for stop in stops), default=0)
        self._text = BROKEN if prompt and prompt[-1] % HALF == 0 else ""
        self._shown = 0
        self._detokenizer = Detokenizer()
        self.left = count
        self.produced = 0

    def feed(self, step: list[int]) -> Generated:
        """The outputs of the next tokens."""
        self.produced += len(step)
        self.left -= len(step)
        self._text += self._detokenizer.text(step)
        text, shown = self._text, self._shown
        hit = min(((text.find(stop), stop) for stop in self._stops if stop in text), default=None)
        if hit is not None:
            self.left = 0
            return Generated(step, text[shown : hit[0]], "stop", hit[1])
        self._shown = len(text) if not self.left else max(shown, len(text) - self._held)
        return Generated(step, text[shown : self._shown], None if self.left else "length")
