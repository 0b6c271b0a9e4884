"""The chart's objects for Prometheus and Grafana: labels by release, rules about one release, the dashboard."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdproxy.admin.nodes import scrape_targets
from pdproxy.nodes.discovery.source import Template
from pdproxy.nodes.node import Node, Role
from tests.deploy.prometheus.alert_cases import CASES, NAMESPACES, PROXY, firing, labelled, with_labels
from tests.deploy.prometheus.promtool import needs_promtool, promtool
from tests.deploy.prometheus.test_alerts import ALERTS, NOT_SCRAPED, run_tests
from tests.helm.conftest import Rendered
from tests.helm.engine import NAMESPACE, RELEASE, ROOT, Engine, Manifest, Refused

RULES = {"metrics": {"serviceMonitor": {"enabled": True}, "rules": {"enabled": True}}}
OURS = {"namespace": NAMESPACE, "release": RELEASE}
LABELS_OF_TARGETS = {"job", "release", "role", "node"}
"""Besides the namespace, which Prometheus Operator adds."""


def relabelled(endpoint: Manifest, target: dict[str, str]) -> dict[str, str]:
    """The labels that a target gets by an endpoint's relabelings, as Prometheus' ``replace`` makes them."""
    made = {}
    for rule in endpoint["relabelings"]:
        joined = rule.get("separator", ";").join(target[name] for name in rule.get("sourceLabels", ()))
        made[rule["targetLabel"]] = rule.get("replacement", joined)
    return made


def labels_of(job: dict[str, Any]) -> set[str]:
    """The labels that a job of prometheus.yml gives to what it scrapes; a proxy that is asked for nodes gives two."""
    said = [target["labels"] for target in job.get("static_configs", [])]
    given = {rule["target_label"] for rule in job.get("relabel_configs", [])}
    found = scrape_targets(Node("n", "http://n:1", (Role.DECODE,)))[0]["labels"] if "http_sd_configs" in job else {}
    assert isinstance(found, dict)
    told = {name for name in found if not name.startswith("__")}
    return {"job", *given, *told, *(name for labels in said for name in labels)}


def test_what_is_scraped_gets_the_labels_of_prometheus_yml(rendered: Rendered) -> None:
    full = rendered("full-values")
    jobs = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    elsewhere = {job["job_name"]: labels_of(job) - {"namespace"} for job in jobs}
    [proxy] = full.one("ServiceMonitor")["spec"]["endpoints"]
    assert relabelled(proxy, {}) == {"job": "pdproxy", "release": "demo"}
    assert relabelled(proxy, {}).keys() == elsewhere["pdproxy"]
    [node] = full.one("PodMonitor")["spec"]["podMetricsEndpoints"]
    pod = {"__meta_kubernetes_pod_label_app_kubernetes_io_component": "decode", "__address__": "10.0.0.7:8000"}
    made = relabelled(node, pod)
    assert made == {"job": "vllm", "release": "demo", "role": "decode", "node": "decode-10.0.0.7:8000"}
    assert made.keys() == elsewhere["vllm"] == LABELS_OF_TARGETS


def test_a_node_that_does_both_is_scraped_once_for_each_role(rendered: Rendered) -> None:
    """As the proxy tells Prometheus elsewhere: what alerts ask of one role's series holds for it."""
    manifests = rendered("all-kinds-values")
    fixed, both = manifests.of("PodMonitor")
    labels = manifests.node("node")["metadata"]["labels"]
    assert both["spec"]["selector"]["matchLabels"].items() <= labels.items()
    [expression] = fixed["spec"]["selector"]["matchExpressions"]
    assert (expression["key"], expression["values"]) == ("app.kubernetes.io/component", ["prefill", "decode"])
    pod = {"__meta_kubernetes_pod_label_app_kubernetes_io_component": "node", "__address__": "10.0.0.7:8000"}
    made = [relabelled(endpoint, pod) for endpoint in both["spec"]["podMetricsEndpoints"]]
    node = Template((Role.PREFILL, Role.DECODE)).node_at("10.0.0.7", 8000)
    told = [target["labels"] for target in scrape_targets(node)]
    for ours, theirs in zip(made, told, strict=True):
        assert isinstance(theirs, dict)
        assert (ours["role"], ours["node"]) == (theirs["role"], theirs["node"])
    assert all(each.keys() == LABELS_OF_TARGETS for each in made)


