"""Every decode node is restarted in turn while streams of all shapes run: no client notices.

The steps are those of docs/upgrading.md: drain the node, which hands its streams over, stop it, start it again, and let
it rejoin.
"""

import asyncio
import random
import time
from collections.abc import Iterator

import httpx
import pytest

from deploy.local.node import start_node
from deploy.local.stack import await_nodes
from tests.e2e.fleet import Fleet, running_fleet
from tests.e2e.metrics_reader import read
from tests.e2e.proxy_log import LogTail
from tests.e2e.stream_cuts import SPREAD_S, FollowedStream, follow, keep_asking, uncut
from tests.e2e.stream_shapes import NODE_FLAGS, shapes

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines, pytest.mark.long, pytest.mark.timeout(1500)]

CLIENTS = 4
"""Clients at any time. With more, two cores take minutes to start a node."""
DRAIN_S = 0
"""Seconds for streams to end by themselves: none, so that all of them are handed over."""
SETTLED_WITHIN_S = 120.0
UNDISTURBED_S = 3.0
"""Seconds of load before the first restart."""


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """Three nodes with our parsers and a proxy. Logs: `.run/e2e-restarts`."""
    with running_fleet("e2e-restarts", {}, decode=(), more=NODE_FLAGS) as fleet:
        yield fleet


async def test_decode_nodes_are_restarted_one_after_another(fleet: Fleet) -> None:
    answers = await uncut(fleet.proxy.url, shapes())
    streams = list[FollowedStream]()
    log, enough, source = LogTail(fleet.proxy.part.log), asyncio.Event(), random.Random(20261123)
    async with asyncio.TaskGroup() as group:
        clients = [
            group.create_task(keep_asking(fleet.proxy.url, answers, shapes(), random.Random(source.random()), enough))
            for _ in range(CLIENTS)
        ]
        await asyncio.sleep(UNDISTURBED_S)
        for name in ("decode-0", "decode-1"):
            more = [FollowedStream(shape, answers[shape.name], source.uniform(0, SPREAD_S)) for shape in shapes()]
            followed = [group.create_task(follow(fleet.proxy.url, stream)) for stream in more]
            await asyncio.sleep(SPREAD_S)
            await asyncio.to_thread(restart, fleet, name)
            await asyncio.wait(followed)
            streams += more
        enough.set()
    streams += [stream for client in clients for stream in client.result()]
    assert not "".join(stream.wrong() for stream in streams)
    moved = log.moved()
    show(streams, moved)
    assert len(moved) > len(shapes()) // 3, "too few streams were under way when nodes were drained"
    assert read(fleet.proxy.admin_url, "pdproxy_migrations_total", outcome="failed") == 0


def restart(fleet: Fleet, name: str) -> None:
    """Drain, stop, start, rejoin. Returns once the node serves."""
    url = f"{fleet.proxy.admin_url}/nodes/{name}"
    began = time.monotonic()
    httpx.post(f"{url}/drain", params={"seconds": DRAIN_S}, trust_env=False).raise_for_status()
    until(url, "active", 0)
    empty = time.monotonic()
    start_anew(fleet, name)
    httpx.post(f"{url}/rejoin", trust_env=False).raise_for_status()
    until(url, "state", "up")
    print(f"\n{name}: empty after {empty - began:.2f} s, serves again after {time.monotonic() - began:.0f} s")


def start_anew(fleet: Fleet, name: str) -> None:
    """Stop a node with SIGTERM and start it again. Returns once it answers."""
    node = fleet.nodes[name]
    fleet.supervisor.stop(node.part)
    fleet.nodes[name] = start_node(fleet.supervisor, node.spec)
    await_nodes(fleet.supervisor, [fleet.nodes[name]], print)


def until(url: str, key: str, value: object) -> None:
    """Wait for a value in the proxy's report about a node. Raises AssertionError after SETTLED_WITHIN_S."""
    limit = time.monotonic() + SETTLED_WITHIN_S
    while (said := httpx.get(url, trust_env=False).raise_for_status().json()[key]) != value:
        assert time.monotonic() < limit, f"{url}: {key} is {said}, not {value}"
        time.sleep(0.05)


def show(streams: list[FollowedStream], moved: dict[str, tuple[str, float]]) -> None:
    """Print the pauses of the streams that were moved, beside those of the others."""
    stalls = sorted(stream.stall() for stream in streams if stream.request_id in moved)
    others = max((stream.stall() for stream in streams if stream.request_id not in moved), default=0.0)
    kinds = {stream.shape.name for stream in streams if stream.request_id in moved}
    print(f"\n{len(streams)} streams; moved: {len(moved)}, of {len(kinds)} shapes; stalls of those:", end=" ")
    print(", ".join(f"{stall:.2f}" for stall in stalls), f"s; the longest of the others: {others:.2f} s")
