"""Objects of `nodes.upgrade.strategy`: who is replaced how, who may ask whom, and what the notes promise."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from tests.helm.conftest import Rendered
from tests.helm.engine import CHART, Engine, Manifest, Manifests, Refused, only_container
from tests.helm.policies import Pod, allowed
from tests.helm.settings import loaded, pod_of

ROLES = ("prefill", "decode")
SHARED = {"storage": {"kind": "claim"}}
SURGE: dict[str, Any] = {"nodes": {"upgrade": {"strategy": "surge"}}, "model": SHARED}
PROXY: dict[str, Any] = {"nodes": {"upgrade": {"strategy": "blueGreen"}}}
NODES: dict[str, Any] = {"nodes": {"upgrade": {"strategy": "blueGreen", "proxy": "demo-pdproxy"}}}
OPERATORS, HTTP, SIDE_CHANNEL = 8081, 8000, 5600
WAIT = 1800 + 600


@pytest.fixture(scope="module")
def surge(helm: Engine) -> Manifests:
    return helm.manifests(SURGE)


@pytest.fixture(scope="module")
def sets(helm: Engine) -> dict[str, Manifests]:
    """The proxy's release, and two of nodes."""
    nodes = {name: helm.manifests(NODES, release=name) for name in ("blue", "green")}
    return {"proxy": helm.manifests(PROXY), **nodes}


def stop_command(pod: Manifest) -> list[str]:
    command: list[str] = only_container(pod)["lifecycle"]["preStop"]["exec"]["command"]
    return command


def pods(manifests: Manifests) -> dict[str, Pod]:
    return {role: Pod(manifests.node(role)["metadata"]["labels"]) for role in ROLES}


def test_what_is_rendered_is_valid(surge: Manifests, sets: dict[str, Manifests]) -> None:
    for manifests in (surge, *sets.values()):
        for manifest in manifests.all:
            kubernetes_validate.validate(manifest, "1.30", strict=True)


@pytest.mark.parametrize("role", ROLES)
def test_a_surge_brings_new_nodes_before_old_ones_go(surge: Manifests, role: str) -> None:
    assert surge.of("StatefulSet") == []
    spec = surge.one("Deployment", f"-{role}")["spec"]
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert spec["progressDeadlineSeconds"] == WAIT


@pytest.mark.parametrize("role", ROLES)
def test_an_old_node_asks_the_proxy_whether_it_may_go(surge: Manifests, role: str) -> None:
    pod = surge.node(role)
    python, option, script, *words = stop_command(pod)
    assert (python, option) == ("python3", "-c")
    assert script.strip() == (CHART / "files" / "leave.py").read_text().strip()
    assert words == ["http://demo-pdproxy-admin:8081", "8000", str(WAIT), "15"]
    assert {"POD_IP"} <= {each["name"] for each in only_container(pod)["env"]}
    assert pod["spec"]["terminationGracePeriodSeconds"] == WAIT + 15 + 60 + 30


