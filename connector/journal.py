"""The journal of a stream: what a node writes into it so that another node can make the same stream again. Pure.

    data: {...}                                    an event, as the endpoint makes it
    : pdproxy [EVENTS, GROUPS]                     a record: a comment, which clients of SSE ignore
    : pdproxy [EVENTS, GROUPS, NOTES]

EVENTS: how many events have come since the record before. GROUPS: which outputs the endpoint's code has consumed to
make them; a group is one `RequestOutput`, a list of `[INDEX, [token ids]]`, or of `[INDEX, [token ids], FINISH_REASON,
STOP_REASON]` where that choice ended in it. A record is written when the endpoint's code asks for the next output, so
that it leaves in one write with the events of its group. Only the first record, with the events before any output, and
the last, with those behind all outputs, have no groups. Events behind the last record are not part of the journal: the
stream broke inside of the node, and they tell the client so.

NOTES: what cannot be computed again: values that are random or times, under "id", "created" and "created_at" in the
order in which the events show them first, and "cached", how many of the prompt's tokens came from a cache (two numbers,
as in vLLM's `RequestOutput`). The j-th name that the events of a continued leg show is replaced by the j-th of the
journal, wherever it stands.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

PREFIX = b": pdproxy "
CACHED = "cached"
FINISH_REASONS = ("stop", "length", "repetition")
"""Ends that a journal holds. vLLM's others ("abort", "error") are failures of the node, which another node repairs."""

_encode = json.JSONEncoder(separators=(",", ":")).encode
# A quote inside of a JSON string is escaped, so that no match begins inside of one.
_NAME = re.compile(rb'"(?:id|item_id|call_id|signature)":\s?("(?:[^"\\]|\\.)*")|"(created|created_at)":\s?([\d.]+)')
# Much quicker to look for than the pattern: without any of these there is no match.
_TRACES = (b'id":', b'"signature":', b'"created')
_LONGEST_KEY = len('"item_')


class BadRecordsError(ValueError):
    """These are no records that this package writes; the message says why."""


class ReplayError(Exception):
    """This node makes other events of a journal than the node that wrote it."""


