"""Only the proxy speaks HTTP to nodes; only nodes of the other role reach a node's side channel and UCX ports."""

import itertools

import pytest

from tests.helm.conftest import Rendered
from tests.helm.engine import Engine, Manifests
from tests.helm.policies import Pod, allowed
from tests.helm.settings import pod_of

HTTP, SIDE_CHANNEL, UCX_FIRST, UCX_LAST, NCCL = 8000, 5600, 20000, 20999, 29501
EVENTS, REPLAY = 5557, 5657
CLOSED = ["default", "qwen3.6-35b-a3b-1p1d", "qwen3.5-397b-a17b-2p4d-tp8", "full-values"]
FROM_THE_PROXY = {("proxy", "prefill"), ("proxy", "decode")}
BETWEEN_ROLES = {("prefill", "decode"), ("decode", "prefill")}
STRANGER = Pod({"app": "stranger"})
ABROAD = Pod({}, home=False, namespace={"kubernetes.io/metadata.name": "elsewhere"})


def pods(manifests: Manifests) -> dict[str, Pod]:
    """Every sort of pod, by what it is."""
    return {
        "proxy": Pod(pod_of(manifests)["metadata"]["labels"]),
        **{kind: Pod(manifests.node(kind)["metadata"]["labels"]) for kind in manifests.kinds()},
        "smoke": Pod(manifests.one("Pod")["metadata"]["labels"]),
        "stranger": STRANGER,
        "abroad": ABROAD,
    }


def through(manifests: Manifests, port: int) -> set[tuple[str, str]]:
    """Who may connect to whom on a port, as far as nodes are asked."""
    there = pods(manifests)
    policies = manifests.of("NetworkPolicy")
    asked = itertools.product(there, manifests.kinds())
    return {(source, node) for source, node in asked if allowed(policies, there[source], there[node], port)}


@pytest.mark.parametrize("values", CLOSED)
def test_only_the_proxy_speaks_http_to_nodes(rendered: Rendered, values: str) -> None:
    assert through(rendered(values), HTTP) == {("proxy", "prefill"), ("proxy", "decode")}


@pytest.mark.parametrize("port", [EVENTS, REPLAY])
def test_only_the_proxy_hears_what_nodes_cache(rendered: Rendered, helm: Engine, port: int) -> None:
    """Events hold the token ids of prompts."""
    assert through(rendered("default"), port) == {("proxy", "prefill"), ("proxy", "decode")}
    assert through(helm.manifests({"kvEvents": {"enabled": False}}), port) == set()


@pytest.mark.parametrize(("values", "ranks"), [("default", 1), ("qwen3.6-35b-a3b-dp4-ep", 4)])
def test_each_data_parallel_rank_has_its_ports_and_the_next_one_is_closed(
    rendered: Rendered, values: str, ranks: int
) -> None:
    manifests = rendered(values)
    for first, wanted in ((SIDE_CHANNEL, BETWEEN_ROLES), (EVENTS, FROM_THE_PROXY), (REPLAY, FROM_THE_PROXY)):
        found = {port: through(manifests, port) for port in (first - 1, first, first + ranks - 1, first + ranks)}
        assert found == {first - 1: set(), first: wanted, first + ranks - 1: wanted, first + ranks: set()}


def test_of_two_roles_the_one_with_more_ranks_decides(helm: Engine) -> None:
    """Whichever reads must reach all ports of the other."""
    manifests = helm.manifests({"prefill": {"parallel": {"data": 8}, "gpus": {"count": 8}}})
    assert through(manifests, SIDE_CHANNEL + 7) == BETWEEN_ROLES
    assert through(manifests, SIDE_CHANNEL + 8) == set()


@pytest.mark.parametrize(("http", "others"), [(1, [2, 65535]), (65535, [1, 65534])])
def test_machines_of_one_node_have_all_other_ports_wherever_http_is(helm: Engine, http: int, others: list[int]) -> None:
    group = {"hosts": 2, "parallel": {"tensor": 2}, "gpus": {"count": 1}}
    shared = {"storage": {"kind": "claim"}}
    manifests = helm.manifests({"nodes": {"httpPort": http}, "prefill": group, "decode": group, "model": shared})
    assert through(manifests, http) == FROM_THE_PROXY
    assert all(through(manifests, port) == {("prefill", "prefill"), ("decode", "decode")} for port in others)
    for rule in (each for policy in manifests.of("NetworkPolicy") for each in policy["spec"]["ingress"]):
        assert all(1 <= port["port"] <= port.get("endPort", port["port"]) <= 65535 for port in rule["ports"])


@pytest.mark.parametrize("values", CLOSED[:3])
@pytest.mark.parametrize("port", [SIDE_CHANNEL, UCX_FIRST, UCX_LAST])
def test_transfers_go_between_the_roles_in_both_directions(rendered: Rendered, values: str, port: int) -> None:
    assert through(rendered(values), port) == {("prefill", "decode"), ("decode", "prefill")}


@pytest.mark.parametrize("values", CLOSED[:3])
@pytest.mark.parametrize("port", [22, UCX_LAST + 1, NCCL])
def test_nothing_else_reaches_a_node(rendered: Rendered, values: str, port: int) -> None:
    assert through(rendered(values), port) == set()


def test_machines_of_one_node_reach_each_other_but_not_by_http(rendered: Rendered) -> None:
    full = rendered("full-values")  # there a decode node has two machines
    assert through(full, NCCL) == {("decode", "decode")}
    assert through(full, SIDE_CHANNEL) == {("prefill", "decode"), ("decode", "prefill"), ("decode", "decode")}


