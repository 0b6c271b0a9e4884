"""An idle stream holds no more memory than is said; a proxy that is measured reads the KV events of all nodes."""

import asyncio
import os

import pytest

from deploy.bench.blocked import Nodes, running_proxy
from deploy.bench.peers import PDPROXY
from deploy.bench.sweep import ROOMY, Fleet, held, own_core, resident, settled, take_turn

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


async def test_kv_events_of_every_node_are_read() -> None:
    """Also of those that are not at 127.0.0.1, where a proxy looks for the publishers."""
    fleet = Fleet(PDPROXY, Nodes(2, batches=50.0))
    cores = os.sched_getaffinity(0)
    async with fleet.running() as proxy:
        await settled(fleet, proxy)
        with own_core(proxy, [proxy]):
            turn = await take_turn(fleet, {fleet: proxy})
            own = os.sched_getaffinity(proxy.process.pid)
            others = [os.sched_getaffinity(pid) for pid in (0, *(node.pid for node in proxy.nodes))]
    assert own == {min(cores)}
    assert others == [cores - own or cores] * 3
    assert os.sched_getaffinity(0) == cores
    assert turn.request > 0
