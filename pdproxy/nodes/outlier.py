"""Outlier detection: whether the legs that fail on a node are the node's fault, or their requests'. Pure.

A client's request can make a leg fail on a healthy node, in every way but one: a refused connection. So a failure only
tells how likely it is on a healthy node:

    the connection was refused: nothing of the request reached the node    1 in 100
    the leg failed, and another node served the request                    the share of its peers' legs that fail
    the leg failed, and no other node served the request                   the square root of that share

A node is taken out when its failures in a row together are as unlikely on a healthy node as ``failures`` refused
connections: with three, one in a million. Where no peer fails that takes 5 requests that others served, or 10 that
nobody else was asked for; where peers fail half of the time, 20 or 40; where all fail alike, it never happens.

A failure counts once for each request, and for each session. Where another client was served lately, the failures of
one client count up to half of what is needed: one client alone cannot take a node out. Without peers, only requests
that others served count.

A stream's first event ends the row of legs that failed before theirs. Only a stream that ends well ends the row of
those that broke off later.

`Pool.leg_failed` asks, and opens the node's circuit. `circuit_breaker` says how long it stays open.
"""

import dataclasses
import enum
import math
from collections import deque
from collections.abc import Collection, Iterable

import msgspec

RECENT = 20
"""Legs of each node by which its peers are judged."""
LATELY = 300.0
"""Seconds for which a client counts that was served."""
LEAST_SHARE = 0.05
"""Legs that may fail on any healthy node: one in so many, whatever its peers show."""
REFUSED_DECADES = 2.0
"""The decimal logarithm of how unlikely a refused connection is on a healthy node."""
MOST_IN_A_ROW = 200
"""Failures that are kept; the oldest ones go."""


class FailureEvidence(enum.Enum):
    """Evidence of other nodes about a leg that failed: whose fault it was."""

    NODE = enum.auto()
    """No request could have caused the failure."""
    SERVED = enum.auto()
    """Another node served the request."""
    UNSERVED = enum.auto()
    """No other node served it, or none was asked."""


class LegOrigin(msgspec.Struct, frozen=True):
    """The request that a leg is of, and its client.

    Attributes:
        request: its id; all legs and prompts of a client's request have one.
        client: the name of the API key; "" where that is not known.
        session: None where the request names none.
    """

    request: str
    client: str = ""
    session: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """One leg that failed; ``streaming``: after its first event."""

    evidence: FailureEvidence
    client: str
    streaming: bool


class LegRecord:
    """How the legs of one kind ended on one node.

    Attributes:
        recent: of the last `RECENT` legs that ended, whether each ended well.
        served: clients whose names are known, and when a leg of each last ended well, in monotonic seconds.
        row: failures since the last leg that went well, by request or session.
    """

    __slots__ = ("recent", "row", "served")

    def __init__(self) -> None:
        self.recent = deque[bool](maxlen=RECENT)
        self.served: dict[str, float] = {}
        self.row: dict[object, Failure] = {}

    def began(self) -> None:
        """A leg's first event is here."""
        if self.row:
            self.row = {key: failure for key, failure in self.row.items() if failure.streaming}

    def ended_well(self, client: str, now: float) -> None:
        """A leg ended well."""
        self.recent.append(True)
        if client:
            self.served[client] = now
        if self.row:
            self.row = {}

    def failed(self, origin: LegOrigin, evidence: FailureEvidence, *, streaming: bool) -> None:
        """A leg failed."""
        self.recent.append(False)
        by_session = origin.session is not None and evidence is not FailureEvidence.NODE
        key = origin.session if by_session else origin.request
        before = self.row.get(key)
        if before is None or before.evidence.value > evidence.value:
            self.row[key] = Failure(evidence, origin.client, streaming)
        while len(self.row) > MOST_IN_A_ROW:
            del self.row[next(iter(self.row))]

    def is_outlier(self, peers: Collection["LegRecord"], failures: int, now: float) -> bool:
        """Whether the row is as unlikely on a healthy node as so many refused connections; ``peers``: the records of
        nodes that do the same work, each of which may be empty."""
        needed = failures * REFUSED_DECADES
        refused = sum(failure.evidence is FailureEvidence.NODE for failure in self.row.values()) * REFUSED_DECADES
        if refused >= needed:
            return True
        known = {client for each in (self, *peers) for client, at in each.served.items() if now - at <= LATELY}
        decades = self._decades_by_client(-math.log10(failing_share(peers)), compared=bool(peers))
        return (
            refused
            + sum(min(sum_, needed / 2) if client and known - {client} else sum_ for client, sum_ in decades.items())
            >= needed - 1e-9
        )

    def _decades_by_client(self, served: float, *, compared: bool) -> dict[str, float]:
        """``served``: what a failure counts whose request another node served."""
        weights = {FailureEvidence.SERVED: served, FailureEvidence.UNSERVED: served / 2 if compared else 0.0}
        decades: dict[str, float] = {}
        for failure in self.row.values():
            if failure.evidence is not FailureEvidence.NODE:
                decades[failure.client] = decades.get(failure.client, 0.0) + weights[failure.evidence]
        return decades


def failing_share(records: Iterable[LegRecord]) -> float:
    """The share of legs that fail on these nodes; a half where nothing is known, and never less than `LEAST_SHARE`."""
    ends = [well for record in records for well in record.recent]
    return max(LEAST_SHARE, (ends.count(False) + 1) / (len(ends) + 2))
