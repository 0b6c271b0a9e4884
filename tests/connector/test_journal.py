"""Records as they are written and read, and the names in events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from connector.journal import (
    CACHED,
    BadRecordsError,
    JournalWriter,
    Names,
    Output,
    Record,
    ReplayError,
    notes_of,
    parse_records,
)


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"


def records_in(data: bytes) -> list[Any]:
    blocks = data.decode().split("\n\n")
    return [json.loads(block.removeprefix(": pdproxy ")) for block in blocks if block.startswith(": pdproxy ")]


def test_events_leave_with_their_record() -> None:
    journal = JournalWriter()
    assert journal.commit(()) == b""
    journal.add(event(text="a"))
    journal.add(event(text="b"))
    assert (
        journal.commit([Output(0, [5, 6])]) == event(text="a") + event(text="b") + b": pdproxy [2,[[[0,[5, 6]]]]]\n\n"
    )
    assert journal.commit([Output(0, [7])]) == b": pdproxy [0,[[[0,[7]]]]]\n\n"
    journal.add(event(text="c"))
    assert records_in(journal.commit([Output(1, [8]), Output(0, [1], "stop", 'a\n\n\u2028"')])) == [
        [1, [[[1, [8]], [0, [1], "stop", 'a\n\n\u2028"']]]]
    ]
    journal.add(b"data: [DONE]\n\n")
    assert records_in(journal.commit(())) == [[1, []]]
    assert journal.empty


def test_a_record_has_no_line_break_in_it() -> None:
    data = JournalWriter().commit([Output(0, [1], "stop", "one\ntwo\r\u2028")])
    assert data.count(b"\n") == 2
    assert data.isascii()


def test_comments_are_no_events() -> None:
    journal = JournalWriter()
    journal.add(b": keep-alive\n\n")
    journal.add(event(text="a"))
    assert records_in(journal.commit([Output(0, [5])])) == [[1, [[[0, [5]]]]]]


def test_a_journal_is_read_as_it_was_written() -> None:
    journal = JournalWriter()
    journal.add(event(id="first", created=77))
    journal.note_cached(16, 0)
    written = journal.commit([Output(0, [5]), Output(2, [6, 7], "length", None)])
    assert parse_records({"records": records_in(written)}) == [
        Record(
            1,
            [[Output(0, [5]), Output(2, [6, 7], "length", None)]],
            {"id": ["first"], "created": [77], CACHED: [16, 0]},
        )
    ]


def replayed(records: Sequence[Record], *parts: tuple[Sequence[bytes], Sequence[Output]]) -> JournalWriter:
    journal = JournalWriter(records)
    journal.commit(())
    for events, group in parts:
        for each in events:
            journal.add(each)
        assert journal.commit(group) == b""
    return journal


GROUP = [Output(0, [5])]
RECORDS = [Record(2, [GROUP], {"id": ["one"], CACHED: [16, 0]}), Record(0, [GROUP]), Record(1, [GROUP, GROUP])]


def test_what_the_client_has_is_dropped() -> None:
    two, one = [event(text="a"), event(text="b")], [event(text="c")]
    journal = replayed(RECORDS, (two, GROUP), ((), GROUP), (one, GROUP), ((), GROUP))
    assert not journal.replaying
    journal.add(event(text="d"))
    assert journal.commit(GROUP) == event(text="d") + b": pdproxy [1,[[[0,[5]]]]]\n\n"


def test_events_before_any_output_are_a_record_of_their_own() -> None:
    journal = JournalWriter([Record(1, [], {"id": ["one"]})])
    journal.add(event(id="two"))
    assert journal.commit(()) == b""
    assert not journal.replaying
    journal.add(event(id="two"))
    assert journal.commit(GROUP) == event(id="one") + b": pdproxy [1,[[[0,[5]]]]]\n\n"


@pytest.mark.parametrize("events", [0, 1, 3])
def test_other_events_than_the_client_has_are_an_error(events: int) -> None:
    with pytest.raises(ReplayError):
        replayed(RECORDS, ([event(text="a")] * events, GROUP))


def test_the_cache_of_the_first_leg_is_noted_once() -> None:
    journal = JournalWriter()
    journal.note_cached(16, None)
    assert records_in(journal.commit(GROUP))[0][2] == {CACHED: [16, None]}
    journal.note_cached(32, None)
    assert len(records_in(journal.commit(GROUP))[0]) == 2
    later = JournalWriter([Record(0, [GROUP], {CACHED: [16, None]})])
    later.note_cached(64, None)
    later.commit(())
    later.commit(GROUP)
    assert len(records_in(later.commit(GROUP))[0]) == 2
    assert notes_of([Record(0, [], {CACHED: [16, None]})], CACHED) == [16, None]


class TestNames:
    def test_of_the_first_leg_stay_and_are_noted_once(self) -> None:
        names = Names({})
        shown = event(id="a", created=5, choices=[{"tool_calls": [{"id": "call_1"}]}])
        assert names.restore(shown) == shown
        assert names.new == {"id": [b'"a"', b'"call_1"'], "created": [b"5"]}
        names.new = {}
        assert names.restore(shown) == shown
        assert names.new == {}

    def test_of_a_later_leg_are_replaced_in_their_order(self) -> None:
        names = Names({"id": [b'"a"', b'"call_1"'], "created": [b"5"]})
        first = event(id="b", created=9, model="tiny", text="x")
        assert names.restore(first) == event(id="a", created=5, model="tiny", text="x")
        assert names.restore(event(id="b", created=9, model="tiny", text="y")) == event(
            id="a", created=5, model="tiny", text="y"
        )
        later = event(id="b", created=9, choices=[{"item_id": "call_7", "call_id": "new", "signature": "call_7"}])
        assert names.restore(later) == event(
            id="a", created=5, choices=[{"item_id": "call_1", "call_id": "new", "signature": "call_1"}]
        )
        assert names.new == {"id": [b'"new"']}

    def test_kinds_do_not_mix(self) -> None:
        names = Names({"created": [b"5"], "created_at": [b"7.5"]})
        assert names.restore(event(created_at=3, created=3)) == event(created_at=7.5, created=5)

    def test_a_number_that_begins_like_another_is_another(self) -> None:
        names = Names({"created": [b"1"]})
        assert names.restore(event(created=12, text="")) == event(created=1, text="")
        assert names.restore(event(created=123, text="")) == event(created=123, text="")

    @pytest.mark.parametrize(
        "text",
        ['"id":"b"', '\\"id\\":\\"b\\"', '{"id": "b", "created": 9}', 'x"created":9', 'b","id":"b', "id\\", '\\"'],
    )
    def test_what_a_model_says_is_not_touched(self, text: str) -> None:
        names = Names({"id": [b'"a"'], "created": [b"5"]})
        assert names.restore(event(id="b", created=9)) == event(id="a", created=5)
        assert names.restore(event(text=text, id="b")) == event(text=text, id="a")
        assert names.restore(event(id="b", created=9, text=text)) == event(id="a", created=5, text=text)
        assert names.new == {}

    def test_a_name_may_have_quotes_and_spaces_before_it(self) -> None:
        names = Names({"id": [b'"a\\"b"']})
        assert names.restore(b'data: {"id": "c\\"d\\\\", "x": 1}\n\n') == b'data: {"id": "a\\"b", "x": 1}\n\n'


@pytest.mark.parametrize("last", [[1, []], [0, []]])
def test_a_stream_that_has_ended_is_not_continued(last: Any) -> None:
    with pytest.raises(BadRecordsError):
        parse_records({"records": [[1, [[[0, [5], "stop", None]]]], last]})
