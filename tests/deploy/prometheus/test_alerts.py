"""Every alert rule fires, ends and stays silent for each release by itself, says promtool where it is installed."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.prometheus.alert_cases import CASES, PROXY, firing, labelled, promtool_tests, with_labels
from tests.deploy.prometheus.promtool import needs_promtool, promtool

FOLDER = Path(__file__).parents[3] / "deploy/prometheus"
ALERTS = FOLDER / "alerts.yml"
NOT_SCRAPED = "PdproxyNotScraped"
"""Fires where there is no series: of a release it can speak in the chart alone, which knows its name."""
OF_RELEASES = {"namespace", "release"}


def alerts() -> list[dict[str, Any]]:
    """Every rule."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def each_rule(*, but: str = "") -> pytest.MarkDecorator:
    """A test of every rule."""
    found = [rule for rule in alerts() if rule["alert"] != but]
    return pytest.mark.parametrize("rule", found, ids=lambda rule: rule["alert"])


@each_rule(but=NOT_SCRAPED)
def test_every_alert_has_series_that_fire_it_and_series_that_do_not(rule: dict[str, Any]) -> None:
    metrics = set(re.findall(r"(?:pdproxy_|gen_ai_|vllm:)\w+|\bup\b(?=\{)", rule["expr"]))
    cases = [case for case in CASES if case.alert == rule["alert"]]
    assert cases
    for case in cases:
        assert case.severity == rule["labels"]["severity"]
        for series in (case.ill, case.well):
            fed = {re.split(r"[{ ]", each)[0] for each in series}
            assert metrics <= fed, "a rule whose series are missing is silent whatever it says"


@each_rule(but=NOT_SCRAPED)
def test_every_alert_speaks_of_one_release(rule: dict[str, Any]) -> None:
    """An aggregation without these labels would let a healthy release hide an ill one."""
    aggregations = re.findall(r"\b(?:sum|min|max|avg|count|group|quantile|topk|bottomk)\b\s*(\S[^)]*)", rule["expr"])
    groupings = [re.match(r"by \(([^)]*)", each) for each in aggregations]
    assert all(each and set(each[1].split(", ")) >= OF_RELEASES for each in groupings)
    shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    assert shown >= OF_RELEASES


@each_rule()
def test_an_alert_has_all_labels_that_its_annotations_show(rule: dict[str, Any]) -> None:
    shown = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values()))) - OF_RELEASES
    assert all(shown <= each.keys() for case in CASES if case.alert == rule["alert"] for each in case.fires)
    assert {"summary", "action"} <= rule["annotations"].keys()


def run_tests(folder: Path, rules: Path, tests: list[dict[str, Any]]) -> None:
    """Have promtool run them."""
    path = folder / "alerts_test.json"
    file = {"rule_files": [str(rules)], "evaluation_interval": "30s", "tests": tests}
    path.write_text(json.dumps(file))
    promtool("test", "rules", str(path))


@needs_promtool
def test_every_alert_fires_and_ends_for_each_release_by_itself(tmp_path: Path) -> None:
    run_tests(tmp_path, ALERTS, promtool_tests())


@needs_promtool
def test_a_proxy_that_nobody_scrapes_is_reported_until_somebody_does(tmp_path: Path) -> None:
    missed = {"alertname": NOT_SCRAPED, "severity": "ticket", "job": "pdproxy"}
    history = [firing(".*", "10m"), firing(".*", "18m", [missed]), firing(".*", "25m")]
    series = [{"series": with_labels(PROXY, {"release": "late"}), "values": "_x40 1x40"}]
    run_tests(tmp_path, ALERTS, [{"interval": "30s", "input_series": series, "promql_expr_test": history}])


@needs_promtool
def test_without_the_labels_of_releases_there_is_one_nameless_release(tmp_path: Path) -> None:
    """Who scrapes by a configuration of his own and gives none."""
    [case] = [case for case in CASES if case.alert == "PdproxyFailing"]
    failing = {"alertname": case.alert, "severity": "page"}
    history = [firing(".*", "3m"), firing(".*", "15m", [failing]), firing(".*", "40m")]
    series = labelled(case.ill, {})
    run_tests(tmp_path, ALERTS, [{"interval": "30s", "input_series": series, "promql_expr_test": history}])


@needs_promtool
@pytest.mark.parametrize(
    ("command", "file"), [(("check", "rules"), "alerts.yml"), (("check", "config"), "prometheus.yml")]
)
def test_promtool_accepts_the_file(command: tuple[str, str], file: str) -> None:
    promtool(*command, str(FOLDER / file))
