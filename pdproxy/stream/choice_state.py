"""What one choice of a streamed answer has said: pure bookkeeping of tokens against text.

Text lags behind tokens. vLLM holds back as many characters as a stop string could still take away (`held_back`), and a
character whose bytes are spread over several tokens comes with the last of them. A stream may go on elsewhere only from
a token whose whole text the client has; so each boundary between tokens is kept with the length of *all* text up to it:
what was sent plus what was held back (vLLM 0.32, ``v1/engine/detokenizer.py``, ``get_next_output_text``).

An event of one token that brought text ends on a whole character. An event of several (speculation, a slow reader) may
end inside one; it did not if the text goes on with an ASCII character, for the rest of a torn one never is.
"""

import dataclasses
from typing import NamedTuple


class Diverged(ValueError):
    """A continuation's text is not what the client already has."""


class TokenBoundary(NamedTuple):
    """A boundary between tokens: how many, the length of all text up to it, and whether it ends a character."""

    tokens: int
    length: int
    whole: bool


@dataclasses.dataclass(slots=True)
class ChoiceState:
    """One choice.

    Attributes:
        held_back: characters held back for stop strings.
        tokens: the ids so far.
        shown: characters that the client has.
        heard: characters that the node sent; less than ``shown`` while a continuation repeats what is known.
        finish: the finish reason, once there is one.
        detailed: log-probabilities or ids of single tokens reached the client.
    """

    held_back: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    shown: int = 0
    heard: int = 0
    finish: str | None = None
    detailed: bool = False
    next_offset: int = 0
    base_offset: int = 0
    _marks: list[TokenBoundary] = dataclasses.field(default_factory=lambda: [TokenBoundary(0, 0, whole=True)])
    _tail: str = ""
    """The shown text from the first mark on."""
    _here: int = 0
    """Tokens up to a boundary where ``shown`` ends, not among the marks yet; 0: there is none."""

    def hear(self, text: str, token_ids: list[int]) -> str:
        """Take what one event said; what of its text is new to the client.

        Raises:
            Diverged: while a continuation repeats known text, and it is another.
        """
        self.tokens += token_ids
        if not text:
            return ""
        if not self.held_back and len(token_ids) == 1 and self.heard == self.shown:
            # The common case: one token, nothing held back, nothing repeated. The boundary is here.
            self.shown = self.heard = self.heard + len(text)
            self._here = len(self.tokens)
            return text
        self._mark_here()
        new = self._new_part(text)
        self.heard += len(text)
        self.shown = max(self.shown, self.heard)
        self._tail += new
        self._marks.append(TokenBoundary(len(self.tokens), self.heard + self.held_back, whole=len(token_ids) == 1))
        self._forget()
        return new

    def boundary(self) -> tuple[int, str]:
        """The last token whose whole text the client has, as a count; and the text shown beyond it."""
        self._mark_here()
        return self._marks[0].tokens, self._tail

    def rewind(self) -> None:
        """The next events continue from `boundary`."""
        self._mark_here()
        mark = self._marks[0]
        del self.tokens[mark.tokens :]
        self._marks = [mark]
        self.heard = mark.length
        self.base_offset = self.next_offset

    def settled(self) -> bool:
        """Whether no known text is left to be repeated."""
        return self.heard >= self.shown

    def _mark_here(self) -> None:
        if self._here:
            self._marks, self._tail = [TokenBoundary(self._here, self.shown, whole=True)], ""
            self._here = 0

    def _new_part(self, text: str) -> str:
        known = self._tail[len(self._tail) - (self.shown - self.heard) :] if self.heard < self.shown else ""
        common = min(len(known), len(text))
        if known[:common] != text[:common]:
            raise Diverged(f"expected {known[:common]!r}, got {text[:common]!r}")
        return text[common:]

    def _forget(self) -> None:
        """Drop boundaries before the last usable one, and the text before it."""
        start = self._marks[0].length
        last = max((at for at, mark in enumerate(self._marks) if at and self._usable(mark, start)), default=0)
        self._marks = [self._marks[last], *(mark for mark in self._marks[last + 1 :] if mark.length >= self.shown)]
        self._tail = self._tail[self._marks[0].length - start :]

    def _usable(self, mark: TokenBoundary, start: int) -> bool:
        if mark.length >= self.shown:
            return mark.whole and mark.length == self.shown
        return mark.whole or self._tail[mark.length - start].isascii()
