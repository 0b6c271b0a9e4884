"""What every part of the orchestration is given: its dependencies, and the operator's deadlines and policy."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from pdproxy.clock import Clock
from pdproxy.legs.calls import new_hand_over_id
from pdproxy.nodes.pool import Pool
from pdproxy.observe.metrics import Metrics
from pdproxy.orchestration.in_flight import InFlightRequests
from pdproxy.planning.plan import PlanPolicy
from pdproxy.settings.types import OnPrefillFailure
from pdproxy.transport.port import Timeouts, Transport


@dataclasses.dataclass(frozen=True, slots=True)
class OrchestrationConfig:
    """Deadlines in seconds, counts in tries.

    Attributes:
        connect: until a connection to a node stands.
        prefill_headers: from a prefill leg's start to its answer's head.
        decode_headers: from a decode leg's start to its answer's head, and again to a stream's first event.
        stall: between two pieces of any body.
        release: for one call that releases a hand-over; at a shutdown, for all that are under way.
        on_prefill_failure: what follows a failed prefill leg.
        retries: how often each leg may be tried again before the client gets a byte; unreachable nodes do not count.
        migrations: how often one stream may move to another decode node; 0 turns migration off.
        local_below_tokens: prompts known to be shorter are computed on the decode node; 0 for none.
        fan_out: how many prompts of one list run at once.
        ticket_life: how long after its prefill a ticket may be tried on another decode node; at most the lease.
    """

    connect: float = 5.0
    prefill_headers: float = 600.0
    decode_headers: float = 600.0
    stall: float = 120.0
    release: float = 5.0
    on_prefill_failure: OnPrefillFailure = OnPrefillFailure.RETRY
    retries: int = 2
    migrations: int = 3
    local_below_tokens: int = 0
    fan_out: int = 64
    ticket_life: float = 30.0

    def plan_policy(self) -> PlanPolicy:
        """What planning needs to know of it."""
        return PlanPolicy(self.on_prefill_failure, self.local_below_tokens)

    def prefill_timeouts(self, remaining_seconds: float) -> Timeouts:
        """For a prefill leg of a request that has so many seconds left."""
        return _within(remaining_seconds, self.connect, self.prefill_headers, self.stall)

    def decode_timeouts(self, remaining_seconds: float) -> Timeouts:
        """For a decode leg of a request that has so many seconds left."""
        timeouts = _within(remaining_seconds, self.connect, self.decode_headers, self.stall)
        return dataclasses.replace(timeouts, first=timeouts.headers)

    def release_timeouts(self) -> Timeouts:
        """For each call of a release."""
        return _within(self.release, self.connect, self.release, self.release)


def _within(seconds: float, connect: float, headers: float, stall: float) -> Timeouts:
    return Timeouts(min(connect, seconds), min(headers, seconds), min(stall, seconds), whole=seconds)


@dataclasses.dataclass(frozen=True, slots=True)
class OrchestrationContext:
    """Dependencies of the orchestration.

    Attributes:
        in_flight: for the operator's page.
        new_hand_over_id: must return unguessable ids.
        tie_breaker: counts plans, so that equally loaded nodes take turns.
    """

    transport: Transport
    pool: Pool
    metrics: Metrics
    clock: Clock
    config: OrchestrationConfig
    in_flight: InFlightRequests = dataclasses.field(default_factory=InFlightRequests)
    new_hand_over_id: Callable[[], str] = new_hand_over_id
    tie_breaker: Iterator[int] = dataclasses.field(default_factory=itertools.count)
