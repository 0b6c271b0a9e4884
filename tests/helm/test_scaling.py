"""Autoscalers ask for series that the proxy counts."""

import re
from collections.abc import Iterator
from functools import partial

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from pdproxy.nodes.node import Role
from pdproxy.observe.metrics import Metrics
from tests.deploy.prometheus.queries import Selector, samples_of, selectors
from tests.helm.conftest import Rendered
from tests.helm.engine import CHART, Engine, Manifests, value_files

SERIES = re.compile(r"\bpdproxy_[a-z_]+\b")
OTHERS = {"pdproxy_key_file", "pdproxy_roles", "pdproxy_weights_label", "pdproxy_connector", "pdproxy_endpoints"}
"""The connector's settings and plugins, which look alike."""


SCALED = {
    "demo-pdproxy-prefill": ("pdproxy_prefill_pending_tokens_estimate", {}, "32768"),
    "demo-pdproxy-decode": ("pdproxy_node_active", {"role": "decode"}, "64"),
}


def counted() -> CollectorRegistry:
    """A proxy's series, with what one prefill and one decode node do."""
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    metrics.nodes.watch_prefill("m", lambda: 900)
    for role, legs in ((Role.PREFILL, 3), (Role.DECODE, 7)):
        metrics.nodes.watch_node(f"{role}-0", role, partial(float, legs))
        metrics.nodes.nodes_needed(role, legs / 4)
    return registry


def summed(query: str) -> Selector:
    """The series that a query sums up; a scaler's query is nothing but a sum."""
    assert re.fullmatch(r"sum\(pdproxy_\w+\{[^{}]*\}\)", query)
    [selector] = selectors(query)
    return selector


def asked(manifests: Manifests) -> Iterator[tuple[str, str, dict[str, str], str]]:
    """Scaled workload, series, its labels and threshold of everything that is scaled by our metrics."""
    for each in manifests.of("ScaledObject"):
        for trigger in (one["metadata"] for one in each["spec"]["triggers"]):
            selector = summed(trigger["query"])
            assert {matcher.operator for matcher in selector.matchers} == {"="}
            labels = {matcher.label: matcher.value for matcher in selector.matchers}
            yield each["spec"]["scaleTargetRef"]["name"], selector.metric, labels, trigger["threshold"]
    for each in manifests.of("HorizontalPodAutoscaler"):
        for metric in each["spec"]["metrics"]:
            if metric["type"] == "External":
                series, wanted = metric["external"]["metric"], metric["external"]["target"]["averageValue"]
                labels = series["selector"]["matchLabels"]
                yield each["spec"]["scaleTargetRef"]["name"], series["name"], labels, wanted


@pytest.mark.parametrize("kind", ["keda", "hpa"])
def test_scales_by_series_that_there_are(helm: Engine, kind: str) -> None:
    scaled = {"autoscaling": {"kind": kind}}
    manifests = helm.manifests({"prefill": scaled, "decode": scaled, "keda": {"prometheus": "http://prometheus:9090"}})
    found = {workload: (series, labels, each) for workload, series, labels, each in asked(manifests)}
    assert all(labels.pop("service") == "demo-pdproxy-admin" for _, labels, _ in found.values())
    assert all(labels.pop("namespace", "llm") == "llm" for _, labels, _ in found.values())
    assert found == SCALED
    registry = counted()
    for series, labels, _ in found.values():
        assert [
            sample for family in registry.collect() for sample in family.samples
            if sample.name == series and labels.items() <= sample.labels.items()
        ]  # fmt: skip
    assert all("replicas" not in each["spec"] for each in manifests.of("StatefulSet"))


@pytest.mark.parametrize("example", ["autoscaling-keda", "autoscaling-hpa"])
def test_the_examples_scale_by_what_the_last_hour_needed_too(rendered: Rendered, example: str) -> None:
    found = {
        (workload, series, labels.get("role"), each) for workload, series, labels, each in asked(rendered(example))
    }
    assert found == {
        ("demo-pdproxy-prefill", "pdproxy_prefill_pending_tokens_estimate", None, "32768"),
        ("demo-pdproxy-prefill", "pdproxy_nodes_needed", "prefill", "1"),
        ("demo-pdproxy-decode", "pdproxy_node_active", "decode", "64"),
        ("demo-pdproxy-decode", "pdproxy_nodes_needed", "decode", "1"),
    }


