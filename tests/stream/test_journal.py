"""The kept records of a stream."""

import pytest

from pdproxy.reasons import NotContinuableReason
from pdproxy.stream.journal import Journal, record_in


def journal_of(*records: tuple[bytes, int], most: int = 1000) -> Journal:
    journal = Journal(most)
    for record, events in records:
        journal.append(record, events)
    return journal


def test_the_records_are_kept_as_they_came_and_in_order() -> None:
    odd = b'[1, [[[0, [8]]]], {"id": "\\u00e9"}]'
    journal = journal_of((b"[0,[]]", 0), (odd, 1), (b"[0,[[[0,[9]]]]]", 0))
    assert journal.records() == b"[0,[]]," + odd + b",[0,[[[0,[9]]]]]"
    assert journal.reason is None


def test_beyond_its_bound_the_journal_is_given_up_and_its_memory_back() -> None:
    record = (b"[1,[[[0,[1]]]]]", 1)
    most = len(record[0]) + 1
    assert journal_of(record, most=most).reason is None
    journal = journal_of(record, record, record, most=most)
    assert (journal.reason, journal.records()) == (NotContinuableReason.JOURNAL_SIZE, b"")


@pytest.mark.parametrize("record", [b"[2,[]]", b"[0,[]]", b"[]", b"{}", b"[01,[]]", b"nonsense"])
def test_a_record_that_does_not_tell_its_events_ends_the_journal(record: bytes) -> None:
    journal = journal_of((b"[1,[]]", 1), (record, 1), (b"[1,[]]", 1))
    assert (journal.reason, journal.records()) == (NotContinuableReason.JOURNAL_BROKEN, b"")


@pytest.mark.parametrize(
    ("block", "record"),
    [(b": pdproxy [1,[]]\n\n", b"[1,[]]"), (b": keep-alive\n\n", None), (b'data: ": pdproxy [1,[]]"\n\n', None)],
)
def test_a_record_is_a_comment(block: bytes, record: bytes | None) -> None:
    assert record_in(block) == record
