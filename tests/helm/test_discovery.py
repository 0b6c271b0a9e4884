"""The proxy looks for nodes where the chart puts them, and has the rights for it."""

from pathlib import Path

import pytest

from pdproxy.settings.types import Role, kind_of_node
from tests.helm.conftest import Rendered
from tests.helm.engine import (
    KINDS,
    Engine,
    Manifest,
    Manifests,
    nodes_of_files,
    only_container,
    read_values,
    value_files,
)
from tests.helm.settings import loaded, pod_of

ALL = pytest.mark.parametrize("values", value_files())
ROLES = tuple(Role)
ALL_NODES = pytest.mark.parametrize(("values", "kind"), nodes_of_files())


def asked(values: str, kind: str) -> dict[str, object]:
    """A values file, with another way of discovery."""
    return {**read_values(value_files()[values]), "discovery": {"kind": kind}}


def headless(manifests: Manifests, kind: str) -> Manifest:
    """The service of the HTTP servers of a kind of nodes."""
    [found] = [
        each
        for each in manifests.of("Service")
        if each["metadata"]["labels"]["app.kubernetes.io/component"] == kind and each["spec"]["clusterIP"] == "None"
    ]
    return found


def most_of(manifests: Manifests, name: str) -> int:
    """How many nodes there may be of a workload."""
    found = [each["spec"] for each in manifests.all if "spec" in each and named(each, name)]
    counts = [spec.get("maxReplicas", spec.get("maxReplicaCount", spec.get("replicas", 0))) for spec in found]
    return int(max(counts))


@ALL_NODES
def test_watches_the_service_of_each_kind(helm: Engine, values: str, kind: str, tmp_path: Path) -> None:
    manifests = helm.manifests(asked(values, "kubernetes"))
    found = loaded(manifests, tmp_path).discovery
    assert (getattr(found, kind), found.namespace) == ("kubernetes", "llm")
    service = headless(manifests, kind)
    assert getattr(found, f"{kind}_selector") == f"kubernetes.io/service-name={service['metadata']['name']}"
    assert found.port_name in {port["name"] for port in service["spec"]["ports"]}
    assert service["spec"]["publishNotReadyAddresses"] is False  # or every endpoint would be called ready


@ALL
@pytest.mark.parametrize("by", ["kubernetes", "dns"])
def test_looks_for_no_kind_that_is_not_there(helm: Engine, values: str, by: str, tmp_path: Path) -> None:
    manifests = helm.manifests(asked(values, by))
    found = loaded(manifests, tmp_path).discovery
    assert [kind for kind in KINDS if getattr(found, kind) == by] == manifests.kinds()


def test_may_watch_and_nothing_else(helm: Engine) -> None:
    manifests = helm.manifests({})
    assert manifests.one("Role")["rules"] == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
    ]
    binding, pod = manifests.one("RoleBinding"), pod_of(manifests)
    assert binding["roleRef"]["name"] == manifests.one("Role")["metadata"]["name"]
    account = pod["spec"]["serviceAccountName"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "llm"}]
    assert pod["spec"]["automountServiceAccountToken"] is True
    others = [manifests.node("prefill"), manifests.node("decode"), manifests.one("Pod")]
    assert all(each["spec"]["automountServiceAccountToken"] is False for each in others)


@pytest.mark.parametrize("kind", ["dns", "static"])
def test_needs_no_rights_otherwise(helm: Engine, kind: str) -> None:
    manifests = helm.manifests({"discovery": {"kind": kind}})
    assert manifests.of("Role") == manifests.of("RoleBinding") == []
    assert pod_of(manifests)["spec"]["automountServiceAccountToken"] is False


@ALL_NODES
def test_looks_up_the_service_of_each_kind(helm: Engine, values: str, kind: str, tmp_path: Path) -> None:
    manifests = helm.manifests(asked(values, "dns"))
    found = loaded(manifests, tmp_path).discovery
    assert getattr(found, f"{kind}_name") == f"{headless(manifests, kind)['metadata']['name']}.llm.svc"
    assert found.dns_port == headless(manifests, kind)["spec"]["ports"][0]["port"]


@ALL_NODES
def test_names_every_node_that_there_may_be(helm: Engine, values: str, kind: str, tmp_path: Path) -> None:
    manifests = helm.manifests(asked(values, "static"))
    nodes = loaded(manifests, tmp_path).nodes
    probe = only_container(manifests.node(kind))["startupProbe"]["httpGet"]
    scheme = probe["scheme"].lower()
    name = f"{manifests.one('Deployment')['metadata']['name']}-{kind}"
    wanted = {
        f"{scheme}://{pod}.{name}.llm.svc:8000"
        for index in range(most_of(manifests, name))
        for pod in serving(manifests, name, index)
    }
    assert {node.url for node in nodes if kind_of_node(node.roles) == kind} == wanted


def serving(manifests: Manifests, name: str, index: int) -> list[str]:
    """The pods with HTTP servers of one engine, as StatefulSets and LeaderWorkerSets name them."""
    groups = [each["spec"]["leaderWorkerTemplate"] for each in manifests.of("LeaderWorkerSet") if named(each, name)]
    workers = [group["size"] - 1 for group in groups if serves(group["workerTemplate"])]
    return [f"{name}-{index}", *(f"{name}-{index}-{worker}" for worker in range(1, sum(workers) + 1))]


def named(manifest: Manifest, name: str) -> bool:
    found: str = manifest["metadata"]["name"]
    return found == name


def serves(pod: Manifest) -> bool:
    return any(port["name"] == "http" for port in only_container(pod)["ports"])


@pytest.mark.parametrize(
    ("values", "serving"), [("qwen3.5-397b-a17b-tp16", False), ("qwen3.5-397b-a17b-dp16-ep", True)]
)
def test_of_an_engine_over_hosts_the_service_finds_those_that_serve(
    rendered: Rendered, values: str, serving: bool
) -> None:
    """By an index that the LeaderWorkerSet's controller puts on pods; its own service has not-ready pods too."""
    manifests = rendered(values)
    for role in ROLES:
        [group] = [each for each in manifests.of("LeaderWorkerSet") if named(each, f"demo-pdproxy-{role}")]
        template = group["spec"]["leaderWorkerTemplate"]
        service = headless(manifests, role)
        assert service["metadata"]["name"] != group["metadata"]["name"]
        for part, index in (("leaderTemplate", "0"), ("workerTemplate", "1")):
            labels = template[part]["metadata"]["labels"] | {"leaderworkerset.sigs.k8s.io/worker-index": index}
            found = service["spec"]["selector"].items() <= labels.items()
            assert found is serves(template[part]) is (serving or index == "0")