def test_the_ports_are_those_that_the_nodes_use(helm: Engine) -> None:
    moved = {
        "nodes": {"httpPort": 9000},
        "transfer": {"sideChannelPort": 6000, "ucxPorts": {"first": 7000, "last": 7099}},
    }
    manifests = helm.manifests(moved)
    assert through(manifests, 9000) == {("proxy", "prefill"), ("proxy", "decode")}
    assert through(manifests, 6000) == through(manifests, 7099) == {("prefill", "decode"), ("decode", "prefill")}
    assert through(manifests, HTTP) == through(manifests, SIDE_CHANNEL) == through(manifests, UCX_FIRST) == set()
    env = {each["name"]: each.get("value") for each in manifests.node("decode")["spec"]["containers"][0]["env"]}
    assert env["UCX_TCP_PORT_RANGE"] == "7000-7099"


def test_where_publishers_choose_their_ports_the_proxy_alone_reaches_them(helm: Engine) -> None:
    """On IPv6: any of those that Linux gives out by itself."""
    manifests = helm.manifests({"ipv6": True})
    assert all(through(manifests, port) == FROM_THE_PROXY for port in (32768, 60999))
    assert through(manifests, 32767) == through(manifests, 61000) == through(manifests, EVENTS) == set()
    assert through(helm.manifests({"ipv6": True, "kvEvents": {"enabled": False}}), 40000) == set()


def test_the_download_job_reaches_the_hub_and_nobody_reaches_it(helm: Engine) -> None:
    manifests = helm.manifests({"model": {"download": {"enabled": True}, "storage": {"kind": "claim"}}})
    job = Pod(manifests.one("Job")["spec"]["template"]["metadata"]["labels"])
    policies, there = manifests.of("NetworkPolicy"), pods(manifests)
    assert allowed(policies, job, ABROAD, 443)
    assert allowed(policies, job, ABROAD, 53, "UDP")
    assert not allowed(policies, job, there["decode"], HTTP)
    assert not any(allowed(policies, source, job, HTTP) for source in there.values())


def test_nodes_that_do_both_reach_each_other(rendered: Rendered) -> None:
    """And each of the other kinds, where there are any."""
    equal = rendered("qwen3.6-35b-a3b-nodes")
    assert through(equal, HTTP) == through(equal, EVENTS) == {("proxy", "node")}
    assert through(equal, SIDE_CHANNEL) == through(equal, UCX_LAST) == {("node", "node")}
    assert through(equal, UCX_LAST + 1) == through(equal, NCCL) == set()


def test_nodes_of_all_kinds_reach_those_that_they_exchange_tickets_with(rendered: Rendered) -> None:
    """There, those that do both have four ranks on two machines, which speak to each other."""
    mixed = rendered("all-kinds-values")
    partners = BETWEEN_ROLES | {pair for role in ("prefill", "decode") for pair in ((role, "node"), ("node", role))}
    assert through(mixed, SIDE_CHANNEL) == through(mixed, SIDE_CHANNEL + 3) == partners | {("node", "node")}
    assert through(mixed, UCX_FIRST) == partners | {("node", "node")}
    assert through(mixed, EVENTS + 3) - {("node", "node")} == {("proxy", kind) for kind in mixed.kinds()}
    assert through(mixed, NCCL) == {("node", "node")}


def test_who_reaches_the_proxy(rendered: Rendered) -> None:
    open_to_all = rendered("default")
    there, policies = pods(open_to_all), open_to_all.of("NetworkPolicy")
    assert all(allowed(policies, there[name], there["proxy"], 8080) for name in ("smoke", "stranger", "abroad"))
    assert {name for name in there if allowed(policies, there[name], there["proxy"], 8081)} == {"smoke"}


def test_clients_and_scrapers_can_be_named(rendered: Rendered) -> None:
    full = rendered("full-values")
    there, policies = pods(full), full.of("NetworkPolicy")
    gateway = Pod({}, home=False, namespace={"kubernetes.io/metadata.name": "gateways"})
    prometheus = Pod({}, home=False, namespace={"kubernetes.io/metadata.name": "monitoring"})
    assert allowed(policies, gateway, there["proxy"], 8080)
    assert allowed(policies, there["smoke"], there["proxy"], 8080)
    assert not allowed(policies, STRANGER, there["proxy"], 8080)
    assert allowed(policies, prometheus, there["proxy"], 8081)
    assert not allowed(policies, gateway, there["proxy"], 8081)
    assert allowed(policies, prometheus, there["prefill"], HTTP)  # podMonitor is on


def test_names_can_be_looked_up_and_weights_fetched(rendered: Rendered) -> None:
    default = rendered("default")
    there, policies = pods(default), default.of("NetworkPolicy")
    dns = Pod({"k8s-app": "kube-dns"}, home=False, namespace={"kubernetes.io/metadata.name": "kube-system"})
    for port in (
        53,
        5353,
    ):  # that of OpenShift's DNS pods: policies see where a connection ends, not what was asked for
        for protocol in ("UDP", "TCP"):
            assert all(allowed(policies, there[name], dns, port, protocol) for name in ("proxy", "prefill", "decode"))
    assert allowed(policies, there["decode"], ABROAD, 443)
    assert not allowed(policies, there["decode"], ABROAD, 80)
    assert not allowed(policies, there["proxy"], ABROAD, 80)


def test_the_api_server_is_reached_only_by_who_asks_it(helm: Engine) -> None:
    for kind, reached in (("kubernetes", True), ("dns", False), ("static", False)):
        manifests = helm.manifests({"discovery": {"kind": kind}})
        there, policies = pods(manifests), manifests.of("NetworkPolicy")
        assert allowed(policies, there["proxy"], ABROAD, 443) is reached
        assert allowed(policies, there["proxy"], ABROAD, 6443) is reached
