"""Why a request failed, as its log line tells: the legs that failed, and the error that it ended with."""

import dataclasses

from pdproxy.errors import NodeFault
from pdproxy.observe.labels import Leg

MOST_TOLD = 8
"""Failed legs that a line names; further ones are counted."""


@dataclasses.dataclass(frozen=True, slots=True)
class FinalError:
    """What a request ended with.

    Attributes:
        status: that the client got, or was to get; 200 for a stream that ended in an error event.
        code: of the error, or its type where it has none.
        reason: a sentence; never a node's own words, which may repeat the client's.
    """

    status: int
    code: str
    reason: str


@dataclasses.dataclass(slots=True)
class FailureRecord:
    """Of one request, with all its prompts.

    Attributes:
        node: the one that failed last; "" where none did.
        error: what the request ended with; None where it went well after all.
    """

    node: str = ""
    error: FinalError | None = None
    _fault: str = ""
    _detail: str = ""
    _tried: list[str] = dataclasses.field(default_factory=list)
    _more: int = 0

    def leg_failed(self, leg: Leg, node: str, fault: NodeFault) -> None:
        """A leg failed on a node."""
        # Words, and not the fault: its traceback would keep the request and its body alive.
        self.node, self._fault, self._detail = node, fault.fault.value, fault.detail
        if len(self._tried) < MOST_TOLD:
            self._tried.append(f"{leg}:{node}:{fault.fault}")
        else:
            self._more += 1

    def facts(self) -> dict[str, str | int | float]:
        """For a log line and a span: what it ended with, the last fault, and all legs that were tried and failed."""
        facts: dict[str, str | int | float] = {}
        if self.error is not None:
            facts |= {"status": self.error.status, "code": self.error.code, "reason": self.error.reason}
        if self.node:
            facts["node"] = self.node
        if self._fault:
            facts |= {"fault": self._fault, "detail": self._detail}
        if self._tried:
            facts["tried"] = ",".join(self._tried) + (f",+{self._more}" if self._more else "")
        return facts
