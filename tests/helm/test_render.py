"""The chart renders, lints and makes objects that Kubernetes knows, for every values file that we ship."""

import functools
import json
import re
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
from kubernetes_validate import utils

from deploy.memory import main as fits
from tests.helm.conftest import Rendered
from tests.helm.engine import Engine, Manifest, read_values, value_files

FOREIGN = {
    "LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1",
    "ServiceMonitor": "monitoring.coreos.com/v1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "PrometheusRule": "monitoring.coreos.com/v1",
    "HTTPRoute": "gateway.networking.k8s.io/v1",
    "ScaledObject": "keda.sh/v1alpha1",
}
"""Kinds of other projects: Kubernetes has no schema for them."""

ALL = pytest.mark.parametrize("values", value_files())
utils.schema_contents = functools.cache(utils.schema_contents)
"""Kept: the definitions that all kinds share, two megabytes, would be parsed for each object."""


@functools.cache
def _validate(text: str) -> None:
    kubernetes_validate.validate(json.loads(text), kubernetes_validate.latest_version(), strict=True)


def valid(manifest: Manifest) -> None:
    """Return if Kubernetes would take it. Many values make the same objects: each is looked at once."""
    _validate(json.dumps(manifest, sort_keys=True))


def pods_of(group: Manifest) -> Iterator[Manifest]:
    """The pods inside a LeaderWorkerSet, as Kubernetes would get them."""
    for template in ("leaderTemplate", "workerTemplate"):
        pod = group["spec"]["leaderWorkerTemplate"][template]
        yield {"apiVersion": "v1", "kind": "Pod", **pod}


@ALL
def test_lint_finds_nothing(helm: Engine, values: str) -> None:
    assert helm.lint(read_values(value_files()[values])) == []


@ALL
def test_kubernetes_knows_every_object(rendered: Rendered, values: str) -> None:
    manifests = rendered(values)
    assert len(manifests.all) >= 11
    for manifest in manifests.all:
        if manifest["kind"] in FOREIGN:
            assert manifest["apiVersion"] == FOREIGN[manifest["kind"]]
        else:
            valid(manifest)
    for group in manifests.of("LeaderWorkerSet"):
        for pod in pods_of(group):
            valid(pod)


def test_the_validation_can_fail() -> None:
    wrong = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}, "spec": {"prots": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        valid(wrong)


@ALL
def test_names_and_labels(rendered: Rendered, values: str) -> None:
    seen = set()
    for manifest in rendered(values).all:
        name, labels = manifest["metadata"]["name"], manifest["metadata"]["labels"]
        assert len(name) <= 63
        assert labels["app.kubernetes.io/instance"] == "demo"
        assert all(isinstance(value, str) and len(value) <= 63 for value in labels.values())
        seen.add((manifest["kind"], name))
    assert len(seen) == len(rendered(values).all)


@ALL
def test_selectors_find_their_pods(rendered: Rendered, values: str) -> None:
    manifests = rendered(values)
    for workload in manifests.of("Deployment") + manifests.of("StatefulSet"):
        wanted = workload["spec"]["selector"]["matchLabels"]
        assert wanted.items() <= workload["spec"]["template"]["metadata"]["labels"].items()
    nodes = [manifests.node(kind) for kind in manifests.kinds()]
    pods = [*nodes, manifests.one("Deployment")["spec"]["template"]]
    for service in manifests.of("Service"):
        index = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}  # which that controller puts on leaders
        found = [
            pod for pod in pods if service["spec"]["selector"].items() <= {**pod["metadata"]["labels"], **index}.items()
        ]
        assert len(found) == 1, service["metadata"]["name"]


