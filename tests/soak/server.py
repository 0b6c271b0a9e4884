"""The proxy's own server in front of a loopback cluster, and a client of it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import uvicorn
from prometheus_client import CollectorRegistry

from pdproxy.clock import SystemClock
from pdproxy.credential import Secret
from pdproxy.errors import ClientError
from pdproxy.intake.auth import OpenRequests, read_keys
from pdproxy.intake.body import BodyBudget, BodyReader
from pdproxy.intake.exchange import Receive, Scope, Send
from pdproxy.intake.handler import ApiApp, HandlerConfig, RequestHandler
from pdproxy.intake.rate_limits import RateLimits
from pdproxy.observe.metrics import Metrics
from pdproxy.server.protocol import ConnectionLimits, guarded
from pdproxy.server.server import Server, bind
from pdproxy.settings.types import Credential
from tests.orchestration.loopback_cluster import LoopbackCluster
from tests.soak.asking import PATIENT
from tests.soak.caller import Caller

ROOM = 1 << 20
"""Bytes for bodies."""
LIMITS = ConnectionLimits(65536, PATIENT, PATIENT)


@contextlib.asynccontextmanager
async def serving(cluster: LoopbackCluster) -> AsyncIterator[Caller]:
    """A client of a server that must have nothing left in the end."""
    registry = CollectorRegistry()
    server = _server(cluster, Metrics(registry))
    serving = asyncio.create_task(server.run_port())
    try:
        with contextlib.closing(Caller(int(server.address.rpartition(":")[2]))) as caller:
            yield caller
    finally:
        server.should_exit = True
        await serving
    assert not server.server_state.connections
    assert not server.server_state.tasks
    assert cluster.registry.get_sample_value("pdproxy_requests_active") == 0
    assert cluster.registry.get_sample_value("pdproxy_requests_queued") == 0
    assert registry.get_sample_value("pdproxy_body_bytes") == 0


def _server(cluster: LoopbackCluster, metrics: Metrics) -> Server:
    rules = HandlerConfig(PATIENT, Credential.PASS, own=Secret())
    service = RequestHandler(
        read_keys(None),
        OpenRequests(0, metrics),
        RateLimits(SystemClock(), metrics),
        BodyBudget(ROOM, metrics),
        BodyReader(1 << 20, PATIENT),
        cluster.orchestrator,
        cluster.pool,
        SystemClock(),
        rules,
    )
    config = uvicorn.Config(
        ApiApp(service, _no_operators, frozenset()),
        http=guarded(LIMITS),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_keep_alive=int(PATIENT),
    )
    return Server(config, bind("127.0.0.1", 0, "listen.port"))


async def _no_operators(scope: Scope, receive: Receive, send: Send) -> None:
    raise ClientError(404, "No operators' endpoints here.")
