"""Requests on the way now, and what went wrong lately: for the operator's live page.

Nothing is copied while a request runs: its own timeline is looked at when somebody looks. Bounded in every direction.
"""

import collections
import dataclasses
import itertools

from pdproxy.drive.hits import Hits
from pdproxy.drive.timeline import Timeline
from pdproxy.errors import Fault
from pdproxy.failures import Step
from pdproxy.observe.labels import Leg, Outcome
from pdproxy.request import ClientRequest

MOST = 65536
"""Requests that are known at once; the oldest are forgotten first. Admission keeps them far below."""
FAILURES = 20
"""Failures that are remembered."""


@dataclasses.dataclass(slots=True, eq=False)
class Ride:
    """One client request on its way; `outcome` once it has ended."""

    request: ClientRequest
    timeline: Timeline
    outcome: Outcome | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """A leg that failed, and what was done about it.

    Attributes:
        at: monotonic seconds.
        name: of the request; with the prompt's number where there are several.
        ride: the request, whose end tells what became of it; None where it is not known any more.
    """

    at: float
    name: str
    leg: Leg
    node: str
    fault: Fault
    step: Step
    ride: Ride | None = None


class Live:
    """Every change is O(1)."""

    def __init__(self) -> None:
        self._rides: dict[int, Ride] = {}
        self._failures: collections.deque[Failure] = collections.deque(maxlen=FAILURES)
        self.hits = Hits()

    def __len__(self) -> int:
        """Requests on the way."""
        return len(self._rides)

    def begin(self, request: ClientRequest, timeline: Timeline) -> None:
        """A request is on the way until `end`. Two may have the same id, which clients choose: the object counts."""
        if len(self._rides) >= MOST:
            del self._rides[next(iter(self._rides))]
        self._rides[id(request)] = Ride(request, timeline)

    def end(self, request: ClientRequest, outcome: Outcome) -> None:
        """The request has ended."""
        ride = self._rides.pop(id(request), None)
        if ride is not None:
            ride.outcome = outcome

    def failed(self, request: ClientRequest, failure: Failure) -> None:
        """One of the request's legs failed. A client's own mistake is no failure of ours, and is not kept."""
        if failure.fault is not Fault.CLIENT_ERROR:
            self._failures.append(dataclasses.replace(failure, ride=self._rides.get(id(request))))

    def newest(self, most: int) -> list[Ride]:
        """The requests that began last, newest first."""
        return list(itertools.islice(reversed(self._rides.values()), most))

    def failures(self) -> list[Failure]:
        """The last failures, newest first."""
        return list(reversed(self._failures))
