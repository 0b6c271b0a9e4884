"""Streams go on when the only node ends, or one node after the other, and all are started again."""

import asyncio
import enum
import time
from collections.abc import Callable

import httpx
import pytest

from deploy.local.node import start_node
from deploy.local.stack import Proxy
from tests.e2e.conftest import async_client
from tests.e2e.equal_nodes import Equals, equal_nodes
from tests.e2e.metrics_reader import read
from tests.e2e.process_faults import ProcessFault, strike
from tests.e2e.stream_load import StreamLoad, reciters, start_stream_load

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines, pytest.mark.timeout(900)]

STREAMS = 6
"""As many as fit the small cache of one node."""
MISSED_WITHIN_S = 30.0
"""Seconds for some health checks, five seconds apart."""


class Ending(enum.StrEnum):
    """How a node's processes end."""

    KILLED = "killed"
    ASKED = "asked"
    """By SIGTERM, as in an upgrade: vLLM aborts running requests."""


async def end_all(equals: Equals, ending: Ending, load: StreamLoad) -> None:
    """End all nodes, each as soon as the streams that moved to it have got on there.

    A stream that two nodes broke without a token in between goes to no third one (docs/failures.md).
    """
    if ending is Ending.KILLED:
        for node in equals.nodes:
            await asyncio.to_thread(strike, node.part, ProcessFault.KILLED)
            if node is not equals.nodes[-1]:
                await load.until(further_than([len(stream.at) for stream in load.streams]))
    for node in equals.nodes:
        await asyncio.to_thread(equals.supervisor.stop, node.part)


def further_than(pieces: list[int]) -> Callable[[StreamLoad], bool]:
    """Whether each stream has more pieces than this, or has ended."""

    def reached(load: StreamLoad) -> bool:
        got = zip(load.streams, pieces, strict=True)
        return all(stream.finish or len(stream.at) > before for stream, before in got)

    return reached


def await_missed(proxy: Proxy) -> None:
    """Wait until the proxy has missed all nodes. A real start takes longer; a forked one may not."""
    limit = time.monotonic() + MISSED_WITHIN_S
    while True:
        nodes = httpx.get(f"{proxy.admin_url}/nodes", trust_env=False).json()["nodes"]
        if {node["state"] for node in nodes} == {"down"}:
            return
        assert time.monotonic() < limit, nodes
        time.sleep(0.1)


def start_all(equals: Equals) -> None:
    """Start the nodes, without waiting until they serve."""
    equals.nodes = [start_node(equals.supervisor, node.spec) for node in equals.nodes]


def half_way(load: StreamLoad) -> bool:
    """Whether more than half of the streams have a part of their answers."""
    return 2 * load.begun(20) > len(load.streams)


@pytest.mark.parametrize(
    ("nodes", "ending"),
    [(1, Ending.KILLED), (1, Ending.ASKED), pytest.param(2, Ending.KILLED, marks=pytest.mark.long)],
)
async def test_streams_go_on_after_a_restart_of_all_nodes(nodes: int, ending: Ending) -> None:
    with equal_nodes(f"e2e-restarts-of-{nodes}-{ending}", nodes) as equals:
        proxy = await asyncio.to_thread(equals.proxy, nodes, "cache")
        async with async_client(equals.nodes[0].url) as alone:
            streams = await reciters(alone, next(equals.seeds), STREAMS)
        async with start_stream_load(proxy.url, streams) as load:
            await load.until(half_way)
            begun = load.begun()
            await end_all(equals, ending, load)
            await asyncio.to_thread(await_missed, proxy)
            await asyncio.to_thread(start_all, equals)
        moved = read(proxy.admin_url, "pdproxy_migrations_total", outcome="done")
        print(f"\n{nodes} nodes {ending}: {begun} of {STREAMS} had begun, {moved:.0f} moves,", end=" ")
        print(f"longest stall {load.longest_stall():.1f} s")
        assert not load.verdict()
        assert moved >= begun / 2 * nodes
        equals.empty()
