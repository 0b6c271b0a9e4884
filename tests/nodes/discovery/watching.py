"""Watching an API server: a source, its clock, and its lists."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

from pdproxy.nodes.discovery.kubernetes import Api, KubernetesSource, Query
from pdproxy.nodes.discovery.source import Nodes, Template
from pdproxy.nodes.node import Role
from tests.nodes.discovery.apiserver import ApiServer

Lists = AsyncGenerator[Nodes, None]
CERTIFICATE = Path(__file__).parents[2] / "transport" / "tls" / "certificate.pem"
"""The only authority: without one, each source reads all of the system's, 60 ms."""


class NoWaitClock:
    """A clock that never waits, and records for how long it should have."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def now(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def a_source(
    server: ApiServer, clock: NoWaitClock, token: Path, **seconds: Any
) -> AsyncIterator[KubernetesSource]:
    """A source, which leaves no connection behind."""
    query = Query("ai", "kubernetes.io/service-name=decode", "http")
    source = KubernetesSource(Api(server.url, token, CERTIFICATE), query, Template((Role.DECODE,)), clock, **seconds)
    yield source
    await source.aclose()
    await server.all_gone()


@contextlib.asynccontextmanager
async def watching(server: ApiServer, clock: NoWaitClock, token: Path, **seconds: Any) -> AsyncIterator[Lists]:
    """The lists of a source that is being watched."""
    async with a_source(server, clock, token, **seconds) as source, contextlib.aclosing(source.watch()) as made:
        yield made


async def hosts(lists: Lists) -> list[str]:
    """The next list's addresses; the limit only ends a hang."""
    async with asyncio.timeout(60):
        return [node.url.removeprefix("http://") for node in await anext(lists)]
