"""docs/metrics.md, the alerts and the dashboard name the metrics that exist, and all of them."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from connector.leases import LeaseEnd
from connector.stats import COUNTERS, GAUGES, HISTOGRAMS
from pdproxy.nodes.node import Role, State
from pdproxy.observe.labels import Outcome, Phase, Release
from pdproxy.observe.metrics import Metrics

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/metrics.md").read_text()
ALERTS = ROOT / "deploy/prometheus/alerts.yml"
DASHBOARD = ROOT / "deploy/grafana/dashboards/pdproxy.json"


def of_the_proxy() -> dict[str, str]:
    """Type by name, as Prometheus sees it."""
    registry = CollectorRegistry()
    Metrics(registry)
    families = list(registry.collect())
    return {family.name + ("_total" if family.type == "counter" else ""): family.type for family in families}


def of_the_connector() -> dict[str, str]:
    """Type by name; what these are made from is connector.stats."""
    prefix = "pdproxy_connector_"
    counters = {f"{prefix}{name}_total": "counter" for name in COUNTERS}
    histograms = {f"{prefix}{name}": "histogram" for name in HISTOGRAMS}
    return counters | histograms | {f"{prefix}{name}": "gauge" for name in (*GAUGES, "info")}


def test_the_page_has_every_metric_with_its_type_and_no_other() -> None:
    rows = dict(re.findall(r"^\| `(pdproxy_\w+)` \| (\w+) \|", PAGE, re.MULTILINE))
    assert rows == of_the_proxy() | of_the_connector()


def test_the_connectors_labels_are_the_pages() -> None:
    for name, labels in {**COUNTERS, **GAUGES}.items():
        cell = re.search(rf"`pdproxy_connector_{name}(?:_total)?` \| \w+ \| ([^|]*)\|", PAGE)
        assert cell is not None
        assert tuple(re.findall(r"`(\w+)`", cell[1])) == tuple(labels)


def expressions() -> list[str]:
    """Every query of the alerts and of the dashboard."""
    rules = [rule["expr"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return rules + [target["expr"] for panel in panels for target in panel.get("targets", [])]


@pytest.mark.parametrize("expression", expressions())
def test_every_query_asks_for_metrics_that_exist(expression: str) -> None:
    known = of_the_proxy() | of_the_connector()
    asked = set(re.findall(r"pdproxy_\w+", expression))
    assert asked
    for name in asked:
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        assert base in known, name
        assert name == base or known[base] == "histogram"


VALUES: Mapping[tuple[str, str], Iterable[str]] = {
    ("pdproxy_node_up", "role"): Role,
    ("pdproxy_node_up", "state"): State,
    ("pdproxy_requests_total", "outcome"): Outcome,
    ("pdproxy_releases_total", "outcome"): Release,
    ("pdproxy_phase_seconds_bucket", "phase"): Phase,
    ("pdproxy_connector_leases_ended_total", "how"): LeaseEnd,
}
"""What labels are set to, as far as queries pick by them."""


def picked() -> set[tuple[str, str, str]]:
    """Metric, label and value of everything that a query picks by."""
    series = [found for query in expressions() for found in re.findall(r"(pdproxy_\w+)\{([^}]*)\}", query)]
    return {
        (name, label, value)
        for name, matchers in series
        for label, values in re.findall(r'(\w+)[=!~]+"([^"]*)"', matchers)
        for value in values.split("|")
    }


@pytest.mark.parametrize(("name", "label", "value"), sorted(picked()))
def test_every_value_that_a_query_picks_is_one_that_is_told(name: str, label: str, value: str) -> None:
    assert value in set(VALUES[name, label])
