"""Nodes and requests as this proxy has seen them: an incident is told by that alone. Pure: the time is given."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence

from pdproxy.nodes.hand_over_verdict import HandOverVerdict
from pdproxy.nodes.node import NO_BARS, Bars, NodeView, Role, State
from pdproxy.observe.labels import Outcome, Rejection
from pdproxy.orchestration.in_flight import BadEnd, LegFailure, RecentEnds
from pdproxy.orchestration.request_queue import QueueLimits, QueueStatus
from pdproxy.settings.types import OnNoDecode, OnPrefillFailure

WINDOW = 300.0
"""Seconds for which something that went wrong is shown at all."""
JUST_NOW = 30.0
"""Seconds for which a failure on a node that serves counts as going on."""
_OUT = (State.DOWN, State.REFUSED, State.PROBING)
_FULL = frozenset({Rejection.QUEUE_FULL, Rejection.QUEUE_TIMEOUT})
_GOING = (State.DRAINING, State.TERMINATING)


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """All that an incident is told by.

    Attributes:
        now: monotonic seconds.
        not_ready: why this proxy serves nothing; "" where it does.
        on_prefill_failure, on_no_decode: the policies, which decide what clients lose.
        unserved_since: when the last node went without which this proxy serves nothing; -inf where nobody knows.
        queue, limits: what runs and waits, and how much may.
        stream_moves: how often a stream may go on at another node.
    """

    now: float
    nodes: Sequence[NodeView]
    recent: RecentEnds
    bars: Bars = NO_BARS
    not_ready: str = ""
    hand_overs: HandOverVerdict = dataclasses.field(default_factory=HandOverVerdict)
    on_prefill_failure: OnPrefillFailure = OnPrefillFailure.RETRY
    on_no_decode: OnNoDecode = OnNoDecode.FAIL
    unserved_since: float = -math.inf
    queue: QueueStatus = dataclasses.field(default_factory=QueueStatus)
    limits: QueueLimits = dataclasses.field(default_factory=QueueLimits)
    stream_moves: int = 1

    def out(self) -> Sequence[NodeView]:
        """Nodes that get no requests, or one at a time, and not because an operator wishes it; one that joins counts
        once a try to join has failed."""
        return [view for view in self.nodes if view.state in _OUT or (view.state is State.JOINING and view.reason)]

    def going(self) -> Sequence[NodeView]:
        """Nodes that are drained, or end with their pods."""
        return [view for view in self.nodes if view.state in _GOING]

    def faults(self) -> Sequence[LegFailure]:
        """Legs that failed, of the last `WINDOW`."""
        return [fault for fault in self.recent.faults if self.now - fault.at <= WINDOW]

    def bad(self) -> Sequence[BadEnd]:
        """Requests that ended badly, of the last `WINDOW`."""
        return [end for end in self.recent.bad if self.now - end.at <= WINDOW]

    def requests(self) -> int:
        """Requests that ended in the last `WINDOW`, well or not. They are counted by whole minutes."""
        return max(self.recent.counts(self.now - WINDOW).total(), len(self.bad()))

    def ended_badly(self, outcome: Outcome) -> int:
        """Requests that ended badly in this way. Where of a flood not every end is kept, whole minutes are counted."""
        if len(self.recent.bad) == self.recent.bad.maxlen:
            return self.recent.counts(self.now - WINDOW)[outcome]
        return sum(end.outcome is outcome for end in self.bad())

    def turned_away_now(self) -> collections.Counter[Rejection]:
        """Requests that were turned away just now, by the limit that did."""
        return collections.Counter(end.limit for end in self.bad_now() if end.limit is not None)

    def is_full_now(self) -> bool:
        """Whether requests were turned away just now for want of room on the nodes."""
        return not _FULL.isdisjoint(self.turned_away_now())

    def failing(self) -> Sequence[LegFailure]:
        """Legs that failed just now on nodes that are not out, and have not come back since."""
        out = {view.name for view in self.out()}
        back = {view.name: view.outage.ended for view in self.nodes if view.outage is not None}
        return [
            fault
            for fault in self.faults()
            if self.now - fault.at <= JUST_NOW and fault.node not in out and fault.at > back.get(fault.node, -math.inf)
        ]

    def bad_now(self) -> Sequence[BadEnd]:
        """Requests that ended badly just now, and after the last node came back."""
        back = max((view.outage.ended for view in self.nodes if view.outage is not None), default=-math.inf)
        return [end for end in self.bad() if self.now - end.at <= JUST_NOW and end.at > back]


def of_role(nodes: Iterable[NodeView], role: Role) -> list[NodeView]:
    """The nodes of a role, of these."""
    return [view for view in nodes if role in view.node.roles]


def duration(seconds: float) -> str:
    """For people: seconds, or minutes."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
