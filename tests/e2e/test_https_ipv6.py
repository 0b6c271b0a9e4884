"""Nodes on IPv6 with HTTPS (the chart's `ipv6` and `nodes.tls`), behind a proxy that finds them by one name."""

import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from deploy.local.model.quiz import quiz
from deploy.local.node import SERVED_NAME, Node, NodeSpec, Role, on_free_ports, start_node
from deploy.local.readiness import await_ready
from deploy.local.stack import NODES_UP_WITHIN_S, ProxySpec, Until, logs_of, start_proxy
from deploy.local.supervise import Supervisor
from tests.e2e.metrics_reader import PATIENCE_S
from tests.fakes.certificates import identity

pytestmark = [pytest.mark.long, pytest.mark.own_engines]

HERE = "::1"
NAME = "nodes.example"


@dataclass(frozen=True)
class Secured:
    """The proxy's addresses for clients and operators, and a client that trusts the nodes' certificates."""

    clients: str
    operators: str
    nodes: list[str]
    trusting: httpx.Client
    authority: Path


def url(node: Node) -> str:
    """The URL of a node."""
    return f"https://[{HERE}]:{node.spec.port}"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """A prefill and a decode node, and a proxy, which knows the certificate by its name."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = identity("nodes", NAME).write(folder)
    tls = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), "--enable-ssl-refresh")
    more = ("--host", "::", *tls, "--revision", "main", "--tokenizer-revision", "main")
    there = {"VLLM_HOST_IP": HERE, "VLLM_NIXL_SIDE_CHANNEL_HOST": HERE}
    roles = {"prefill": Role.PREFILL, "decode": Role.DECODE}
    specs = [NodeSpec(name, role, 0, 0, more_arguments=more, more_environment=there) for name, role in roles.items()]
    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False
    with Supervisor(logs_of("https_ipv6")) as supervisor, httpx.Client(verify=context, trust_env=False) as client:

        def healthy(address: str) -> bool:
            try:
                return client.get(address, timeout=5).is_success
            except httpx.HTTPError:
                return False

        nodes = [start_node(supervisor, spec) for spec in on_free_ports(*specs)]
        asked = {node.spec.name: f"{url(node)}/health" for node in nodes}
        alive = supervisor.require_all_alive
        await_ready(asked, within=NODES_UP_WITHIN_S, still_alive=alive, say=print, probe=healthy)
        settings = {
            "PDPROXY_UPSTREAM_CA_FILE": str(certificate),
            "PDPROXY_UPSTREAM_SERVER_NAME": NAME,
            "PDPROXY_POLICY_ROUTING": "hybrid",
        }
        words = [word for node, role in zip(nodes, roles, strict=True) for word in (f"--{role}", url(node))]
        spec = ProxySpec(more_arguments=tuple(words), more_environment=settings, until=Until.JOINED)
        proxy = start_proxy(supervisor, spec, [], print)
        yield Secured(proxy.url, proxy.admin_url, [url(node) for node in nodes], client, certificate)


def test_the_hand_over_is_read(secured: Secured) -> None:
    asked = quiz(5, 900)
    body = {"model": SERVED_NAME, "prompt": asked.prompt(), "max_tokens": 12, "temperature": 0}
    got = httpx.post(f"{secured.clients}/v1/completions", json=body, timeout=PATIENCE_S, trust_env=False)
    assert got.raise_for_status().json()["choices"][0]["text"] == asked.answer
    assert got.headers["x-pdproxy-route"].startswith("disaggregated")
    assert "x-pdproxy-recomputed" not in got.headers


def test_kv_events_are_read_and_prometheus_finds_the_nodes(secured: Secured) -> None:
    for node in secured.nodes:
        [source] = secured.trusting.get(f"{node}/kv_event_sources").json().values()
        assert source["endpoint"].startswith(f"tcp://[{HERE}]:")
    ends = time.monotonic() + PATIENCE_S
    while known(secured) != ["all", "all"]:
        assert time.monotonic() < ends
        time.sleep(0.2)
    targets = httpx.get(f"{secured.operators}/prometheus/targets", trust_env=False).json()
    found = [f"{each['labels']['__scheme__']}://{each['targets'][0]}" for each in targets]
    assert found == secured.nodes


def known(secured: Secured) -> list[str]:
    """For each node, how much the proxy knows of its cache."""
    shown = httpx.get(f"{secured.operators}/nodes", trust_env=False).json()["nodes"]
    return [place["known"] for node in shown for place in node["caches"]]


def test_another_name_is_not_trusted(secured: Secured) -> None:
    context = ssl.create_default_context(cafile=secured.authority)
    with (
        httpx.Client(verify=context, trust_env=False) as strict,
        pytest.raises(httpx.ConnectError, match=r"certificate|CERTIFICATE"),
    ):
        strict.get(f"{secured.nodes[0]}/health")
