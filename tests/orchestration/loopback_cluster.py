"""The same cluster on real sockets of 127.0.0.1, with the machine's clock."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from prometheus_client import CollectorRegistry

from pdproxy.clock import SystemClock
from pdproxy.nodes.circuit_breaker import CircuitBreakerConfig
from pdproxy.nodes.node import NO_FOOTPRINT, Capacity, Node, Role
from pdproxy.nodes.pool import Pool
from pdproxy.observe.metrics import Metrics
from pdproxy.orchestration.context import OrchestrationConfig, OrchestrationContext
from pdproxy.orchestration.orchestrator import Orchestrator
from pdproxy.transport.h1_client import H1Transport
from tests.fakes.kv_transfer import FakeKvTransfer
from tests.fakes.loopback import LoopbackNode
from tests.fakes.node import FakeNode
from tests.orchestration.cluster import MODEL

PATIENT = 60.0
"""Seconds after which a test gives up: far more than any machine needs."""


class LoopbackCluster:
    """Nodes p0…, d0… on free ports, behind the real transport."""

    def __init__(
        self,
        fabric: FakeKvTransfer,
        nodes: list[LoopbackNode],
        config: OrchestrationConfig,
        capacity: Capacity | None = None,
    ) -> None:
        clock = self.clock = SystemClock()
        self.fabric = fabric
        self.nodes = nodes
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry)
        self.transport = H1Transport(clock, on_resend=self.metrics.resent)
        self.pool = Pool(clock, CircuitBreakerConfig(failures=3, cool_down=0.2, longest_cool_down=0.5, slow_start=0.0))
        for node in nodes:
            fake = node.node
            role = Role.PREFILL if fake.name.startswith("p") else Role.DECODE
            entry = Node(
                fake.name, node.url, (role,), MODEL,
                can_resume=fake.can_resume, capacity=capacity,
            )  # fmt: skip
            self.pool.add(entry)
            self.pool.bring_up(entry)
        self.context = self.make_context(config)
        self.orchestrator = Orchestrator(self.context)

    def make_context(self, config: OrchestrationConfig) -> OrchestrationContext:
        """The context of the orchestration."""
        return OrchestrationContext(self.transport, self.pool, self.metrics, self.clock, config)

    def count(self, name: str) -> float:
        """A counter's value, over all its series."""
        families = self.registry.restricted_registry([name]).collect()
        return sum(each.value for family in families for each in family.samples if each.name == name)

    async def close(self) -> None:
        """End the proxy's side, and check that it left nothing."""
        await self.context.background.aclose()
        assert self.context.background.errands == 0
        assert {view.node.name: view.active for view in self.pool.state().nodes if view.active} == {}
        assert {view.footprint for view in self.pool.state().nodes} == {NO_FOOTPRINT}
        assert not any(place.queued or place.keys for view in self.pool.state().nodes for place in view.places)
        status = self.context.queue.status()
        assert (status.running, status.waiting) == (0, 0)
        await self.transport.aclose()
        assert self.transport.connections == 0
        await until(lambda: not any(node.connections() for node in self.nodes))
        assert self.fabric.held == {}
        assert self.fabric.wrong == [], self.fabric.wrong[:3]


@contextlib.asynccontextmanager
async def loopback_cluster(
    prefills: int = 2,
    decodes: int = 2,
    config: OrchestrationConfig | None = None,
    capacity: Capacity | None = None,
    journaling: int | None = None,
    node: Callable[[FakeNode], LoopbackNode] = LoopbackNode,
) -> AsyncIterator[LoopbackCluster]:
    """A running cluster; its nodes stop when the block ends. So many decode nodes, the first ones, write journals; all
    unless it is given. ``node`` makes the server of each."""
    fabric = FakeKvTransfer()
    names = [*(f"p{index}" for index in range(prefills)), *(f"d{index}" for index in range(decodes))]
    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(node(FakeNode(name, fabric))) for name in names]
        last = None if journaling is None else prefills + journaling
        for server in servers[prefills:last]:
            server.node.can_resume = True
        yield LoopbackCluster(fabric, servers, config or OrchestrationConfig(), capacity)


async def until(holds: Callable[[], bool]) -> None:
    """Wait for a condition that other tasks bring about."""
    async with asyncio.timeout(PATIENT):
        while not holds():  # noqa: ASYNC110 - the condition has no event of its own
            await asyncio.sleep(0.01)
