"""The metrics and labels in docs/metrics.md, alerts and dashboard exist; the page has all of them."""

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from connector.counters import COUNTERS, GAUGES, HISTOGRAMS, KeyChange, ReadOutcome
from connector.leases import LeaseEnd
from connector.ticket_fields import RefusalReason
from pdproxy.nodes.node import Role, State
from pdproxy.observe.event_metrics import LAG
from pdproxy.observe.families import CounterSeries, Family, GaugeSeries, HistogramSeries
from pdproxy.observe.labels import (
    Attempt,
    Forgotten,
    Outcome,
    Phase,
    Proof,
    Rejection,
    SilenceOutcome,
    Task,
    Tokens,
    WatchedSetting,
)
from pdproxy.observe.logs import DroppedLines
from pdproxy.observe.metrics import Metrics
from pdproxy.observe.refused_connections import RefusedConnections
from pdproxy.observe.request_metrics import LABELS, SECONDS
from pdproxy.request import Endpoint
from tests.deploy.prometheus.alert_cases import CASES
from tests.deploy.prometheus.queries import grouping, legend_labels, selectors, with_all_chosen

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/metrics.md").read_text()
ALERTS = ROOT / "deploy/prometheus/alerts.yml"
DASHBOARD = ROOT / "deploy/grafana/dashboards/pdproxy.json"
CONNECTOR = "pdproxy_connector_"
OF_TARGETS = {"job", "instance", "namespace", "release"}
"""Labels that every series has besides the page's: Prometheus gives them to what it scrapes, see prometheus.yml."""
OF_NODES = OF_TARGETS | {"role", "node", "model_name", "engine"}
"""Labels of a node's series: two more of Prometheus', and vLLM's own."""
VLLM = {
    "vllm:generation_tokens_total": "counter",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:num_preemptions_total": "counter",
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
}
"""Metrics of vLLM's own that we ask for; tests/e2e/test_panels.py asks real nodes for them."""


AnyFamily = Family[CounterSeries] | Family[GaugeSeries] | Family[HistogramSeries]


class RecordingRegistry(CollectorRegistry):
    """Keeps the families that are registered; a registry shows the labels of one only once it has a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.registered: list[AnyFamily] = []

    def register(self, collector: Collector) -> None:
        super().register(collector)
        assert isinstance(collector, Family)
        self.registered.append(collector)


@cache
def of_the_proxy() -> dict[str, str]:
    """Type by name, as Prometheus sees it."""
    registry = CollectorRegistry()
    Metrics(registry)
    registry.register(DroppedLines(lambda: 0))
    RefusedConnections(registry)
    return {family.name + ("_total" if family.type == "counter" else ""): family.type for family in registry.collect()}


def of_the_connector() -> dict[str, str]:
    """Type by name; what these are made from is connector.stats."""
    counters = {f"{CONNECTOR}{name}_total": "counter" for name in COUNTERS}
    histograms = {f"{CONNECTOR}{name}": "histogram" for name in HISTOGRAMS}
    return counters | histograms | {f"{CONNECTOR}{name}": "gauge" for name in (*GAUGES, "info")}


def rows() -> dict[str, tuple[str, tuple[str, ...]]]:
    """The page's type and labels of each metric; those of latency it lists in one place."""
    page = PAGE.replace("[five](#latency)", ", ".join(f"`{label}`" for label in LABELS))
    found = re.findall(r"^\| `((?:pdproxy|gen_ai)_\w+)` \| (\w+) \| ([^|]*)\|", page, re.MULTILINE)
    return {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in found}


def labels_of(series: str) -> set[str]:
    """The labels of a series, by the page; a histogram's buckets have ``le`` too."""
    page = (
        {} if series == "up" or series.startswith("vllm:") else rows()[re.sub(r"_(bucket|sum|count)$", "", series)][1]
    )
    return {*page, *(["le"] if series.endswith("_bucket") else [])}


def of_targets(series: str) -> set[str]:
    """The labels that a series has since it was scraped, and vLLM's."""
    return OF_NODES if series == "up" or series.startswith((CONNECTOR, "vllm:")) else OF_TARGETS


def test_the_page_has_every_metric_with_its_type_and_no_other() -> None:
    assert {name: kind for name, (kind, _) in rows().items()} == of_the_proxy() | of_the_connector()


def test_the_proxys_labels_are_the_pages() -> None:
    registry = RecordingRegistry()
    Metrics(registry)
    for family in registry.registered:
        [described] = family.describe()
        _, labels = rows()[described.name + ("_total" if described.type == "counter" else "")]
        assert family.label_names == labels


def test_the_connectors_labels_are_the_pages() -> None:
    for name, labels in {**COUNTERS, **GAUGES}.items():
        suffix = "_total" if name in COUNTERS else ""
        assert rows()[f"{CONNECTOR}{name}{suffix}"][1] == tuple(labels)


