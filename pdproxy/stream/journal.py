"""The journal of a stream: what its node has generated so far, told beside the events, record by record. Pure.

A node's endpoint plugin writes it on the route ``/v1/pdproxy/streams``. After the events of a group of outputs, in the
same write, comes a block of one comment line::

    data: {"id":…}\\n\\n: pdproxy [1,[[[0,[1234]]]]]\\n\\n

``[EVENTS, GROUPS]`` or ``[EVENTS, GROUPS, NAMES]``: how many events came since the record before, which it commits, and
the outputs that they were made of. Of a record only EVENTS is looked at here; the bytes go back as they came, all
records of all legs in order, to the node that resumes the stream. That node generates from there on, and sends what
follows the last committed event.
"""

import re
from typing import NamedTuple

from pdproxy.errors import Fault, NodeFault
from pdproxy.request import NotContinuableReason
from pdproxy.stream.sse import EVENT_BYTES, LONG_REST

MOST_BYTES = 4 * 1024 * 1024
"""How much of one stream's journal is kept: a record of one token takes about 20 bytes."""
_BLOCK_END = b"\n\n"
_RECORD = b": pdproxy "
_NEXT_RECORD = _BLOCK_END + _RECORD
_ONE_EVENT = b"[1,"
_EVENT_AND_RECORD = re.compile(rb"((?:event: [^\r\n]*\n)?data: [^\r\n]*\n\n): pdproxy (\[1,[^\r\n]*)\n\n").fullmatch


class Batch(NamedTuple):
    """Whole blocks, as they came, and the record that commits them.

    ``record`` is empty where the blocks are comments alone, which wait for none.
    """

    events: bytes
    record: bytes


class RecordSplitter:
    """Takes the records out of a stream that arrives in pieces, and holds back events until their record is there.

    Lines end in LF, as the plugin writes them; no line end can stand within the data of an event, which is JSON.
    """

    def __init__(self) -> None:
        self.rest = b""
        """What no record has committed yet; of a long event only its beginning."""
        self._more: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> list[Batch]:
        """What ``piece`` completes; a `NodeFault` where more than `EVENT_BYTES` wait for a record."""
        if not self.rest and (batch := one_event(piece)) is not None:
            return [batch]
        if len(self.rest) > LONG_REST and b"\n" not in piece:  # nothing ends here: see `SseParser`
            self._more.append(piece)
            self._check_size(self._size + len(piece))
            return []
        block = b"".join((self.rest, *self._more, piece))
        batches, at = [], 0
        while (found := _first_batch(block, at)) is not None:
            batch, at = found
            batches.append(batch)
        self.rest, self._more = block[at:], []
        self._check_size(len(self.rest))
        return batches

    def _check_size(self, size: int) -> None:
        self._size = size
        if size > EVENT_BYTES:
            raise NodeFault(Fault.INVALID_BODY, "the events of the stream have no record")


def one_event(piece: bytes) -> Batch | None:
    """What nearly every piece is: one event and the record that tells of one, and nothing else."""
    found = _EVENT_AND_RECORD(piece)
    return None if found is None else Batch(*found.groups())


def _first_batch(block: bytes, start: int) -> tuple[Batch, int] | None:
    """The first batch from ``start`` on, and where it ends; None where it is not whole."""
    if block.startswith(b":", start):
        return _first_comment(block, start)
    marker = block.find(_NEXT_RECORD, start)
    if marker < 0:
        return None
    begin = marker + len(_NEXT_RECORD)
    end = block.find(_BLOCK_END, begin)
    if end < 0:
        return None
    return Batch(block[start : marker + 2], block[begin:end]), end + 2


def _first_comment(block: bytes, start: int) -> tuple[Batch, int] | None:
    """A record that commits no events, or a keep-alive."""
    end = block.find(_BLOCK_END, start)
    if end < 0:
        return None
    if block.startswith(_RECORD, start):
        return Batch(b"", block[start + len(_RECORD) : end]), end + 2
    return Batch(block[start : end + 2], b""), end + 2


class Journal:
    """The records of one stream, over all its legs.

    Attributes:
        reason: why the stream cannot be resumed from it; None where it can.
    """

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._most = most
        self._records = bytearray()
        self.reason: NotContinuableReason | None = None

    def append(self, batch: Batch) -> None:
        """A record came, and its events go to the client.

        Beyond the bound, or where a record does not tell the number of its events, the journal is given up: its memory
        is given back, and `reason` set.
        """
        if self.reason is None and not _tells_events(batch.record, batch.events):
            self._give_up(NotContinuableReason.JOURNAL_BROKEN)
        self.append_one(batch.record)

    def append_one(self, record: bytes) -> None:
        """As `append`, of a record from `one_event`, which tells the number of its events."""
        if self.reason is not None:
            return
        self._records += record
        self._records += b","
        if len(self._records) > self._most:
            self._give_up(NotContinuableReason.JOURNAL_SIZE)

    def records(self) -> bytes:
        """All records, in order, joined by commas: the inside of a JSON list."""
        return bytes(self._records[:-1])

    def _give_up(self, reason: NotContinuableReason) -> None:
        self.reason = reason
        self._records = bytearray()


def _tells_events(record: bytes, blocks: bytes) -> bool:
    """Whether a record tells right how many of the blocks have data."""
    if blocks.find(_BLOCK_END) == len(blocks) - 2 and not blocks.startswith(b":"):
        return record.startswith(_ONE_EVENT)
    events = sum(not block.startswith(b":") for block in blocks.split(_BLOCK_END) if block)
    return record.startswith(b"[%d," % events)