def test_the_wait_can_be_said(helm: Engine) -> None:
    said = {"nodes": {"upgrade": {"strategy": "surge", "maxSurge": 2, "waitSeconds": 90}}, "model": SHARED}
    manifests = helm.manifests(said)
    assert stop_command(manifests.node("decode"))[-2:] == ["90", "15"]
    assert manifests.node("decode")["spec"]["terminationGracePeriodSeconds"] == 90 + 15 + 60 + 30
    assert manifests.one("Deployment", "-decode")["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 2


def test_in_place_nodes_ask_nobody(rendered: Rendered) -> None:
    pod = rendered("default").node("decode")
    assert only_container(pod)["lifecycle"]["preStop"] == {"sleep": {"seconds": 15}}
    assert not [each for each in rendered("default").all if each["metadata"]["name"].endswith("may-leave")]


def test_the_autoscaler_finds_the_deployment(helm: Engine) -> None:
    scaled = {**SURGE, "decode": {"autoscaling": {"kind": "hpa"}}}
    target = helm.manifests(scaled).one("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", "demo-pdproxy-decode")


def test_nodes_reach_the_proxys_operators_port_only_where_they_ask(surge: Manifests, rendered: Rendered) -> None:
    for manifests, may in ((surge, True), (rendered("default"), False)):
        proxies = [each for each in manifests.of("Deployment") if each["metadata"]["name"] == "demo-pdproxy"]
        proxy = Pod(proxies[0]["spec"]["template"]["metadata"]["labels"])
        for node in pods(manifests).values():
            assert allowed(manifests.of("NetworkPolicy"), node, proxy, OPERATORS) is may
            assert allowed(manifests.of("NetworkPolicy"), proxy, node, HTTP)


def test_blue_and_green_have_nodes_and_the_proxys_release_has_none(sets: dict[str, Manifests]) -> None:
    assert not sets["proxy"].of("StatefulSet")
    assert {each["kind"] for each in sets["blue"].all} == {
        "ServiceAccount", "StatefulSet", "Service", "NetworkPolicy", "PodDisruptionBudget"
    }  # fmt: skip
    names = [(each["kind"], each["metadata"]["name"]) for manifests in sets.values() for each in manifests.all]
    assert len(names) == len(set(names)), "two releases would quarrel over an object"


def test_one_proxy_finds_the_nodes_of_both(sets: dict[str, Manifests], tmp_path: Path) -> None:
    """Kubernetes gives EndpointSlices the labels of their services."""
    found = loaded(sets["proxy"], tmp_path).discovery
    for role, selector in zip(ROLES, (found.prefill_selector, found.decode_selector), strict=True):
        wanted = dict(word.split("=") for word in selector.split(","))
        services = [each for manifests in sets.values() for each in manifests.of("Service")]
        chosen = {each["metadata"]["name"] for each in services if wanted.items() <= each["metadata"]["labels"].items()}
        assert chosen == {f"{name}-pdproxy-{role}" for name in ("blue", "green")}


def test_one_proxy_finds_nodes_that_do_both(helm: Engine, tmp_path: Path) -> None:
    """A set of them follows one of prefill and decode nodes, where the proxy's release names all kinds."""
    proxy = helm.manifests({"nodes": {**PROXY["nodes"], "kinds": ["prefill", "decode", "node"]}})
    green = helm.manifests({"nodes": {**NODES["nodes"], "kinds": ["node"]}}, release="green")
    found = loaded(proxy, tmp_path).discovery
    wanted = dict(word.split("=") for word in found.node_selector.split(","))
    [service] = green.of("Service")
    assert wanted.items() <= service["metadata"]["labels"].items()
    policies, node = (
        [*proxy.of("NetworkPolicy"), *green.of("NetworkPolicy")],
        Pod(green.node("node")["metadata"]["labels"]),
    )
    assert allowed(policies, Pod(pod_of(proxy)["metadata"]["labels"]), node, HTTP)
    assert allowed(policies, node, Pod(pod_of(proxy)["metadata"]["labels"]), OPERATORS)


def test_each_set_reaches_the_others_and_the_one_proxy(sets: dict[str, Manifests]) -> None:
    """Nodes of two sets may be of one cohort: then they exchange tickets."""
    policies = [policy for manifests in sets.values() for policy in manifests.of("NetworkPolicy")]
    proxy, blue, green = Pod(pod_of(sets["proxy"])["metadata"]["labels"]), pods(sets["blue"]), pods(sets["green"])
    for nodes in (blue, green):
        assert all(allowed(policies, proxy, node, HTTP) for node in nodes.values())
        assert all(allowed(policies, node, proxy, OPERATORS) for node in nodes.values())
    assert allowed(policies, blue["decode"], green["prefill"], SIDE_CHANNEL)
    assert not allowed(policies, blue["decode"], green["decode"], SIDE_CHANNEL)


def test_a_set_of_another_proxy_reaches_nothing(helm: Engine, sets: dict[str, Manifests]) -> None:
    other = {"nodes": {"upgrade": {"strategy": "blueGreen", "proxy": "other-pdproxy"}}}
    policies = [policy for manifests in sets.values() for policy in manifests.of("NetworkPolicy")]
    stranger, blue = pods(helm.manifests(other, release="other-blue")), pods(sets["blue"])
    proxy = Pod(pod_of(sets["proxy"])["metadata"]["labels"])
    assert not allowed(policies, stranger["prefill"], blue["decode"], SIDE_CHANNEL)
    assert not allowed(policies, stranger["prefill"], proxy, OPERATORS)


def test_all_of_them_use_the_proxys_secrets(sets: dict[str, Manifests]) -> None:
    made = {each["metadata"]["name"] for each in sets["proxy"].of("Secret")}
    pod = sets["blue"].node("decode")
    used = {volume["secret"]["secretName"] for volume in pod["spec"]["volumes"] if "secret" in volume}
    keys = [each["valueFrom"] for each in only_container(pod)["env"] if each["name"] == "VLLM_API_KEY"]
    assert used | {keys[0]["secretKeyRef"]["name"]} <= made


def test_a_set_asks_the_proxy_of_the_other_release(sets: dict[str, Manifests]) -> None:
    assert stop_command(sets["green"].node("prefill"))[3] == "http://demo-pdproxy-admin:8081"


def test_weights_under_the_same_path_are_told_apart_by_a_word(helm: Engine, rendered: Rendered) -> None:
    labelled = helm.manifests({"model": {"weightsLabel": "2026-11"}})
    for role in ROLES:
        assert any('"pdproxy_weights_label":"2026-11"' in word for word in only_container(labelled.node(role))["args"])
        assert labelled.node(role) != rendered("default").node(role), "or no node would be replaced"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({**SURGE, "discovery": {"kind": "dns"}}, "which needs discovery.kind kubernetes"),
        ({**SURGE, "model": {"storage": {"kind": "claimPerPod"}}}, "whose pods have no volumes of their own"),
        (
            {**SURGE, "nodes": {**SURGE["nodes"], "compileCache": {"kind": "claimPerPod"}}},
            "nodes.compileCache.kind claim",
        ),
        ({**SURGE, "decode": {"hosts": 2, "parallel": {"tensor": 2}}}, "decode.hosts is above 1: use blueGreen"),
        ({"nodes": {"upgrade": {"proxy": "x"}}}, "nodes.upgrade.proxy is for nodes.upgrade.strategy blueGreen"),
        ({**NODES, "fullnameOverride": "demo-pdproxy"}, "is this release's own name"),
        ({"nodes": {"upgrade": {"strategy": "blue"}}}, "must be one of 'inPlace', 'surge', 'blueGreen'"),
    ],
)
def test_what_does_not_go_together_is_refused(helm: Engine, values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Refused, match=sentence):
        helm.manifests(values)


