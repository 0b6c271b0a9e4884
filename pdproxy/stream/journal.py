"""The journal of a stream: what its node has generated so far, told beside the events, record by record. Pure.

A node's endpoint plugin writes it on the route ``/v1/pdproxy/streams``. After the events of a group of outputs, in the
same write, comes a block of one comment line::

    data: {"id":…}\\n\\n: pdproxy [1,[[[0,[1234]]]]]\\n\\n

``[EVENTS, GROUPS]`` or ``[EVENTS, GROUPS, NAMES]``: how many events came since the record before, which it commits, and
the outputs that they were made of. The proxy reads only EVENTS. It sends the bytes of all records of all legs, in
order, to the node that resumes the stream. That node generates from there on, and sends what follows the last committed
event.
"""

from pdproxy.reasons import NotContinuableReason

MOST_BYTES = 4 * 1024 * 1024
"""How much of one stream's journal is kept: a record of one token takes about 20 bytes."""
_BEGIN = b": pdproxy "
ONE_EVENT = b"[1,"
"""Begins a record that commits one event."""
RECORD_OF_ONE = _BEGIN + ONE_EVENT
"""Begins its block."""
_AFTER_ONE = b"\n\n" + RECORD_OF_ONE


def record_in(block: bytes) -> bytes | None:
    """The record that a block of the stream holds; None for any other block."""
    return block[len(_BEGIN) :].rstrip(b"\r\n") if block.startswith(_BEGIN) else None


def record_of_one(piece: bytes) -> tuple[bytes, bytes] | None:
    """An event and its record, where a piece is both and nothing else.

    The mark begins with a line end, which cannot stand within the data of an event: that is JSON.
    """
    at = piece.find(_AFTER_ONE) + 2
    stop = len(piece) - 2
    if at < 2 or piece.find(b"\n\n", at) != stop:
        return None
    return piece[:at], piece[at + len(_BEGIN) : stop]


class Journal:
    """The records of one stream, over all its legs.

    Attributes:
        kept: the records, in order, a comma behind each; a `scan.Scan` appends to it as well.
        most: bytes of them that are kept: none once it is given up.
        reason: why the stream cannot be resumed from it; None where it can.
    """

    __slots__ = ("kept", "most", "reason")

    def __init__(self, most: int = MOST_BYTES) -> None:
        self.kept = bytearray()
        self.most = most
        self.reason: NotContinuableReason | None = None

    def append(self, record: bytes, events: int) -> None:
        """A record came, and the events that it commits, so many, go to the client.

        Beyond the bound, or where the record does not tell the number of its events, the journal is given up: its
        memory is given back, and `reason` set.
        """
        if not record.startswith(b"[%d," % events):
            self._give_up(NotContinuableReason.JOURNAL_BROKEN)
        self.append_right(record)

    def append_right(self, record: bytes) -> None:
        """As `append`, of a record, or several joined by commas, that are known to tell the number of their events."""
        if self.reason is not None:
            return
        self.kept += record
        self.kept += b","
        if len(self.kept) > self.most:
            self._give_up(NotContinuableReason.JOURNAL_SIZE)

    def records(self) -> bytes:
        """All records, in order, joined by commas: the inside of a JSON list."""
        return bytes(self.kept[:-1])

    def _give_up(self, reason: NotContinuableReason) -> None:
        if self.reason is None:
            self.reason, self.kept, self.most = reason, bytearray(), 0
