"""Nodes of both roles with small caches: start them, hold conversations, check that they hold nothing in the end."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

import httpx

from deploy.local.model.quiz import quiz
from deploy.local.node import Node, NodeSpec, Role, on_free_ports, start_node
from deploy.local.readiness import await_ready
from deploy.local.stack import NODES_UP_WITHIN_S, Proxy, ProxySpec, Until, await_nodes, logs_of, start_nodes
from deploy.local.stack import start_proxy as start
from deploy.local.supervise import Supervisor
from tests.e2e.asking import Way
from tests.e2e.conversations import Turn, hold_all
from tests.e2e.metrics_reader import read
from tests.e2e.process_faults import ProcessFault, strike

BLOCKS = 56
"""Blocks of 256 tokens. Three long conversations overflow them: each takes up to eight, and as many states."""
TOKENS = 900
TURNS, AT_ONCE = (1, 2, 3), 6
EMPTY_WITHIN_S = 60.0
"""Seconds for leases that nobody read to end, and for the metrics to follow."""


@dataclass
class Equals:
    """All nodes, and the supervisor that started them."""

    supervisor: Supervisor
    nodes: list[Node]
    seeds: Iterator[int] = field(default_factory=lambda: count(7000, 1000))

    def proxy(self, nodes: int, routing: str) -> Proxy:
        """A proxy in front of the first `nodes` of them. Returns once every one serves."""
        spec = ProxySpec(more_environment={"PDPROXY_POLICY_ROUTING": routing})
        return start(self.supervisor, spec, self.nodes[:nodes], print)

    def heal(self, number: int, proxy: Proxy) -> None:
        """Start a killed node again. Returns once the proxy serves with it."""
        self.supervisor.stop(self.nodes[number].part)
        self.nodes[number] = start_node(self.supervisor, self.nodes[number].spec)
        await_nodes(self.supervisor, [self.nodes[number]], print)
        await_ready(
            {"every node's place": proxy.admin_url + Until.JOINED.value}, within=NODES_UP_WITHIN_S,
            still_alive=self.supervisor.require_all_alive, say=print, probe=take_requests,
        )  # fmt: skip

    async def talk(self, proxy: Proxy, talks: int) -> list[Turn]:
        """Hold new conversations."""
        seed = next(self.seeds)
        stories = {f"talk-{seed}-{number}": quiz(seed + number, TOKENS) for number in range(talks)}
        return await hold_all(proxy, stories, TURNS, AT_ONCE, Way.COMPLETION_STREAM)

    def empty(self) -> None:
        """Wait until no node holds anything."""
        limit = time.monotonic() + EMPTY_WITHIN_S
        while held := {node.url: read(node.url, "vllm:kv_cache_usage_perc") for node in self.nodes}:
            if not any(held.values()):
                return
            assert time.monotonic() < limit, held
            time.sleep(0.5)


def take_requests(url: str) -> bool:
    """Whether `GET url` (the proxy's `/nodes`) says that all nodes take requests.

    A node that is back before a health check missed it is *probing* until a request has ended well there.
    """
    nodes = httpx.get(url, trust_env=False).json()["nodes"]
    return {node["state"] for node in nodes} <= {"up", "probing"}


@contextmanager
def equal_nodes(run: str, nodes: int) -> Iterator[Equals]:
    """Start the nodes. Logs: `.run/RUN`."""
    with Supervisor(logs_of(run)) as supervisor:
        specs = on_free_ports(*(NodeSpec(f"node-{each}", Role.BOTH, 0, 0, gpu_blocks=BLOCKS) for each in range(nodes)))
        yield Equals(supervisor, start_nodes(supervisor, specs, print))


async def give_roles(operator: httpx.AsyncClient, number: int, *roles: str) -> None:
    """Give a node these roles, as an operator does."""
    changed = await operator.patch(f"/nodes/node-{number}", json={"roles": roles})
    assert changed.status_code == 202


async def kill_and_heal(equals: Equals, number: int, proxy: Proxy) -> None:
    """Kill a node and start it again. Returns once the proxy serves with it."""
    await asyncio.to_thread(strike, equals.nodes[number].part, ProcessFault.KILLED)
    await asyncio.to_thread(equals.heal, number, proxy)