def test_nodes_that_do_both_are_scaled_by_prompts_and_by_streams(helm: Engine) -> None:
    """And by what both roles together needed."""
    scaled = {"node": {"autoscaling": {"kind": "hpa", "advice": True}}, "nodes": {"kinds": ["node"]}}
    found = {
        (workload, series, labels.get("role"), each) for workload, series, labels, each in asked(helm.manifests(scaled))
    }
    assert found == {
        ("demo-pdproxy-node", "pdproxy_prefill_pending_tokens_estimate", None, "32768"),
        ("demo-pdproxy-node", "pdproxy_node_active", "decode", "64"),
        ("demo-pdproxy-node", "pdproxy_nodes_needed", None, "1"),
    }


@pytest.mark.parametrize(
    "values", [name for name, path in value_files().items() if path is None or path.parent.name != "ci"]
)
def test_what_is_scaled_in_hands_its_streams_over_while_it_runs(helm: Engine, rendered: Rendered, values: str) -> None:
    manifests = rendered(values)
    pod = manifests.node(manifests.kinds()[-1])["spec"]
    [container] = pod["containers"]
    lives = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    lives += next(int(word.split("=")[1]) for word in container["args"] if word.startswith("--shutdown-timeout="))
    settings = yaml.safe_load(rendered(values).one("ConfigMap", "-pdproxy")["data"]["pdproxy.yaml"])
    assert settings["deadlines"]["drain"] + 10 <= lives <= pod["terminationGracePeriodSeconds"]


def test_notes_warn_of_nodes_that_end_before_their_streams_move(helm: Engine) -> None:
    notes = helm.render({"proxy": {"drainSeconds": 75}})["pdproxy/templates/NOTES.txt"]
    assert "WARNING: a node that is scaled in ends 75 s later" in notes


def test_every_series_that_the_chart_names_exists() -> None:
    page = generate_latest(counted()).decode()
    names = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")}
    for path in [CHART / "values.yaml", CHART / "README.md", *CHART.glob("templates/**/*")]:
        if path.is_file():
            assert set(SERIES.findall(path.read_text())) - OTHERS <= names, path


@pytest.mark.parametrize(("role", "worth"), [("prefill", 900.0), ("decode", 7.0)])
def test_the_query_sums_up_this_releases_proxies(helm: Engine, role: str, worth: float) -> None:
    values = {role: {"autoscaling": {"kind": "keda"}}, "keda": {"prometheus": "http://prometheus:9090"}}
    [scaled] = helm.manifests(values).of("ScaledObject")
    query = scaled["spec"]["triggers"][0]["metadata"]["query"]
    samples = [
        sample._replace(labels={**sample.labels, "namespace": "llm", "service": service, "pod": replica})
        for replica, service in (("a", "demo-pdproxy-admin"), ("b", "demo-pdproxy-admin"), ("c", "other-admin"))
        for sample in samples_of(generate_latest(counted()).decode())
    ]
    assert sum(sample.value for sample in summed(query).of(samples)) == 2 * worth


def test_the_query_keeps_to_this_release(rendered: Rendered) -> None:
    [scaled] = rendered("full-values").of("ScaledObject")
    query = scaled["spec"]["triggers"][0]["metadata"]["query"]
    assert query == 'sum(pdproxy_prefill_pending_tokens_estimate{namespace="llm",service="demo-hybrid-admin"})'


def test_matchers_of_ones_own_take_the_places_of_ours(helm: Engine) -> None:
    keda = {"prometheus": "http://prometheus:9090", "matchers": 'cluster="a"'}
    [scaled] = helm.manifests({"decode": {"autoscaling": {"kind": "keda"}}, "keda": keda}).of("ScaledObject")
    assert scaled["spec"]["triggers"][0]["metadata"]["query"] == 'sum(pdproxy_node_active{role="decode",cluster="a"})'


def test_groups_are_scaled_as_groups(rendered: Rendered) -> None:
    full = rendered("full-values")
    target = full.one("HorizontalPodAutoscaler", "-decode")["spec"]["scaleTargetRef"]
    group = full.one("LeaderWorkerSet")
    assert target == {
        "apiVersion": group["apiVersion"],
        "kind": group["kind"],
        "name": group["metadata"]["name"],
    }
