"""An idle stream does not hold more memory than is said of it."""

import asyncio

import pytest

from deploy.bench.blocked import Nodes, running_proxy
from deploy.bench.peers import PDPROXY
from deploy.bench.sweep import ROOMY, held, resident

STREAMS = 800
MOST = 29.5
"""KB of the resident set for each stream, with the default settings. It is 28.1."""


@pytest.mark.timeout(180)
async def test_an_idle_stream_holds_little_memory() -> None:
    async with running_proxy(PDPROXY, Nodes(), *ROOMY) as proxy:
        before = resident(proxy.process.pid)
        async with held(proxy, STREAMS):
            await asyncio.sleep(1)
            each = (resident(proxy.process.pid) - before) / STREAMS / 1000
    assert each <= MOST
