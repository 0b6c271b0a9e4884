"""A health check over fake nodes, and its visits."""

import asyncio

from pdproxy.nodes.health_check import HealthCheck
from pdproxy.nodes.join import Joiner, OutageLog
from pdproxy.nodes.node import Node, State
from pdproxy.nodes.pool import Pool
from pdproxy.nodes.preflight import Preflight
from tests.fakes.clock import FakeClock
from tests.nodes.fake_pool import FakePoolTransport


class FakeProof:
    """Notes the joining nodes."""

    def __init__(self) -> None:
        self.joined: list[str] = []

    async def __call__(self, node: Node) -> None:
        self.joined.append(node.name)


def health_check(
    pool: Pool, transport: FakePoolTransport, clock: FakeClock, proof: FakeProof | None = None
) -> HealthCheck:
    joiner = Joiner(pool, Preflight(transport), proof or FakeProof(), OutageLog(clock))
    return HealthCheck(pool, joiner, transport, clock)


async def visit_all(health: HealthCheck, pool: Pool) -> None:
    """One visit to each node, to its end."""
    await asyncio.gather(*(health.visit(view) for view in pool.state().nodes))


def state(pool: Pool, name: str) -> State:
    return pool.view(name).state
