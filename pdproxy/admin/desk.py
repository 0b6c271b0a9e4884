"""What the operator's endpoints work with."""

import asyncio
import dataclasses
import enum

from prometheus_client import CollectorRegistry

from pdproxy.clock import Clock, SystemClock
from pdproxy.drive.live import Live
from pdproxy.nodes.drain import Drainer
from pdproxy.nodes.node import Role, Snapshot, State
from pdproxy.nodes.pool import Pool
from pdproxy.planning.plan import Without


@dataclasses.dataclass(frozen=True, slots=True)
class Desk:
    """Dependencies of the operator's endpoints.

    Attributes:
        pool: the nodes.
        drainer: sees nodes out.
        registry: what /metrics shows.
        leaving: set when the proxy itself is about to end: it is not ready any more.
        without_prefill: whether decode nodes alone make it ready.
        drain_seconds: a drain's deadline where the operator names none.
        token: what the endpoints under /nodes, and /ui/state, ask for; None asks for nothing.
        live: requests on the way.
        clock: the one that ``live`` was told times of.
    """

    pool: Pool
    drainer: Drainer
    registry: CollectorRegistry
    leaving: asyncio.Event
    without_prefill: Without = Without.LOCAL
    drain_seconds: float = 30.0
    token: str | None = None
    live: Live = dataclasses.field(default_factory=Live)
    clock: Clock = dataclasses.field(default_factory=SystemClock)


class Readiness(enum.StrEnum):
    """Whether requests can be served now, and what is missing if not."""

    READY = "ready"
    LEAVING = "the proxy is ending"
    NO_DECODE = "no decode node serves"
    NO_PREFILL = "no prefill node serves, and the policy forbids to do without"


def readiness(desk: Desk) -> Readiness:
    """Judge the pool as it stands now."""
    if desk.leaving.is_set():
        return Readiness.LEAVING
    snapshot = desk.pool.snapshot()
    if not _serving(snapshot, Role.DECODE):
        return Readiness.NO_DECODE
    if desk.without_prefill is Without.FAIL and not _serving(snapshot, Role.PREFILL):
        return Readiness.NO_PREFILL
    return Readiness.READY


def _serving(snapshot: Snapshot, role: Role) -> bool:
    """A node on trial counts: it gets requests, one at a time."""
    return any(view.node.role is role and view.state in (State.UP, State.PROBING) for view in snapshot.nodes)
