"""A transport with a fake clock; connections that it leaves open fail the test."""

from collections.abc import AsyncIterator

import pytest

from pdproxy.transport.h1_client import H1Transport
from tests.transport.asking import HandClock


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
async def transport(clock: HandClock) -> AsyncIterator[H1Transport]:
    transport = H1Transport(clock)
    yield transport
    await transport.aclose()
    assert transport.connections == 0
