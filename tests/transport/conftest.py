"""A transport whose clock moves when told; what it leaves open fails the test."""

from collections.abc import AsyncIterator

import pytest

from pdproxy.transport.http import HttpTransport
from tests.transport.asking import HandClock


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
async def transport(clock: HandClock) -> AsyncIterator[HttpTransport]:
    transport = HttpTransport(clock)
    yield transport
    await transport.aclose()
    assert transport.connections == 0
