"""The world of `world`, on real sockets of 127.0.0.1 and with the machine's clock."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from prometheus_client import CollectorRegistry

from pdproxy.clock import SystemClock
from pdproxy.drive.means import Means
from pdproxy.drive.terms import Terms
from pdproxy.nodes.circuit import CircuitRules
from pdproxy.nodes.node import Node, Role
from pdproxy.nodes.pool import Pool
from pdproxy.observe.metrics import Metrics
from pdproxy.orchestrate import Orchestrator
from pdproxy.transport.http import HttpTransport
from tests.drive.world import MODEL
from tests.fakes.fabric import Fabric
from tests.fakes.loopback import LoopbackNode
from tests.fakes.node import FakeNode

PATIENT = 60.0
"""Seconds after which a test gives up: far more than any machine needs."""


class Town:
    """Nodes p0…, d0… on free ports, behind the real transport."""

    def __init__(self, fabric: Fabric, nodes: list[LoopbackNode], terms: Terms) -> None:
        clock = SystemClock()
        self.fabric = fabric
        self.nodes = nodes
        self.registry = CollectorRegistry()
        self.transport = HttpTransport(clock)
        self.pool = Pool(clock, CircuitRules(failures=3, cool_down=0.2, longest_cool_down=0.5, slow_start=0.0))
        for node in nodes:
            role = Role.PREFILL if node.node.name.startswith("p") else Role.DECODE
            member = Node(node.node.name, node.url, role, MODEL)
            self.pool.add(member)
            self.pool.admit(member)
        self.orchestrator = Orchestrator(Means(self.transport, self.pool, Metrics(self.registry), clock, terms))

    async def close(self) -> None:
        """End the proxy's side, and check that it left nothing."""
        await self.orchestrator.aclose()
        assert self.orchestrator.errands == 0
        assert {view.node.name: view.active for view in self.pool.snapshot().nodes if view.active} == {}
        await self.transport.aclose()
        assert self.transport.connections == 0
        await until(lambda: not any(node.connections() for node in self.nodes))
        assert self.fabric.held == {}
        assert self.fabric.wrong == []


@contextlib.asynccontextmanager
async def town(prefills: int = 2, decodes: int = 2, terms: Terms | None = None) -> AsyncIterator[Town]:
    """A running town; the nodes end with the block."""
    fabric = Fabric()
    names = [*(f"p{index}" for index in range(prefills)), *(f"d{index}" for index in range(decodes))]
    async with contextlib.AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(LoopbackNode(FakeNode(name, fabric))) for name in names]
        yield Town(fabric, nodes, terms or Terms())


async def until(holds: Callable[[], bool]) -> None:
    """Wait for a condition that other tasks bring about."""
    async with asyncio.timeout(PATIENT):
        while not holds():  # noqa: ASYNC110 - the condition has no event of its own
            await asyncio.sleep(0.01)
