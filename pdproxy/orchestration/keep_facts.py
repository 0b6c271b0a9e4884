"""Keeps, as a request's record tells of them: values."""

import msgspec

from pdproxy.observe.labels import KeepForget, KeepOutcome, KeepTurn
from pdproxy.reasons import KeepReason


class KeepFacts(msgspec.Struct):
    """The keeps of one prompt, and what became of them, for its record.

    Attributes:
        asked: why a node was asked to keep the conversation; None where none was.
        seconds: for which it was asked to.
        outcome: the answer, or why no node was asked.
        tokens: that it keeps.
        turn: where this turn of a kept conversation went; None where the conversation was not kept.
        hit: tokens of the prompt that it had kept.
        forgotten: why other places are to forget it; None where none is.
    """

    asked: KeepReason | None = None
    seconds: float = 0.0
    outcome: KeepOutcome | None = None
    tokens: int = 0
    turn: KeepTurn | None = None
    hit: int = 0
    forgotten: KeepForget | None = None

    def facts(self) -> dict[str, str | int | float]:
        """For a log line and a span; empty where no keep was involved."""
        found: dict[str, str | int | float] = {}
        if self.asked is not None:
            found |= {"keep_asked": self.asked.value, "keep_seconds": round(self.seconds, 1)}
        if self.outcome is not None:
            found["keep_outcome"] = self.outcome.value
        if self.tokens:
            found["keep_tokens"] = self.tokens
        if self.turn is not None:
            found |= {"keep_turn": self.turn.value, "keep_hit": self.hit}
        if self.forgotten is not None:
            found["keep_forgotten"] = self.forgotten.value
        return found
