"""What every part of the orchestration is given: its dependencies, and the operator's deadlines and policy."""

import dataclasses
import itertools
import secrets
from collections.abc import Callable, Iterator

from pdproxy.clock import Clock
from pdproxy.nodes.pool import Pool
from pdproxy.observe.metrics import Metrics
from pdproxy.orchestration.in_flight import InFlightRequests
from pdproxy.planning.plan import PlanPolicy, WithoutPrefill
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
        release: for the whole errand of releasing one hand-over.
        on_prefill_failure: what follows a failed prefill leg.
        retries: how often each leg may be tried again before the client gets a byte; unreachable nodes do not count.
        migrations: how often one stream may move to another decode node; 0 turns migration off.
        local_below_tokens: prompts known to be shorter are computed on the decode node; 0 for none.
        fan_out: how many prompts of one list run at once.
        ticket_life: for how long a prefill leg's answer gives a ticket to try again; at most the connector's lease.
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
        fail = self.on_prefill_failure is OnPrefillFailure.FAIL
        return PlanPolicy(WithoutPrefill.FAIL if fail else WithoutPrefill.LOCAL, self.local_below_tokens)

    def prefill_timeouts(self, remaining_seconds: float) -> Timeouts:
        """Patience for a prefill leg that may use ``remaining_seconds`` seconds of the request's deadline."""
        return _within(remaining_seconds, self.connect, self.prefill_headers, self.stall)

    def decode_timeouts(self, remaining_seconds: float) -> Timeouts:
        """Patience for a decode leg that may use ``remaining_seconds`` seconds of the request's deadline."""
        timeouts = _within(remaining_seconds, self.connect, self.decode_headers, self.stall)
        return dataclasses.replace(timeouts, first=timeouts.headers)

    def release_timeouts(self) -> Timeouts:
        """Patience for the errand that releases a hand-over."""
        return _within(self.release, self.connect, self.release, self.release)


def _within(remaining_seconds: float, connect: float, headers: float, stall: float) -> Timeouts:
    return Timeouts(
        min(connect, remaining_seconds),
        min(headers, remaining_seconds),
        min(stall, remaining_seconds),
        whole=remaining_seconds,
    )


def random_hand_over_id() -> str:
    """A name for a hand-over: 128 bits of the system's randomness, in hex."""
    return secrets.token_hex(16)


@dataclasses.dataclass(frozen=True, slots=True)
class OrchestrationContext:
    """Dependencies of the drive.

    Attributes:
        transport: the way to nodes.
        pool: membership, load, conduct.
        metrics: what is counted.
        clock: monotonic time.
        config: deadlines and policy.
        live: requests on the way, for the operator to see.
        name: makes hand-over ids; nobody may be able to guess one.
        tie_breaker: counts plans, so that equally loaded nodes take turns.
    """

    transport: Transport
    pool: Pool
    metrics: Metrics
    clock: Clock
    config: OrchestrationConfig
    live: InFlightRequests = dataclasses.field(default_factory=InFlightRequests)
    name: Callable[[], str] = random_hand_over_id
    tie_breaker: Iterator[int] = dataclasses.field(default_factory=itertools.count)
