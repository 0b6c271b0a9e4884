"""What autoscalers ask for is what the proxy counts."""

import enum
import re
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from pdproxy.nodes.node import Role
from pdproxy.observe.metrics import Metrics
from tests.helm.conftest import Rendered
from tests.helm.engine import CHART, Engine, Manifests

SERIES = re.compile(r"\bpdproxy_[a-z_]+\b")
OTHERS = {"pdproxy_key_file"}
"""The connector's settings, which look alike."""


class _State(enum.StrEnum):
    UP = "up"


def counted() -> tuple[set[str], set[tuple[str, str]]]:
    """Names of all series, and (name, role) of those that nodes have."""
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    for role in Role:
        metrics.node_active(f"{role}-0", role, 1)
        metrics.node_state(f"{role}-0", role, _State.UP)
    samples = [sample for family in registry.collect() for sample in family.samples]
    names = {line.split()[2] for line in generate_latest(registry).decode().splitlines() if line.startswith("# TYPE")}
    roles = {(sample.name, sample.labels["role"]) for sample in samples if "role" in sample.labels}
    return names, roles


def asked(manifests: Manifests) -> Iterator[tuple[str, str, str]]:
    """Scaled workload, series and role of everything that is scaled by our metrics."""
    for each in manifests.of("ScaledObject"):
        query = each["spec"]["triggers"][0]["metadata"]["query"]
        [(name, role)] = re.findall(r"^sum\((\w+)\{role=\"(\w+)\",", query)
        yield each["spec"]["scaleTargetRef"]["name"], name, role
    for each in manifests.of("HorizontalPodAutoscaler"):
        for metric in each["spec"]["metrics"]:
            if metric["type"] == "External":
                series = metric["external"]["metric"]
                yield each["spec"]["scaleTargetRef"]["name"], series["name"], series["selector"]["matchLabels"]["role"]


@pytest.mark.parametrize("kind", ["keda", "hpa"])
def test_scales_by_series_that_there_are(helm: Engine, kind: str) -> None:
    scaled = {"autoscaling": {"kind": kind}}
    manifests = helm.manifests({"prefill": scaled, "decode": scaled, "keda": {"prometheus": "http://prometheus:9090"}})
    found = sorted(asked(manifests))
    assert [workload for workload, _, _ in found] == ["demo-pdproxy-decode", "demo-pdproxy-prefill"]
    _, roles = counted()
    for workload, series, role in found:
        assert workload.endswith(role)
        assert (series, role) in roles
    assert all("replicas" not in each["spec"] for each in manifests.of("StatefulSet"))


def test_every_series_that_the_chart_names_exists() -> None:
    names, _ = counted()
    for path in [CHART / "values.yaml", CHART / "README.md", *CHART.glob("templates/**/*")]:
        if path.is_file():
            assert set(SERIES.findall(path.read_text())) - OTHERS <= names, path


def test_the_query_keeps_to_this_release(rendered: Rendered) -> None:
    [scaled] = rendered("full-values").of("ScaledObject")
    query = scaled["spec"]["triggers"][0]["metadata"]["query"]
    assert query == 'sum(pdproxy_node_active{role="prefill",namespace="llm",service="demo-hybrid-admin"})'


def test_groups_are_scaled_as_groups(rendered: Rendered) -> None:
    full = rendered("full-values")
    target = full.one("HorizontalPodAutoscaler", "-decode")["spec"]["scaleTargetRef"]
    group = full.one("LeaderWorkerSet")
    assert target == {
        "apiVersion": group["apiVersion"],
        "kind": group["kind"],
        "name": group["metadata"]["name"],
    }
