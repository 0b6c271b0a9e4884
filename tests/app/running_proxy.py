"""The whole proxy on a loopback port, in front of fake nodes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx
import uvicorn

from pdproxy.app.build import Proxy, proxy
from pdproxy.app.host import HostEnvironment
from pdproxy.server.protocol import ConnectionLimits, guarded
from pdproxy.server.server import bind
from pdproxy.settings.model import ConfiguredNode, Settings
from pdproxy.settings.types import Role
from tests.fakes.kv_transfer import FakeKvTransfer
from tests.fakes.loopback import LoopbackNode
from tests.fakes.node import FakeNode
from tests.fakes.quick_server import QuickServer

CERTIFICATE = Path(__file__).parents[1] / "transport" / "tls" / "certificate.pem"
"""Nodes' only authority, where the settings name none: to read all of the system's takes 20 ms."""
SOON = 60.0
"""Seconds that nothing here should need; a bound on a hang, not a measure."""


@dataclass(frozen=True)
class RunningProxy:
    """A running proxy, its two nodes, a client, and an operator (whose port is none: the application itself)."""

    client: httpx.AsyncClient
    operator: httpx.AsyncClient
    prefill: FakeNode
    decode: FakeNode
    running: Proxy

    async def until(self, text: str, path: str = "/metrics") -> None:
        """Wait until a page of the operators' port holds a text."""
        async with asyncio.timeout(SOON):
            await until(self.operator, text, path=path)


async def until(client: httpx.AsyncClient, *texts: str, path: str = "/metrics") -> None:
    """Wait until a page of the proxy holds these texts."""
    while True:
        page = (await client.get(path)).text
        if all(text in page for text in texts):
            return
        await asyncio.sleep(0.02)


async def until_serving(client: httpx.AsyncClient) -> None:
    """Wait until requests are served. A tenth of what metrics cost."""
    while True:
        if (await client.get("/ready")).status_code == 200:
            return
        await asyncio.sleep(0.02)


def up(name: str, role: Role) -> str:
    """The metric of a node that is up."""
    return f'pdproxy_node_up{{node="{name}",role="{role}",state="up"}} 1.0'


@contextlib.asynccontextmanager
async def running_proxy(
    settings: Settings, key: str = "none", prefill_dialect: int = 0, prefix: str = ""
) -> AsyncIterator[RunningProxy]:
    """Start everything; the settings' nodes are replaced. ``key`` is what the client sends at first; ``prefix`` stands
    before the nodes' paths."""
    fabric = FakeKvTransfer()
    prefill, decode = FakeNode("prefill", fabric), FakeNode("decode", fabric)
    prefill.dialect = prefill_dialect
    prefill.prefix = decode.prefix = prefix
    async with starting_proxy(settings, prefill, decode, key) as made:
        async with asyncio.timeout(SOON):
            await until_serving(made.operator)
        async with asyncio.timeout(SOON):
            await until(made.operator, *(up(f"{role}-0", role) for role in Role))
        yield made


@contextlib.asynccontextmanager
async def starting_proxy(
    settings: Settings, prefill: FakeNode, decode: FakeNode, key: str = "none"
) -> AsyncIterator[RunningProxy]:
    """The same before these nodes serve."""
    async with LoopbackNode(prefill) as left, LoopbackNode(decode) as right:
        nodes = tuple(
            ConfiguredNode(url=node.url + fake.prefix, roles=(role,), model="m")
            for node, fake, role in ((left, prefill, Role.PREFILL), (right, decode, Role.DECODE))
        )
        authorities = settings.upstream.ca_file or CERTIFICATE
        upstream = settings.upstream.model_copy(update={"ca_file": authorities})
        async with (
            proxy(settings.model_copy(update={"nodes": nodes, "upstream": upstream}), HostEnvironment()) as running,
            listening(running, settings) as url,
            plain_client(url, headers=bearer(key)) as client,
            operator_of(running) as operator,
        ):
            yield RunningProxy(client, operator, prefill, decode, running)


def operator_of(running: Proxy) -> httpx.AsyncClient:
    """A client of the operators' application, in memory."""
    transport = httpx.ASGITransport(app=cast(Any, running.operators))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


def plain_client(url: str, headers: Mapping[str, str] | None = None) -> httpx.AsyncClient:
    """A client for plain HTTP: without ``verify`` httpx reads all certificate authorities, 20 ms for each client."""
    return httpx.AsyncClient(base_url=url, trust_env=False, timeout=SOON, headers=headers, verify=False)


def bearer(key: str) -> dict[str, str]:
    """The header that carries a key."""
    return {"authorization": f"Bearer {key}"}


@contextlib.asynccontextmanager
async def listening(running: Proxy, settings: Settings) -> AsyncIterator[str]:
    """The clients' port; its address."""
    bound = bind("127.0.0.1", 0, "listen.port")
    http = guarded(ConnectionLimits(10_000, SOON, settings.deadlines.stall))
    config = uvicorn.Config(
        running.clients,
        http=http,
        ws="none",
        interface="asgi3",
        lifespan="off",
        log_config=None,
        timeout_graceful_shutdown=5,
    )
    server = QuickServer(config, bound)
    task = asyncio.create_task(server.serve(sockets=[bound]))
    try:
        yield f"http://{server.address}"
    finally:
        server.should_exit = True
        await task