@pytest.mark.parametrize(
    ("values", "sentences"),
    [
        (
            {},
            [
                "takes no\nspare GPUs",
                "NOTHING IS SERVED",
                "connections are refused",
                "(75 s) end\n  with an error",
                "decode nodes compute prompts",
            ],
        ),
        (
            {"decode": {"replicas": 4}, "prefill": {"replicas": 2}},
            ["Decode nodes: 3 of 4 serve", "Prefill nodes: 1 of 2 serve"],
        ),
        (
            {"prefill": {"replicas": 2}, "proxy": {"settings": {"policy": {"on_no_decode": "prefill"}}}},
            ["prefill nodes serve whole requests until it has loaded again"],
        ),
        (
            {"proxy": {"settings": {"policy": {"on_no_decode": "prefill"}}}},  # its only prefill node goes as well
            ["NOTHING IS SERVED"],
        ),
        (
            {**SURGE, "prefill": {"gpus": {"count": 4}, "parallel": {"tensor": 4}}},
            ["takes 5 spare GPUs", "1 more nodes of each role", "2400 s at most"],
        ),
        (
            {
                **NODES,
                "prefill": {"replicas": 2},
                "decode": {"replicas": 3, "gpus": {"count": 8}, "parallel": {"tensor": 8}},
            },
            ["takes 26 spare GPUs", "nodes.upgrade.proxy=demo-pdproxy", "--set decode.replicas=0"],
        ),
        (
            {"nodes": {"kinds": ["node"]}},
            [
                "Each kind replaces one node",
                "The only node that answers: NOTHING IS SERVED",
                "the node that answers computes it",
            ],
        ),
        ({"nodes": {"kinds": ["node"]}, "node": {"replicas": 3}}, ["- Nodes that do both: 2 of 3 serve at any time."]),
        (
            {"nodes": {"kinds": ["prefill", "decode", "node"]}},
            ["- Decode nodes: 0 of 1 serve", "- Nodes that do both: 0 of 1 serve", "- Prefill nodes: 0 of 1 serve"],
        ),
        (
            {**SURGE, "nodes": {**SURGE["nodes"], "kinds": ["node"]}},
            ["takes 1 spare GPUs", "1 more nodes of each kind. New nodes start first."],
        ),
        (
            {"nodes": {**NODES["nodes"], "kinds": ["node"]}, "node": {"replicas": 3}},
            ["takes 3 spare GPUs", "--reuse-values --set node.replicas=0\n"],
        ),
        (PROXY, ["install demo-blue CHART", "--set nodes.upgrade.proxy=demo-pdproxy"]),
    ],
)
def test_the_notes_say_what_an_upgrade_takes(helm: Engine, values: dict[str, Any], sentences: list[str]) -> None:
    release = "blue" if "proxy" in values.get("nodes", {}).get("upgrade", {}) else "demo"
    notes = helm.render(values, release=release)["pdproxy/templates/NOTES.txt"]
    for sentence in sentences:
        assert sentence in notes
