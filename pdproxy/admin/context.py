"""What the operators' routes need, and who may call them."""

import asyncio
import dataclasses
import enum
import hmac
import urllib.parse
from collections.abc import Awaitable, Callable

from fastapi import Request
from prometheus_client import CollectorRegistry

from pdproxy.clock import Clock, SystemClock
from pdproxy.errors import ClientError
from pdproxy.nodes.drain import Drainer
from pdproxy.nodes.node import Role, Snapshot, State
from pdproxy.nodes.pool import Pool
from pdproxy.orchestration.in_flight import InFlightRequests
from pdproxy.settings.choices import OnPrefillFailure


@dataclasses.dataclass(frozen=True, slots=True)
class AdminContext:
    """Dependencies of the operator's endpoints.

    Attributes:
        pool: the nodes.
        drainer: sees nodes out.
        registry: what /metrics shows.
        leaving: set when the proxy itself is about to end: it is not ready any more.
        on_prefill_failure: with FAIL, decode nodes alone do not make it ready.
        drain_seconds: a drain's deadline where the operator names none.
        token: what the endpoints under /nodes, and /ui/state, ask for; None asks for nothing.
        live: requests on the way.
        clock: the one that ``live`` was told times of.
    """

    pool: Pool
    drainer: Drainer
    registry: CollectorRegistry
    leaving: asyncio.Event
    on_prefill_failure: OnPrefillFailure = OnPrefillFailure.RETRY
    drain_seconds: float = 30.0
    token: str | None = None
    live: InFlightRequests = dataclasses.field(default_factory=InFlightRequests)
    clock: Clock = dataclasses.field(default_factory=SystemClock)


class Readiness(enum.StrEnum):
    """Whether requests can be served now, and what is missing if not."""

    READY = "ready"
    LEAVING = "the proxy is ending"
    NO_DECODE = "no decode node serves"
    NO_PREFILL = "no prefill node serves, and the policy forbids to do without"


def readiness(desk: AdminContext) -> Readiness:
    """Judge the pool as it stands now."""
    if desk.leaving.is_set():
        return Readiness.LEAVING
    snapshot = desk.pool.snapshot()
    if not _serving(snapshot, Role.DECODE):
        return Readiness.NO_DECODE
    if desk.on_prefill_failure is OnPrefillFailure.FAIL and not _serving(snapshot, Role.PREFILL):
        return Readiness.NO_PREFILL
    return Readiness.READY


def _serving(snapshot: Snapshot, role: Role) -> bool:
    """A node on trial counts: it gets requests, one at a time."""
    return any(view.node.role is role and view.state in (State.UP, State.PROBING) for view in snapshot.nodes)


_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


def require_operator(token: str | None) -> Callable[[Request], Awaitable[None]]:
    """A dependency that lets only the operator through.

    With a token, each request must carry it as ``Authorization: Bearer``. Without one (the port is the operator's own),
    a web page of another origin must still not be able to change anything through the operator's browser.

    Raises:
        ClientError: 401 or 403.
    """

    async def check(request: Request) -> None:
        if token is not None and not _carries(request, token):
            raise ClientError(
                401,
                "This needs the admin token, as 'Authorization: Bearer …'.",
                code="admin_token_needed",
                headers=(("www-authenticate", "Bearer"),),
            )
        if request.method not in _SAFE and _is_foreign(request):
            raise ClientError(403, "A page of another origin may not change nodes.", code="foreign_origin")

    return check


def _carries(request: Request, token: str) -> bool:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.encode())


def _is_foreign(request: Request) -> bool:
    origin = request.headers.get("origin")
    return origin is not None and urllib.parse.urlsplit(origin).netloc != request.headers.get("host")
