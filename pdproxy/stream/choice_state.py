"""What the client has of one choice of a streamed answer: tokens against text. Pure.

Text lags behind tokens. vLLM holds back as many characters as a stop string could still take away (`held_back`), and a
character whose bytes are spread over several tokens comes with the last of them. A stream may go on elsewhere only from
a token whose whole text the client has; so each boundary between tokens is kept with the length of *all* text up to it:
what was sent plus what was held back (vLLM 0.32, ``v1/engine/detokenizer.py``, ``get_next_output_text``).

An event of one token that brought text ends on a whole character. An event of several (speculation, a slow reader) may
end inside one; it did not if the text goes on with an ASCII character, for the rest of a torn one never is.
"""

import dataclasses
from typing import NamedTuple

from pdproxy.errors import PdproxyError
from pdproxy.request import NotContinuableReason


class NotContinuable(PdproxyError):
    """The stream cannot be continued on another node."""

    def __init__(self, reason: NotContinuableReason) -> None:
        super().__init__(f"the stream cannot be continued exactly: {reason}")
        self.reason = reason


class TokenBoundary(NamedTuple):
    """A boundary between tokens: their number before it, the length of their text, and whether it ends a character."""

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
        received: characters that the node sent; less than ``shown`` while a continuation repeats known text.
        detailed: log-probabilities or ids of single tokens reached the client.
        next_offset: where the next token's text begins, by the offsets of the log-probabilities; 0 if unknown.
        base_offset: what is added to the offsets of a continuation's log-probabilities.
    """

    held_back: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    shown: int = 0
    received: int = 0
    detailed: bool = False
    next_offset: int = 0
    base_offset: int = 0
    _boundaries: list[TokenBoundary] = dataclasses.field(default_factory=lambda: [TokenBoundary(0, 0, whole=True)])
    _tail: str = ""
    """The shown text from the first boundary on."""
    _here: int = 0
    """Tokens up to a boundary where ``shown`` ends, not in the list yet; 0: there is none."""

    def append(self, text: str, token_ids: list[int]) -> str:
        """Take an event's text and ids; the part of the text that is new to the client.

        A continuation that should repeat known text and brings another is `NotContinuable`.
        """
        self.tokens += token_ids
        if not text:
            return ""
        if not self.held_back and len(token_ids) == 1 and self.received == self.shown:
            # The common case: one token, nothing held back, nothing repeated. The boundary is here.
            self.shown = self.received = self.received + len(text)
            self._here = len(self.tokens)
            return text
        self._note_boundary()
        new = self._new_part(text)
        self.received += len(text)
        self.shown = max(self.shown, self.received)
        self._tail += new
        length = self.received + self.held_back
        self._boundaries.append(TokenBoundary(len(self.tokens), length, whole=len(token_ids) == 1))
        self._forget()
        return new

    def boundary(self) -> tuple[int, str]:
        """The last token whose whole text the client has, as a count; and the text shown beyond it."""
        self._note_boundary()
        return self._boundaries[0].tokens, self._tail

    def rewind(self) -> None:
        """The next events continue from `boundary`."""
        self._note_boundary()
        boundary = self._boundaries[0]
        del self.tokens[boundary.tokens :]
        self._boundaries = [boundary]
        self.received = boundary.length
        self.base_offset = self.next_offset

    def caught_up(self) -> bool:
        """Whether a continuation has repeated all known text."""
        return self.received >= self.shown

    def _note_boundary(self) -> None:
        if self._here:
            self._boundaries, self._tail = [TokenBoundary(self._here, self.shown, whole=True)], ""
            self._here = 0

    def _new_part(self, text: str) -> str:
        known = self._tail[len(self._tail) - (self.shown - self.received) :] if self.received < self.shown else ""
        common = min(len(known), len(text))
        if known[:common] != text[:common]:
            raise NotContinuable(NotContinuableReason.DIVERGED)
        return text[common:]

    def _forget(self) -> None:
        """Drop boundaries before the last usable one, and the text before it."""
        start = self._boundaries[0].length
        usable = [at for at, boundary in enumerate(self._boundaries) if at and self._usable(boundary, start)]
        first, *later = self._boundaries[usable[-1] if usable else 0 :]
        self._boundaries = [first, *(boundary for boundary in later if boundary.length >= self.shown)]
        self._tail = self._tail[first.length - start :]

    def _usable(self, boundary: TokenBoundary, start: int) -> bool:
        if boundary.length >= self.shown:
            return boundary.whole and boundary.length == self.shown
        return boundary.whole or self._tail[boundary.length - start].isascii()