def test_what_prometheus_scrapes_is_there(helm: Engine) -> None:
    values = {"metrics": {"podMonitor": {"enabled": True}}, "networkPolicy": {"scrapers": [{"podSelector": {}}]}}
    for kinds, monitors in ((["node"], ["node"]), (["prefill", "decode"], ["nodes"])):
        found = helm.manifests({**values, "nodes": {"kinds": kinds}}).of("PodMonitor")
        assert [each["metadata"]["name"].rpartition("-")[2] for each in found] == monitors


def rules_of(helm: Engine, folder: Path) -> Path:
    """The chart's rules as a file that promtool reads."""
    path = folder / "rules.json"
    path.write_text(json.dumps(helm.manifests(RULES).one("PrometheusRule")["spec"]))
    return path


def rules_in(spec: Any) -> list[Any]:
    """Every rule of a file, or of a PrometheusRule."""
    return [rule for group in spec["groups"] for rule in group["rules"]]


def test_the_rules_are_those_of_the_file_about_this_release_alone(helm: Engine) -> None:
    ours = rules_in(helm.manifests(RULES).one("PrometheusRule")["spec"])
    theirs = rules_in(yaml.safe_load(ALERTS.read_text()))
    both = f'namespace="{NAMESPACE}",release="{RELEASE}"'
    for mine, other in zip(ours, theirs, strict=True):
        assert {**mine, "expr": ""} == {**other, "expr": ""}
        assert re.sub(r"\{\}", "", re.sub(f"{both},?", "", mine["expr"])) == other["expr"]
        series = re.findall(r"(?:pdproxy_|gen_ai_|vllm:)\w+|\bup\b(?=\{)", other["expr"])
        assert mine["expr"].count(both) == len(series)


def test_alerts_are_left_out_by_name(rendered: Rendered, helm: Engine) -> None:
    rule = rendered("full-values").one("PrometheusRule")
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    names = {each["alert"] for each in rules_in(rule["spec"])}
    every = {each["alert"] for each in rules_in(yaml.safe_load(ALERTS.read_text()))}
    assert every - names == {"PdproxySlowTokens"}
    with pytest.raises(Refused, match=r"there is no alert PdproxySlow\. There are: PdproxyDown, "):
        helm.render({"metrics": {**RULES["metrics"], "rules": {"enabled": True, "without": ["PdproxySlow"]}}})


def test_rules_without_what_they_read_are_refused(helm: Engine) -> None:
    with pytest.raises(Refused, match=r"no rule fires without metrics\.serviceMonitor\.enabled"):
        helm.render({"metrics": {"rules": {"enabled": True}}})


@needs_promtool
def test_promtool_accepts_the_rules(helm: Engine, tmp_path: Path) -> None:
    promtool("check", "rules", str(rules_of(helm, tmp_path)))


@needs_promtool
def test_a_release_alerts_for_itself_and_for_no_other(helm: Engine, tmp_path: Path) -> None:
    """Ours and two others fail all at once."""
    [case] = [case for case in CASES if case.alert == "PdproxyFailing"]
    releases = [OURS, {**OURS, "namespace": NAMESPACES[1]}, {**OURS, "release": "other"}]
    series = [row for release in releases for row in labelled(case.ill, release)]
    alert = {"alertname": case.alert, "severity": case.severity, **OURS}
    history = [firing(".*", case.pending), firing(".*", case.firing, [alert]), firing(".*", case.over)]
    tests = [{"interval": case.interval, "input_series": series, "promql_expr_test": history}]
    run_tests(tmp_path, rules_of(helm, tmp_path), tests)


@needs_promtool
def test_a_release_that_nobody_scrapes_is_reported_beside_one_that_is_scraped(helm: Engine, tmp_path: Path) -> None:
    missed = {"alertname": NOT_SCRAPED, "severity": "ticket", "job": "pdproxy", **OURS}
    history = [firing(".*", "10m"), firing(".*", "18m", [missed]), firing(".*", "25m")]
    series = [
        {"series": with_labels(PROXY, {**OURS, "release": "other"}), "values": "1x100"},
        {"series": with_labels(PROXY, OURS), "values": "_x40 1x60"},
    ]
    tests = [{"interval": "30s", "input_series": series, "promql_expr_test": history}]
    run_tests(tmp_path, rules_of(helm, tmp_path), tests)


def test_the_dashboard_is_the_one_that_compose_shows(rendered: Rendered) -> None:
    board = rendered("full-values").one("ConfigMap", "-dashboard")
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert board["metadata"]["annotations"] == {"grafana_folder": "Models"}
    [(name, text)] = board["data"].items()
    assert name == "pdproxy.json"
    assert text.strip() == (ROOT / "deploy/grafana/dashboards/pdproxy.json").read_text().strip()
