"""Every alert rule has promtool tests that fire it and that must not; promtool runs them where it is installed."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.prometheus.promtool import needs_promtool, promtool

FOLDER = Path(__file__).parents[3] / "deploy/prometheus"
TESTS: list[dict[str, Any]] = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]


def alerts() -> list[dict[str, Any]]:
    """Every rule."""
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expected(test: dict[str, Any]) -> list[dict[str, str]]:
    """The labels of all alerts that a test expects."""
    samples = [sample for query in test["promql_expr_test"] for sample in query["exp_samples"]]
    return [dict(re.findall(r'(\w+)="([^"]*)"', sample["labels"])) for sample in samples]


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_every_alert_has_a_test_that_fires_it_and_one_that_does_not(rule: dict[str, Any]) -> None:
    name, metrics = rule["alert"], set(re.findall(r"pdproxy_\w+", rule["expr"]))
    [fires] = [test for test in TESTS if test["name"] == f"{name} fires"]
    assert name in [alert["alertname"] for alert in expected(fires)]
    [silent] = [test for test in TESTS if test["name"] == f"{name} is silent"]
    assert expected(silent) == []
    fed = {re.split(r"[{ ]", series["series"])[0] for series in silent["input_series"]}
    assert metrics <= fed, "a rule whose series are missing is silent whatever it says"


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_has_all_labels_that_its_annotations_show(rule: dict[str, Any]) -> None:
    shown = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    fired = [alert for test in TESTS for alert in expected(test) if alert["alertname"] == rule["alert"]]
    assert all(shown <= alert.keys() for alert in fired)
    assert {"summary", "action"} <= rule["annotations"].keys()


@needs_promtool
@pytest.mark.parametrize(
    ("command", "file"),
    [
        (("check", "rules"), "alerts.yml"),
        (("test", "rules"), "alerts_test.yml"),
        (("check", "config"), "prometheus.yml"),
    ],
)
def test_promtool_accepts_the_file(command: tuple[str, str], file: str) -> None:
    promtool(*command, str(FOLDER / file))
