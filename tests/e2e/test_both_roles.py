"""Two equal nodes, each prefills and decodes, with small caches: conversations while one dies and while roles change.

Then one of them alone. With `least-loaded` every prompt is handed over, both ways at once; with `cache` prices decide.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import httpx
import pytest

from deploy.local.model.quiz import quiz
from deploy.local.node import Node, NodeSpec, Role, on_free_ports, start_node
from deploy.local.readiness import await_ready
from deploy.local.stack import NODES_UP_WITHIN_S, PROBES, Proxy, ProxySpec, Until, await_nodes, logs_of, start_nodes
from deploy.local.stack import start_proxy as start
from deploy.local.supervise import Supervisor
from tests.e2e.asking import Way
from tests.e2e.conversations import Turn, hold_all, remote_share, wrong
from tests.e2e.metrics_reader import read
from tests.e2e.process_faults import ProcessFault, strike

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines, pytest.mark.timeout(900)]

BLOCKS = 56
"""Of 256 tokens: three long conversations overflow it (each takes up to eight, and as many states)."""
TOKENS = 900
TALKS, MANY, TURNS, AT_ONCE = 16, 64, (1, 2, 3), 6
EMPTY_WITHIN_S = 60.0
"""For leases that nobody read, and for what nodes tell of it."""


@dataclass
class Equals:
    """Both nodes, and what is started beside them."""

    supervisor: Supervisor
    nodes: list[Node]
    seeds: Iterator[int] = field(default_factory=lambda: count(7000, 100))

    def proxy(self, nodes: int, routing: str) -> Proxy:
        """A proxy in front of so many of them, every one serving."""
        spec = ProxySpec(more_environment={"PDPROXY_POLICY_ROUTING": routing})
        return start(self.supervisor, spec, self.nodes[:nodes], print)

    def heal(self, number: int, proxy: Proxy) -> None:
        """Start a node anew that was killed; returns when the proxy serves with it."""
        self.supervisor.stop(self.nodes[number].part)
        self.nodes[number] = start_node(self.supervisor, self.nodes[number].spec)
        await_nodes(self.supervisor, [self.nodes[number]], print)
        await_ready(
            {"every node's place": proxy.admin_url + Until.JOINED.value}, within=NODES_UP_WITHIN_S,
            still_alive=self.supervisor.require_all_alive, say=print, probe=PROBES[Until.JOINED],
        )  # fmt: skip

    async def talk(self, proxy: Proxy, talks: int = TALKS) -> list[Turn]:
        """Conversations that no node has seen."""
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


@pytest.fixture(scope="module")
def equals() -> Iterator[Equals]:
    """Logs lie in `.run/e2e-both-roles`."""
    with Supervisor(logs_of("e2e-both-roles")) as supervisor:
        specs = on_free_ports(*(NodeSpec(f"node-{each}", Role.BOTH, 0, 0, gpu_blocks=BLOCKS) for each in range(2)))
        yield Equals(supervisor, start_nodes(supervisor, specs, print))


@pytest.mark.parametrize("routing", ["least-loaded", "cache"])
async def test_conversations_on_two_equal_nodes(equals: Equals, routing: str) -> None:
    proxy = await asyncio.to_thread(equals.proxy, 2, routing)
    turns = await equals.talk(proxy)
    assert len(turns) == TALKS * len(TURNS)
    assert wrong(turns, equals.nodes[0]) == []
    print(f"{routing}: {remote_share(turns):.0%} of {len(turns)} turns were handed over")
    if routing == "least-loaded":
        assert remote_share(turns) > 0.9
        reads = [read(node.url, "pdproxy_connector_reads_total", outcome="verified") for node in equals.nodes]
        assert all(reads), reads
    equals.empty()


async def test_roles_change_under_conversations(equals: Equals) -> None:
    """One node is made a decode node, and does both again; so is the other one."""
    proxy = await asyncio.to_thread(equals.proxy, 2, "least-loaded")
    talking = asyncio.create_task(equals.talk(proxy, MANY))
    async with httpx.AsyncClient(base_url=proxy.admin_url, trust_env=False) as operator:
        for node, roles in ((0, ["decode"]), (0, ["prefill", "decode"]), (1, ["prefill"]), (1, ["prefill", "decode"])):
            await asyncio.sleep(1.0)
            assert not talking.done()
            changed = await operator.patch(f"/nodes/node-{node}", json={"roles": roles})
            assert changed.status_code == 202
        turns = await talking
        assert (await operator.get("/nodes/node-0")).json()["state"] == "up"
    assert len(turns) == MANY * len(TURNS)
    assert wrong(turns, equals.nodes[0]) == []
    equals.empty()


async def test_a_node_dies_under_conversations(equals: Equals) -> None:
    """The other one goes on alone."""
    proxy = await asyncio.to_thread(equals.proxy, 2, "least-loaded")
    talking = asyncio.create_task(equals.talk(proxy, MANY))
    await asyncio.sleep(2.0)
    assert not talking.done()
    await asyncio.to_thread(strike, equals.nodes[1].part, ProcessFault.KILLED)
    turns = await talking
    assert len(turns) == MANY * len(TURNS)
    await asyncio.to_thread(equals.heal, 1, proxy)
    assert wrong(turns, equals.nodes[0]) == []
    equals.empty()


async def test_one_node_alone(equals: Equals) -> None:
    proxy = await asyncio.to_thread(equals.proxy, 1, "cache")
    async with httpx.AsyncClient(base_url=proxy.admin_url, trust_env=False) as operator:
        assert (await operator.get("/ready")).json()["status"] == "ready"
    turns = await equals.talk(proxy, 6)
    assert {turn.remote for turn in turns} == {False}
    assert wrong(turns, equals.nodes[0]) == []
    assert read(proxy.admin_url, "pdproxy_local_total", reason="only_node") == len(turns)
    assert read(proxy.admin_url, "pdproxy_hand_overs_failing") == 0
    equals.empty()
