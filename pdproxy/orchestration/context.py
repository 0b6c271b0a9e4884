"""The context of the orchestration: its dependencies, and the operator's deadlines and policy."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from opentelemetry.trace import Tracer

from pdproxy.background import Background
from pdproxy.clock import Clock
from pdproxy.nodes.pool import Pool
from pdproxy.observe.metrics import Metrics
from pdproxy.orchestration.client_errors import deadline_error
from pdproxy.orchestration.in_flight import InFlightRequests
from pdproxy.orchestration.keeping import Keeping
from pdproxy.orchestration.prefix_source import PrefixSource
from pdproxy.orchestration.request_queue import QueueLimits, RequestQueue
from pdproxy.planning.cache_aware import CacheAware
from pdproxy.planning.plan import PlanPolicy, RoutingPolicy
from pdproxy.planning.shares import LimitsByKey
from pdproxy.random_ids import random_ids
from pdproxy.settings.types import OnNoDecode, OnPrefillFailure
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
        on_no_decode: what follows where no decode node is left.
        retries: how often each leg may be tried again before the client gets a byte; unreachable nodes do not count.
        migrations: how often one stream may move to another decode node; 0 turns migration off.
        routing_policy: how one is chosen among several nodes.
        fan_out: how many prompts of one list run at once.
        ticket_life: how long after its prefill a ticket may be tried on another decode node; at most the lease.
        queue: bounds what runs and what waits.
        decode_fill: the part of a decode node's capacity that is filled before prompts wait; 0: they never do.
    """

    connect: float = 5.0
    prefill_headers: float = 600.0
    decode_headers: float = 600.0
    stall: float = 120.0
    release: float = 5.0
    on_prefill_failure: OnPrefillFailure = OnPrefillFailure.RETRY
    on_no_decode: OnNoDecode = OnNoDecode.FAIL
    retries: int = 2
    migrations: int = 3
    routing_policy: RoutingPolicy = dataclasses.field(default_factory=CacheAware)
    fan_out: int = 64
    ticket_life: float = 30.0
    queue: QueueLimits = dataclasses.field(default_factory=QueueLimits)
    decode_fill: float = 1.0

    def prefill_timeouts(self, remaining_seconds: float) -> Timeouts:
        """For a prefill leg of a request that has so many seconds left."""
        connect, stall = min(self.connect, remaining_seconds), min(self.stall, remaining_seconds)
        return Timeouts(connect, min(self.prefill_headers, remaining_seconds), stall, whole=remaining_seconds)

    def decode_timeouts(self, remaining_seconds: float) -> Timeouts:
        """For a decode leg of a request that has so many seconds left."""
        connect, stall = min(self.connect, remaining_seconds), min(self.stall, remaining_seconds)
        answer = min(self.decode_headers, remaining_seconds)
        return Timeouts(connect, answer, stall, first=answer, whole=remaining_seconds)

    def release_timeouts(self) -> Timeouts:
        """For each call of a release."""
        return Timeouts(min(self.connect, self.release), self.release, self.release, whole=self.release)


EARLY = 0.01
"""Seconds that a timer may fire before its time: event loops count in milliseconds."""


def deadline_passed(clock: Clock, deadline: float) -> bool:
    return clock.now() >= deadline - EARLY


def remaining_seconds(clock: Clock, deadline: float) -> float:
    """Seconds that are left; raises the `ClientError` 504 where none are."""
    left = deadline - clock.now()
    if left <= EARLY:
        raise deadline_error()
    return left


@dataclasses.dataclass(frozen=True, slots=True)
class OrchestrationContext:
    """Dependencies of the orchestration.

    Attributes:
        in_flight: for the operator's page.
        new_hand_over_id: must return unguessable ids.
        tie_breaker: counts plans, so that equally loaded nodes take turns.
        queue: of all prompts; there is one for each pool.
        plan_policy: what planning needs to know of the config.
        prefix_source: what nodes have cached; None where the policy does not ask.
        keeping: has nodes keep conversations; None where they are not to.
        key_limits: what each API key may have.
        tracer: makes the spans of legs; None without tracing.
        background: work that outlives a request, such as releases.
    """

    transport: Transport
    pool: Pool
    metrics: Metrics
    clock: Clock
    config: OrchestrationConfig
    in_flight: InFlightRequests = dataclasses.field(default_factory=InFlightRequests)
    new_hand_over_id: Callable[[], str] = dataclasses.field(default_factory=lambda: random_ids().__next__)
    tie_breaker: Iterator[int] = dataclasses.field(default_factory=itertools.count)
    prefix_source: PrefixSource | None = None
    keeping: Keeping | None = None
    key_limits: LimitsByKey = dataclasses.field(default_factory=LimitsByKey)
    tracer: Tracer | None = None
    background: Background = dataclasses.field(default_factory=Background)
    queue: RequestQueue = dataclasses.field(init=False)
    plan_policy: PlanPolicy = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        config = self.config
        policy = PlanPolicy(config.routing_policy, config.on_prefill_failure, config.on_no_decode)
        object.__setattr__(self, "plan_policy", policy)
        object.__setattr__(self, "queue", RequestQueue(self.config.queue, self.clock, self.metrics, self.key_limits))
        self.pool.watch_room(self.queue.room_changed)