def test_foreign_kinds_have_what_their_projects_ask_for(rendered: Rendered) -> None:
    full = rendered("full-values")
    group = full.one("LeaderWorkerSet")["spec"]
    assert group["leaderWorkerTemplate"]["size"] == 2
    route = full.one("HTTPRoute")["spec"]
    assert route["rules"][0]["backendRefs"] == [{"name": "demo-hybrid", "port": 80}]
    ports = {port["name"] for port in full.one("Service", "-admin")["spec"]["ports"]}
    assert {endpoint["port"] for endpoint in full.one("ServiceMonitor")["spec"]["endpoints"]} <= ports
    admin = full.one("Service", "-admin")["metadata"]["labels"]
    assert full.one("ServiceMonitor")["spec"]["selector"]["matchLabels"].items() <= admin.items()
    assert full.one("PodMonitor")["spec"]["podMetricsEndpoints"][0]["port"] == "http"
    trigger = full.one("ScaledObject")["spec"]["triggers"][0]
    assert trigger["type"] == "prometheus"
    assert all(isinstance(value, str) for value in trigger["metadata"].values())


EIGHT = {"parallel": {"tensor": 8}, "gpus": {"count": 8}}
UNEQUAL = "WARNING: prefill nodes have parallel.tensor 8, decode nodes 1"


@pytest.mark.parametrize(
    ("values", "warned"),
    [
        ({"prefill": EIGHT}, True),
        ({"prefill": {**EIGHT, "extraArgs": ["--block-size=1056"]}}, True),
        ({"prefill": EIGHT, "model": {"blockSize": 1056}}, False),
        ({"prefill": EIGHT, "model": {"extraArgs": ["--block-size", "1056"]}}, False),
        ({"prefill": EIGHT, "decode": EIGHT}, False),
        ({"prefill": EIGHT, "node": EIGHT, "nodes": {"kinds": ["prefill", "decode", "node"]}}, True),
        ({"prefill": EIGHT, "nodes": {"kinds": ["node"]}}, False),
    ],
)
def test_notes_warn_of_block_sizes_that_may_differ(helm: Engine, values: dict[str, Any], warned: bool) -> None:
    """The chart does not know the model; it names what computes the pairs that go together."""
    notes = helm.render(values)["pdproxy/templates/NOTES.txt"]
    assert (UNEQUAL in notes, "python -m deploy.block_sizes" in notes) == (warned, warned)


def test_the_notes_name_a_command_that_says_what_fits(helm: Engine) -> None:
    """With this release's values: it ends well for the GPU that an example names, and not for a smaller one."""
    manifests = helm.manifests(read_values(value_files()["qwen3.6-35b-a3b-1p1d"]))
    notes = helm.render(read_values(value_files()["qwen3.6-35b-a3b-1p1d"]))["pdproxy/templates/NOTES.txt"]
    [command] = re.findall(r"python -m deploy\.memory (.*?)\n\n", notes, re.DOTALL)
    words = command.replace("\\\n", " ").split()
    assert words[words.index("--max-model-len") + 1] == "131072"
    assert [fits([gpu if word == "GB" else word for word in words]) for gpu in ("80", "24")] == [0, 1]
    [name] = re.findall(r"exec deploy/(\S+) -- pdproxy check", notes)
    assert name in {each["metadata"]["name"] for each in manifests.of("Deployment")}


@pytest.mark.parametrize(
    ("proxy", "node", "sentence"),
    [
        ("pdproxy", "pdproxy-node", "Images: pdproxy and pdproxy-node have no registry."),
        ("r.example/pdproxy", "pdproxy-node", "Images: pdproxy-node has no registry."),
        ("r.example/pdproxy", "r.example/pdproxy-node", ""),
    ],
)
def test_notes_say_what_to_do_while_an_image_has_no_registry(
    helm: Engine, proxy: str, node: str, sentence: str
) -> None:
    images = {"image": {"proxy": {"repository": proxy}, "node": {"repository": node}}}
    notes = helm.render(images)["pdproxy/templates/NOTES.txt"]
    assert (("Images:" in notes), ("--set image.node.repository=" in notes)) == (bool(sentence), bool(sentence))
    assert sentence in notes


def test_notes_warn_of_what_is_open(helm: Engine) -> None:
    safe = helm.render({})["pdproxy/templates/NOTES.txt"]
    assert "WARNING" not in safe
    assert "Authorization: Bearer" in safe
    bare = helm.render(read_values(value_files()["minimal-values"]))["pdproxy/templates/NOTES.txt"]
    assert bare.count("WARNING") == 4
