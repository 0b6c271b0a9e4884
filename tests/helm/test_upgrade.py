"""Another version of the chart restarts no node: loading a model takes minutes, and all of them would do it."""

import copy
import shutil
from typing import Any

import pytest
import yaml

from pdproxy import __version__
from tests.helm.conftest import Rendered
from tests.helm.engine import CHART, Engine, Manifest, Manifests, kinds_of, only_container, read_values, value_files
from tests.helm.settings import pod_of

ALL = pytest.mark.parametrize("values", value_files())


@pytest.fixture(scope="module")
def later(helm: Engine, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The next release's chart, in which nothing but the versions changed."""
    chart = tmp_path_factory.mktemp("chart") / "pdproxy"
    shutil.copytree(CHART, chart)
    said = yaml.safe_load((chart / "Chart.yaml").read_text())
    (chart / "Chart.yaml").write_text(yaml.safe_dump({**said, "version": "0.9.9", "appVersion": "0.9.8"}))
    return helm.of(chart)


def workloads(manifests: Manifests) -> dict[str, Manifest]:
    """The nodes' workloads by name: templates, and what cannot be changed afterwards."""
    found = manifests.of("StatefulSet") + manifests.of("LeaderWorkerSet")
    return {each["metadata"]["name"]: each["spec"] for each in found}


@ALL
def test_no_node_restarts(rendered: Rendered, later: Engine, values: str) -> None:
    upgraded = later.manifests(read_values(value_files()[values]))
    assert workloads(upgraded) == workloads(rendered(values))
    assert len(workloads(upgraded)) == len(kinds_of(read_values(value_files()[values])))


@pytest.mark.parametrize("strategy", ["inPlace", "surge", "blueGreen"])
def test_neither_another_chart_nor_another_proxy_changes_a_byte_of_the_nodes_pods(
    helm: Engine, later: Engine, strategy: str
) -> None:
    of_nodes = {"proxy": "demo-pdproxy"} if strategy == "blueGreen" else {}
    values: dict[str, Any] = {"nodes": {"upgrade": {"strategy": strategy, **of_nodes}}}
    values["model"] = {"storage": {"kind": "claim"}}
    before = helm.manifests(values, release="nodes")
    for after in (
        later.manifests(values, release="nodes"),
        helm.manifests({**values, "image": {"proxy": {"tag": "0.9.8"}}}, release="nodes"),
        helm.manifests({**values, "proxy": {"replicas": 9, "requestSeconds": 60}}, release="nodes"),
    ):
        for role in ("prefill", "decode"):
            assert yaml.safe_dump(after.node(role)) == yaml.safe_dump(before.node(role))


@ALL
def test_of_the_proxy_only_the_images_tag_may_change(rendered: Rendered, later: Engine, values: str) -> None:
    said = read_values(value_files()[values])
    new, old = pod_of(later.manifests(said)), copy.deepcopy(pod_of(rendered(values)))
    if not said.get("image", {}).get("proxy", {}).get("tag"):
        only_container(old)["image"] = only_container(old)["image"].replace(f":{__version__}", ":0.9.8")
    assert new == old


@ALL
def test_selectors_stay(rendered: Rendered, later: Engine, values: str) -> None:
    upgraded, before = later.manifests(read_values(value_files()[values])), rendered(values)
    for kind in (
        "Service",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "Deployment",
        "PodMonitor",
        "ServiceMonitor",
        "PrometheusRule",
    ):
        assert [each["spec"].get("selector") for each in upgraded.of(kind)] == [
            each["spec"].get("selector") for each in before.of(kind)
        ]


@ALL
def test_objects_say_which_chart_made_them(later: Engine, values: str) -> None:
    """The versions went from the pods alone."""
    for manifest in later.manifests(read_values(value_files()[values])).all:
        labels = manifest["metadata"]["labels"]
        assert (labels["helm.sh/chart"], labels["app.kubernetes.io/version"]) == ("pdproxy-0.9.9", "0.9.8")


def test_the_nodes_image_is_the_connectors_release(rendered: Rendered) -> None:
    """The version is not derived: a release that changes it must change it in values.yaml too."""
    for role in ("prefill", "decode"):
        assert only_container(rendered("default").node(role))["image"] == f"pdproxy-node:{__version__}"


def test_labels_of_ones_own_replace_the_charts_but_never_those_that_select(helm: Engine) -> None:
    part, component = "app.kubernetes.io/part-of", "app.kubernetes.io/component"
    more = {part: "platform", component: "mine"}
    for values in ({"commonLabels": more}, {"prefill": {"podLabels": more}, "proxy": {"podLabels": more}}):
        manifests = helm.manifests(values)
        for pod, name in ((manifests.node("prefill"), "prefill"), (pod_of(manifests), "proxy")):
            labels = pod["metadata"]["labels"]
            assert (labels[part], labels[component]) == ("platform", name)