def expressions() -> list[tuple[str, str]]:
    """Every query of the alerts and of the dashboard, with the text that shows its labels, as a legend writes them."""
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = [target for panel in panels for target in panel.get("targets", [])]
    alerts = [
        (rule["expr"], re.sub(r"\{\{ \$labels\.(\w+) \}\}", r"{{\1}}", " ".join(rule["annotations"].values())))
        for rule in rules
    ]
    return alerts + [(with_all_chosen(target["expr"]), target["legendFormat"]) for target in asked]


@pytest.mark.parametrize(("expression", "legend"), expressions())
def test_every_query_asks_for_metrics_and_labels_that_exist(expression: str, legend: str) -> None:
    known = of_the_proxy() | of_the_connector() | VLLM | {"up": "gauge"}
    asked = selectors(expression)
    assert asked
    for each in asked:
        base = re.sub(r"_(bucket|sum|count)$", "", each.metric)
        assert base in known, each.metric
        assert each.metric == base or known[base] == "histogram"
        used = {matcher.label for matcher in each.matchers} | grouping(expression) | legend_labels(legend)
        assert used <= labels_of(each.metric) | of_targets(each.metric)
    if re.match(r"(sum|min|max|avg|count)\b", expression):
        assert legend_labels(legend) <= grouping(expression)


VALUES: Mapping[tuple[str, str], Iterable[str]] = {
    ("pdproxy_node_up", "role"): Role,
    ("pdproxy_node_up", "state"): State,
    ("pdproxy_requests_total", "endpoint"): Endpoint,
    ("pdproxy_requests_total", "outcome"): Outcome,
    ("pdproxy_rejected_total", "reason"): Rejection,
    ("pdproxy_releases_total", "outcome"): Attempt,
    ("pdproxy_task_failures_total", "task"): Task,
    ("pdproxy_silence_probes_total", "role"): Role,
    ("pdproxy_silence_probes_total", "outcome"): SilenceOutcome,
    ("pdproxy_file_unusable", "setting"): WatchedSetting,
    ("up", "job"): {"pdproxy", "vllm"},
    ("up", "role"): Role,
    ("vllm:generation_tokens_total", "role"): Role,
    **{(f"vllm:inter_token_latency_seconds_{part}", "role"): Role for part in ("bucket", "count", "sum")},
    ("vllm:inter_token_latency_seconds_bucket", "le"): {"0.2"},
    ("pdproxy_phase_seconds_bucket", "phase"): Phase,
    ("pdproxy_phase_seconds_count", "phase"): Phase,
    ("gen_ai_server_time_to_first_token_seconds_bucket", "le"): {str(float(bound)) for bound in SECONDS},
    ("pdproxy_known_answer_tests_total", "result"): Proof,
    ("pdproxy_tokens_total", "kind"): Tokens,
    ("pdproxy_connector_prompt_tokens_total", "source"): {"hit", "pulled", "loaded", "computed"},
    ("pdproxy_connector_side_channel_refused_total", "reason"): {"unsigned", "bad_signature", "replayed"},
    ("pdproxy_kv_event_lag_seconds_bucket", "le"): {str(float(bound)) for bound in LAG},
    ("pdproxy_kv_places_forgotten_total", "reason"): Forgotten,
    ("pdproxy_planned_hit_tokens_total", "role"): Role,
    ("pdproxy_real_hit_tokens_total", "role"): Role,
    ("pdproxy_connector_key_file_changes_total", "outcome"): KeyChange,
    ("pdproxy_connector_leases_ended_total", "how"): LeaseEnd,
    ("pdproxy_connector_reads_total", "outcome"): {*ReadOutcome},
    ("pdproxy_connector_refused_total", "reason"): RefusalReason,
}
"""Values of labels, as far as queries pick by them and the alerts' tests set them."""


def picked() -> set[tuple[str, str, str]]:
    """Metric, label and value of everything that a query picks by."""
    return {
        (each.metric, matcher.label, value)
        for query, _ in expressions()
        for each in selectors(query)
        for matcher in each.matchers
        for value in matcher.value.split("|")
        if value != ".*"
    }


@pytest.mark.parametrize(("name", "label", "value"), sorted(picked()))
def test_every_value_that_a_query_picks_is_one_that_is_set(name: str, label: str, value: str) -> None:
    assert value in set(VALUES[name, label])


def fed() -> set[str]:
    """Every series that the tests of the alerts feed."""
    return {series for case in CASES for each in (case.ill, case.well, *case.further.values()) for series in each}


@pytest.mark.parametrize("series", sorted(fed()))
def test_every_series_that_fires_an_alert_is_one_that_is_exported(series: str) -> None:
    [each] = selectors(series)
    labels = {matcher.label: matcher.value for matcher in each.matchers}
    given = of_targets(each.metric)
    assert labels_of(each.metric) - given == labels.keys() - given
    for label, value in labels.items():
        if (each.metric, label) in VALUES:
            assert value in set(VALUES[each.metric, label])
