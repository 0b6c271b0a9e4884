"""Whether the batches of one publisher come in their order, all of them, from one and the same engine. Pure.

A publisher numbers its batches from 0 on. Batches may be lost (the publisher drops what a slow subscriber does not
take, and sends nothing of what was before to one that connects later), come twice (in a replay and by themselves), and
begin again at 0 (the node was restarted, at the same port).
"""

import dataclasses
import enum


class Position(enum.StrEnum):
    """Where a batch stands after those that were applied."""

    NEXT = "next"
    DUPLICATE = "duplicate"
    """The batch was applied already."""
    GAP = "gap"
    """Others before it are missing."""
    RESTARTED = "restarted"
    """The batch is of another engine: this one sent a batch of that number earlier than its last one."""


@dataclasses.dataclass(slots=True)
class BatchOrder:
    """The batches that were applied.

    Attributes:
        last: the sequence number of the last batch; -1 before the first.
        time: when that was published, by the node's clock.
        fingerprint: tells it from a batch of another engine with that number.
    """

    last: int = -1
    time: float = float("-inf")
    fingerprint: float = 0

    @property
    def begun(self) -> bool:
        """Whether any batch was applied."""
        return self.last >= 0

    def position(self, sequence: int, time: float) -> Position:
        """Where a batch stands that was published then."""
        if sequence == self.last + 1:
            return Position.NEXT
        if sequence > self.last:
            return Position.GAP
        return Position.DUPLICATE if time <= self.time else Position.RESTARTED

    def is_last(self, sequence: int, fingerprint: float) -> bool:
        """Whether it is the very batch that was applied last: the publisher is the same engine as before."""
        return (sequence, fingerprint) == (self.last, self.fingerprint)

    def applied(self, sequence: int, time: float, fingerprint: float) -> None:
        """A batch was applied, whatever is missing before it."""
        self.last, self.time, self.fingerprint = sequence, time, fingerprint
