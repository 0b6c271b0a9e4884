"""A pool of a prefill and a decode node behind a fake transport, and the health check of it."""

import pytest

from pdproxy.nodes.circuit_breaker import CircuitBreakerConfig
from pdproxy.nodes.health_check import HealthCheck
from pdproxy.nodes.node import Role
from pdproxy.nodes.pool import Pool
from tests.fakes.clock import FakeClock
from tests.nodes.fake_pool import FakeNodeInfo, FakePoolTransport
from tests.nodes.health import health_check


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def transport() -> FakePoolTransport:
    return FakePoolTransport(p1=FakeNodeInfo(Role.PREFILL), d1=FakeNodeInfo(Role.DECODE))


@pytest.fixture
async def pool(clock: FakeClock, transport: FakePoolTransport) -> Pool:
    made = Pool(clock, CircuitBreakerConfig(failures=3, cool_down=10))
    made.add(transport.node("p1"))
    made.add(transport.node("d1"))
    return made


@pytest.fixture
def health(pool: Pool, transport: FakePoolTransport, clock: FakeClock) -> HealthCheck:
    return health_check(pool, transport, clock)