class Output(NamedTuple):
    """The output of one choice in one group."""

    choice: int
    token_ids: Sequence[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None


Group = Sequence[Output]


@dataclass(frozen=True, slots=True)
class Record:
    """One record; `notes` by what they are."""

    events: int
    groups: Sequence[Group]
    notes: Mapping[str, Sequence[Any]] = field(default_factory=dict)


class Names:
    """The random ids and times in the events of one leg; `given`: those of the legs before, as JSON has them."""

    def __init__(self, given: Mapping[str, Sequence[bytes]]) -> None:
        self._given = given
        self._shown: dict[str, dict[bytes, bytes]] = defaultdict(dict)
        self._head = self._restored_head = b""
        self.new: dict[str, list[bytes]] = {}
        """Those that no record has yet."""

    def restore(self, event: bytes) -> bytes:
        """The event with the names that the client knows.

        Most events of a stream begin alike, up to their last name; what is behind that head is searched.
        """
        start = len(self._head) if event.startswith(self._head) else 0
        traces = [at for trace in _TRACES if (at := event.find(trace, start)) >= 0]
        if traces:
            return self._search(event, max(0, min(traces) - _LONGEST_KEY), start)
        return self._restored_head + event[start:] if start else event

    def _search(self, event: bytes, begin: int, start: int) -> bytes:
        parts = [self._restored_head] if start else []
        for match in _NAME.finditer(event, max(begin, start)):
            value = match.lastindex or 0
            parts += [event[start : match.start(value)], self._known(*_kind(match))]
            start = match.end(value)
        if not self._head and parts:
            self._head, self._restored_head = event[: start + 1], b"".join([*parts, event[start : start + 1]])
        return b"".join([*parts, event[start:]])

    def _known(self, kind: str, shown: bytes) -> bytes:
        known = self._shown[kind]
        if shown not in known:
            given = self._given.get(kind, ())
            if len(known) < len(given):
                known[shown] = given[len(known)]
            else:
                known[shown] = shown
                self.new.setdefault(kind, []).append(shown)
        return known[shown]


def _kind(match: re.Match[bytes]) -> tuple[str, bytes]:
    return ("id", match[1]) if match[1] else (match[2].decode(), match[3])


class JournalWriter:
    """One leg's events on their way to the client. `records`: of the legs before, whose events the client has."""

    def __init__(self, records: Sequence[Record] = ()) -> None:
        self._owed = deque((record.events, len(record.groups)) for record in records)
        self._notes: dict[str, Sequence[Any]] = {CACHED: each} if (each := notes_of(records, CACHED)) else {}
        self._noted = len(self._notes)
        kinds = {kind for record in records for kind in record.notes} - {CACHED}
        given = {kind: [_encode(name).encode() for name in notes_of(records, kind)] for kind in kinds}
        self._names = Names(given)
        self._events: list[bytes] = []
        self._count = 0

    @property
    def replaying(self) -> bool:
        """Whether the client has the events that come now."""
        return bool(self._owed)

    @property
    def empty(self) -> bool:
        """Whether no event waits for its record."""
        return not self._events

    def add(self, chunk: bytes) -> None:
        """Whole events, as the endpoint makes them, or a comment between them."""
        if chunk.startswith(b":"):
            self._events.append(chunk)
            return
        self._events.append(self._names.restore(chunk))
        self._count += chunk.count(b"\n\n")

    def note_cached(self, *tokens: int | None) -> None:
        """How many of the prompt's tokens came from a cache, and how many went into it. Only the first time counts."""
        self._notes.setdefault(CACHED, tokens)

    def commit(self, group: Group) -> bytes:
        """The bytes to send once the endpoint's code is done with `group`; () before the first and after the last.

        Raises ReplayError.
        """
        if self._owed:
            self._drop(group)
            return b""
        if not group and not self._count:
            return b""
        groups = f"[[{','.join(map(_output_text, group))}]]" if group else "[]"
        notes = f",{_encode(new)}" if (new := self._new_notes()) else ""
        record = f"[{self._count},{groups}{notes}]"
        return b"%b%b%b\n\n" % (self.rest(), PREFIX, record.encode())

    def rest(self) -> bytes:
        """The events without a record. They are forgotten here."""
        events = b"".join(self._events)
        self._events, self._count = [], 0
        return events

    def _drop(self, group: Group) -> None:
        events, groups = self._owed[0]
        groups -= bool(group)
        if groups > 0:
            self._owed[0] = (events, groups)
        elif self._count != events:
            raise ReplayError(f"{self._count} events are made again where the client has {events}")
        else:
            self._owed.popleft()
            self.rest()

    def _new_notes(self) -> dict[str, Any]:
        if not self._names.new and len(self._notes) == self._noted:
            return {}
        new: dict[str, Any] = {kind: [json.loads(name) for name in names] for kind, names in self._names.new.items()}
        if len(self._notes) > self._noted:
            new |= self._notes
        self._names.new = {}
        self._noted = len(self._notes)
        return new


def _output_text(output: Output) -> str:
    if output.finish_reason is None:
        return f"[{output.choice},{list(output.token_ids)}]"
    return _encode(output)


def notes_of(records: Sequence[Record], kind: str) -> list[Any]:
    """All notes of a kind, in order."""
    return [value for record in records for value in record.notes.get(kind, ())]


def parse_records(raw: Any) -> list[Record]:
    """The records of `{"records": [...]}`. Raises BadRecordsError."""
    listed = raw.get("records") if isinstance(raw, dict) else None
    if not isinstance(listed, list):
        raise BadRecordsError("it is not an object with a list of records")
    records = [_record(each) for each in listed]
    if any(not record.groups for record in records[1:]):
        raise BadRecordsError("a record without outputs is not the first: the stream has ended, or records are missing")
    return records


def _record(raw: Any) -> Record:
    if not isinstance(raw, list) or len(raw) not in (2, 3) or not _is_count(raw[0]) or not isinstance(raw[1], list):
        raise BadRecordsError("a record is not [EVENTS, GROUPS] or [EVENTS, GROUPS, NOTES]")
    return Record(raw[0], [list(_group(each)) for each in raw[1]], _notes(raw[2] if len(raw) > 2 else {}))


def _group(raw: Any) -> Iterator[Output]:
    if not isinstance(raw, list) or not raw:
        raise BadRecordsError("a group is not a list of outputs")
    for each in raw:
        if not isinstance(each, list) or len(each) not in (2, 4) or not _is_count(each[0]):
            raise BadRecordsError("an output is not [INDEX, IDS] or [INDEX, IDS, FINISH_REASON, STOP_REASON]")
        if not isinstance(each[1], list) or not all(map(_is_count, each[1])):
            raise BadRecordsError("an output has no list of token ids")
        yield Output(each[0], each[1], *_end(each[2:]))


def _end(raw: list[Any]) -> tuple[str | None, int | str | None]:
    if not raw:
        return None, None
    reason, stop = raw
    if reason not in FINISH_REASONS or not (stop is None or type(stop) in (int, str)):
        raise BadRecordsError("an output ended for no reason that a stream goes on after")
    return reason, stop


def _notes(raw: Any) -> dict[str, list[Any]]:
    if not isinstance(raw, dict) or not all(isinstance(values, list) for values in raw.values()):
        raise BadRecordsError("the notes of a record are not lists")
    values = [value for listed in raw.values() for value in listed]
    if not all(value is None or type(value) in (int, float, str) for value in values):
        raise BadRecordsError("a note is neither text nor a number")
    return raw


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
