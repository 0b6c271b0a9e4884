"""The context of the operator's routes, and whether the proxy is ready."""

import asyncio
import dataclasses
import enum
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry

from pdproxy.admin.commands import Commands
from pdproxy.clock import Clock, SystemClock
from pdproxy.credential import Secret
from pdproxy.nodes.cache_advice import EventsSeen
from pdproxy.nodes.cohorts import Cohorts
from pdproxy.nodes.demand import Advice
from pdproxy.nodes.drain import Drainer
from pdproxy.nodes.hand_over_verdict import HandOverVerdict, verdict
from pdproxy.nodes.node import SERVING, PoolState, Role
from pdproxy.nodes.pool import Pool
from pdproxy.orchestration.context import OrchestrationContext
from pdproxy.orchestration.in_flight import InFlightRequests
from pdproxy.orchestration.request_queue import QueueStatus
from pdproxy.request import Json
from pdproxy.settings.types import OnNoDecode, OnPrefillFailure


@dataclasses.dataclass(frozen=True, slots=True)
class AdminContext:
    """Dependencies of the operator's routes.

    Attributes:
        leaving: set when the proxy is shutting down: it is not ready any more.
        on_prefill_failure: with FAIL, decode nodes alone do not make it ready.
        drain_seconds: a drain's deadline where the operator names none.
        token: required under /nodes, for /ui/state and /debug/plan; the empty one requires nothing.
        commands: made for the operator's shell.
        clock: by which ``live`` keeps its times.
        queue: how the queue stands.
        caches: by a node's name, how much is known of what each of its data-parallel ranks has cached, as JSON.
        events: by a node's name, whether its KV events are read.
        advice: how many nodes the last hour needed.
        orchestration: which plans; None where there is no /debug/plan.
        on_no_decode: with PREFILL, prefill nodes alone make it ready.
        proved: whether a node, by its name, passed a known-answer test; where none are made, all are.
    """

    pool: Pool
    drainer: Drainer
    registry: CollectorRegistry
    leaving: asyncio.Event
    on_prefill_failure: OnPrefillFailure = OnPrefillFailure.RETRY
    drain_seconds: float = 30.0
    token: Secret = dataclasses.field(default_factory=Secret)
    commands: Commands = dataclasses.field(default_factory=Commands)
    live: InFlightRequests = dataclasses.field(default_factory=InFlightRequests)
    clock: Clock = dataclasses.field(default_factory=SystemClock)
    queue: Callable[[], QueueStatus] = QueueStatus
    caches: Callable[[str], Sequence[Json]] = lambda _: ()
    events: Callable[[str], EventsSeen] = lambda _: EventsSeen.UNKNOWN
    advice: Callable[[], Advice] = Advice
    orchestration: OrchestrationContext | None = None
    on_no_decode: OnNoDecode = OnNoDecode.FAIL
    proved: Callable[[str], bool] = lambda _: True

    @property
    def cohorts(self) -> Cohorts:
        """Cohorts of the pool's nodes."""
        return Cohorts(self.pool, self.proved)

    @property
    def hand_overs(self) -> HandOverVerdict:
        """Whether prompts are handed over."""
        return verdict(self.pool.state(), self.pool.hand_overs.recent(self.clock.now()))


class Readiness(enum.StrEnum):
    """Whether requests can be served now, and what is missing if not."""

    READY = "ready"
    DEGRADED = "degraded"
    """They can, and prompts are not handed over: hand-overs fail, or no node of one role serves. The page says why."""
    LEAVING = "the proxy is ending"
    NO_DECODE = "no decode node serves"
    NO_PREFILL = "no prefill node serves, and the policy forbids to do without"


SERVES = frozenset({Readiness.READY, Readiness.DEGRADED})


def readiness(context: AdminContext) -> Readiness:
    """Whether the pool can serve requests now."""
    if context.leaving.is_set():
        return Readiness.LEAVING
    pool_state = context.pool.state()
    if not _serving(pool_state, Role.DECODE):
        last_resort = context.on_no_decode is OnNoDecode.PREFILL and _serving(pool_state, Role.PREFILL)
        return _as_handed_over(context) if last_resort else Readiness.NO_DECODE
    if context.on_prefill_failure is OnPrefillFailure.FAIL and not _serving(pool_state, Role.PREFILL):
        return Readiness.NO_PREFILL
    return _as_handed_over(context)


def _as_handed_over(context: AdminContext) -> Readiness:
    hand_overs = context.hand_overs
    return Readiness.DEGRADED if hand_overs.why or hand_overs.missing is not None else Readiness.READY


def unserved_since(context: AdminContext) -> float:
    """The monotonic second since which no request can be served for want of nodes; -inf where nobody knows."""
    if readiness(context) is Readiness.NO_PREFILL:
        return context.pool.unserved_since(Role.PREFILL)
    roles = tuple(Role) if context.on_no_decode is OnNoDecode.PREFILL else (Role.DECODE,)
    return max(map(context.pool.unserved_since, roles))


def _serving(pool_state: PoolState, role: Role) -> bool:
    """Whether a node of the role takes requests; a node that is being probed takes one at a time."""
    return any(role in view.node.roles and view.state in SERVING for view in pool_state.nodes)
