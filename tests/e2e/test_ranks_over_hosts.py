"""An engine of four data-parallel ranks over two hosts, as the chart starts it: each host's server drives its own
ranks.

vLLM calls this hybrid load balancing. Here both hosts are 127.0.0.1. The proxy sees each as a node of two ranks, which
are the engine's 0 and 1, or 2 and 3: side channels and KV events use the engine's numbers, while a server counts from
0. The model is dense, as in `test_data_parallel`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import httpx
import pytest

from deploy.local.node import Node, NodeSpec, Role, on_free_ports, start_node
from deploy.local.ports import HOST, free_row
from deploy.local.stack import Proxy, ProxySpec, await_nodes, logs_of, start_proxy
from deploy.local.supervise import Supervisor
from tests.e2e.dense import Dense, make_dense
from tests.e2e.metrics_reader import watch
from tests.e2e.ranks import Rank, complete_ids, draw

pytestmark = [pytest.mark.long, pytest.mark.own_engines]

HOSTS, LOCAL = 2, 2
RANKS = HOSTS * LOCAL


@dataclass(frozen=True)
class Spread:
    """The engine's hosts, and the node of the other role, which has one rank."""

    hosts: list[Node]
    other: Node
    proxy: Proxy

    @property
    def ranks(self) -> list[Rank]:
        """All ranks, numbered as their own servers count them."""
        return [Rank(host, rank) for host in self.hosts for rank in range(LOCAL)]


def spec(name: str, role: Role, model: Dense, ranks: int = 1) -> NodeSpec:
    """A node with this model."""
    return NodeSpec(
        name, role, 0, 0, model=model.folder, gpu_blocks=128, block_size=None, prefix_match_unit=None,
        data_parallel_size=ranks, more_arguments=("--dtype", "float32"),
    )  # fmt: skip


def on_host(given: NodeSpec, host: int, port: int) -> NodeSpec:
    """The spec of one host. ``port``: the first of three ports by which the hosts meet."""
    more = {
        "--nnodes": HOSTS, "--node-rank": host, "--master-addr": HOST, "--master-port": port,
        "--data-parallel-rpc-port": port + 2, "--data-parallel-size-local": LOCAL,
        "--distributed-executor-backend": "mp",
    }  # fmt: skip
    words = [str(word) for pair in more.items() for word in pair]
    return replace(given, more_arguments=(*given.more_arguments, *words, "--data-parallel-hybrid-lb"))


@pytest.fixture(scope="module", params=[Role.PREFILL, Role.DECODE], ids=lambda role: role.name.lower())
def spread(request: pytest.FixtureRequest, model: Dense) -> Iterator[Spread]:
    """An engine of this role over two hosts."""
    role = request.param
    others = Role.DECODE if role is Role.PREFILL else Role.PREFILL
    with Supervisor(logs_of("ranks_over_hosts")) as supervisor:
        meeting = free_row(3)[0]
        *hosts, other = on_free_ports(
            *(spec(f"host{host}", role, model, RANKS) for host in range(HOSTS)), spec("other", others, model)
        )
        specs = [*(on_host(host, index, meeting) for index, host in enumerate(hosts)), other]
        nodes = [start_node(supervisor, each) for each in specs]
        await_nodes(supervisor, nodes, print)
        yield Spread(nodes[:HOSTS], nodes[HOSTS], start_proxy(supervisor, ProxySpec(), nodes, print))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Dense:
    return make_dense(tmp_path_factory.mktemp("dense"))


def test_each_rank_hands_over_by_its_own_side_channel(spread: Spread, model: Dense) -> None:
    other = Rank(spread.other, 0)
    for seed, (index, rank) in enumerate(zip(itertools.count(), spread.ranks, strict=False), 10):
        gives = rank.node.spec.role is Role.PREFILL
        give, take = (rank, other) if gives else (other, rank)
        asked = draw(model, seed)
        verified = watch(take.node.url, "reads", outcome="verified")
        headers = (None, {"X-data-parallel-rank": str(rank.rank)})
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        first = complete_ids(give.node.url, asked.prompt, 1, headers[gives], kv_transfer_params=params)
        ticket = first["kv_transfer_params"]
        assert ticket["remote_port"] == give.node.spec.side_channel_port + (index if gives else 0)
        last = complete_ids(take.node.url, asked.prompt, 6, headers[not gives], kv_transfer_params=ticket)
        assert last["choices"][0]["token_ids"] == asked.answer
        verified.reaches(1)


def test_the_proxy_counts_ranks_as_each_server_does_and_reads_their_events(spread: Spread, model: Dense) -> None:
    """The proxy names the planned rank in each leg. A server refuses a rank that it does not drive."""
    for seed in range(40, 40 + 2 * RANKS):
        asked = draw(model, seed)
        assert complete_ids(spread.proxy.url, asked.prompt)["choices"][0]["token_ids"] == asked.answer
    shown = httpx.get(f"{spread.proxy.admin_url}/nodes", timeout=30, trust_env=False).json()["nodes"]
    known = {node["url"]: [(place["rank"], place["known"]) for place in node["caches"]] for node in shown}
    assert [known[host.url] for host in spread.hosts] == [[(0, "all"), (1, "all")]] * HOSTS
    blocks = [place["blocks"] for node in shown if node["url"] != spread.other.url for place in node["caches"]]
    assert sum(count > 0 for count in blocks) > LOCAL, "plans went to ranks of both hosts"
