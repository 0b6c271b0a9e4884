"""Reports of what became of a ticket, in the decode node's own answer, for whoever asks. Pure.

A decode leg with `"pdproxy_explain": true` beside its ticket is answered with
`"kv_transfer_params": {"pdproxy_read": {"cause": CAUSE, "why": TEXT}}`. A proxy's known-answer test asks so: that a
prompt was computed in spite of its ticket shows in the usage, and why only here.

    CAUSE    "verified": the blocks were read; "not_needed": the local cache had them all; else a `RefusalReason`, or
             the `ReadOutcome` of this read, or of an earlier one after which the prefill engine is barred
    TEXT     what the node knows of it besides, such as "[Errno 111] Connection refused"; may be empty
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .counters import ReadOutcome
from .ticket_fields import RefusalReason

EXPLAIN = "pdproxy_explain"
REPORT = "pdproxy_read"
NOT_NEEDED = "not_needed"
LONGEST_WHY = 300

Cause = ReadOutcome | RefusalReason | str


@dataclass(slots=True)
class _Report:
    cause: str = ""
    why: str = ""


class ReadReports:
    """The reports that were asked for, until their requests end. For the engine's thread."""

    def __init__(self) -> None:
        self._reports: dict[str, _Report] = {}

    def on_new_request(self, request_id: str, raw_params: Any) -> None:
        """A request arrives, with these `kv_transfer_params`."""
        if isinstance(raw_params, dict) and raw_params.get(EXPLAIN) is True:
            self._reports[request_id] = _Report()

    def note(self, request_id: str, cause: Cause, why: str = "") -> None:
        """Keep what became of the request's ticket."""
        report = self._reports.get(request_id)
        if report is not None:
            report.cause, report.why = str(cause), why[:LONGEST_WHY]

    def pop(self, request_id: str) -> Mapping[str, Any]:
        """The request ends: what to put into its answer's `kv_transfer_params`."""
        report = self._reports.pop(request_id, None)
        return {} if report is None else {REPORT: {"cause": report.cause, "why": report.why}}
