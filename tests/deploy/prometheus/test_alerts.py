"""Every alert fires when it should and is silent when it should be; Prometheus itself agrees where it is at hand."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.prometheus.promtool import NO_PROMTOOL, promtool
from tests.deploy.prometheus.rule_tests import Case, cases

FOLDER = Path(__file__).parents[3] / "deploy/prometheus"
CASES = cases(FOLDER / "alerts_test.yml")


def alerts() -> list[dict[str, Any]]:
    """Every rule."""
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fires_when_it_should_alone(case: Case) -> None:
    case.check()


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_every_alert_has_both_tests(rule: dict[str, Any]) -> None:
    name, series = rule["alert"], set(re.findall(r"pdproxy_\w+", rule["expr"]))
    [fires] = [case for case in CASES if case.name == f"{name} fires"]
    assert any(("alertname", name) in labels for labels in fires.expected())
    [silent] = [case for case in CASES if case.name == f"{name} is silent"]
    assert silent.expected() == []
    assert series <= silent.metrics(), "silent for want of series"


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_what_an_alert_says_has_all_its_labels(rule: dict[str, Any]) -> None:
    named = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    fired = [labels for case in CASES for labels in case.expected() if ("alertname", rule["alert"]) in labels]
    assert all(named <= dict(labels).keys() for labels in fired)
    assert {"summary", "action"} <= rule["annotations"].keys()


@pytest.mark.skipif(NO_PROMTOOL, reason="there is no promtool on this machine")
@pytest.mark.parametrize(
    "words", ["check rules alerts.yml", "test rules alerts_test.yml", "check config prometheus.yml"]
)
def test_prometheus_thinks_so_too(words: str) -> None:
    *command, file = words.split()
    promtool(*command, str(FOLDER / file))
