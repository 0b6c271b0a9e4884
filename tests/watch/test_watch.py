"""The live page, the dashboard's queries and the alerts, while a node of a real proxy dies and comes back."""

import asyncio
import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.samples import Sample

from tests.admin.browser import CHROMIUM
from tests.admin.reading import text_of
from tests.deploy.prometheus.promtool import gives, needs_promtool, recorded, run_query_tests, shows_values
from tests.deploy.prometheus.queries import legend_labels, samples_of, selectors, with_all_chosen
from tests.watch.scenario import Observed, observe

DEPLOY = Path(__file__).parents[2] / "deploy"
CONFIG = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
STEP = float(CONFIG["global"]["scrape_interval"].removesuffix("s"))
ALERTS = DEPLOY / "prometheus/alerts.yml"
NODE_DOWN = (
    'ALERTS{alertname="PdproxyNodeDown",alertstate="firing",severity="ticket",namespace="compose",release="pdproxy",'
    'node="decode-0",role="decode",state="down"}'
)
# Either finds the death first: the health check, which says more where it could not connect, or a leg.
LOST = r"(health: (reset|cannot be reached: 127\.0\.0\.1:\d+: connection refused)|last fault: (refused|reset))"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    """What operators could see, in one run."""
    return asyncio.run(observe(tmp_path_factory.mktemp("watch")))


@pytest.fixture(scope="module")
def scrapes(seen: Observed) -> list[list[Sample]]:
    """All scrapes, with the labels that prometheus.yml gives them; Prometheus would have made one each STEP seconds."""
    [job] = [job for job in CONFIG["scrape_configs"] if job["job_name"] == "pdproxy"]
    [target] = job["static_configs"]
    given = {"job": "pdproxy", "instance": target["targets"][0], **target["labels"]}
    return [
        [Sample("up", given, 1), *(each._replace(labels={**each.labels, **given}) for each in samples_of(page))]
        for page in seen.scrapes
    ]


def panels() -> list[tuple[str, str, str]]:
    """Title, query and legend of the dashboard's panels about the proxy."""
    board = json.loads((DEPLOY / "grafana/dashboards/pdproxy.json").read_text())
    asked = [(panel["title"], target) for panel in board["panels"] for target in panel.get("targets", [])]
    return [
        (title, with_all_chosen(target["expr"]), target["legendFormat"])
        for title, target in asked
        if not re.search("pdproxy_connector_|vllm:", target["expr"])
    ]


def test_every_answer_is_right_while_a_node_is_down(seen: Observed) -> None:
    assert set(seen.ended) == {"right"}
    assert seen.after >= 12


def test_the_live_page_has_the_dead_node_and_what_became_of_its_requests(seen: Observed) -> None:
    [dead] = [node for node in seen.state["nodes"] if node["name"] == "decode-0"]
    assert (dead["state"], dead["active"]) == ("down", 0)
    assert re.fullmatch(LOST, dead["reason"])
    assert {node["state"] for node in seen.state["nodes"] if node is not dead} == {"up"}
    assert seen.state["ready"] == "ready"
    incident = seen.state["incident"]
    assert (incident["cause"], incident["nodes"], incident["hit"]["failed"]) == ("node", ["decode-0"], 0)
    assert 0 < incident["since"] < 60
    moved = [failure for failure in seen.state["failures"] if failure["step"] == "migrate"]
    assert moved
    assert {(failure["leg"], failure["node"], failure["outcome"]) for failure in moved} == {
        ("decode", "decode-0", "ok")
    }
    assert {failure["outcome"] for failure in seen.state["failures"]} <= {"ok", "on_the_way"}


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")
def test_a_browser_shows_it(seen: Observed) -> None:
    assert not re.findall(r"CONSOLE.*(?:Uncaught|Content Security Policy).*", seen.complaints)
    nodes = text_of(seen.page, "nodes")
    assert re.search(rf"decode-0 decode ✕ down 0 legs m {LOST}", nodes)
    assert re.search(r"decode-1 decode ● up [1-9]\d* legs? m", nodes)
    assert re.search(
        r"req-\w+ \S+ m?s decode decode-0 (reset|refused) stream moved on ✓ answered", text_of(seen.page, "failures")
    )
    assert re.search(r"prefill-0 → decode-1 .* now: ", text_of(seen.page, "requests"))
    assert text_of(seen.page, "ready") == "● ready"
    assert text_of(seen.page, "told").startswith("2 of 3 nodes are up.")
    assert text_of(seen.page, "cause") == "✕ a node: decode-0"
    # The requests too many, which the scenario sends on purpose, were turned away.
    assert re.search(r"^\d+ of \d+ requests in 5 minutes w\w+ turned away; \d+ legs? failed", text_of(seen.page, "hit"))


@pytest.mark.parametrize(("title", "query", "legend"), panels())
def test_every_panel_of_the_proxy_reads_series_that_are_there(
    scrapes: list[list[Sample]], seen: Observed, title: str, query: str, legend: str
) -> None:
    now = scrapes[seen.returned - 1]
    for selector in selectors(query):
        found = selector.of(now)
        assert found, selector
        assert all(legend_labels(legend) <= {label for label, value in each.labels.items() if value} for each in found)


@needs_promtool
def test_every_panel_of_the_proxy_shows_something(scrapes: list[list[Sample]], seen: Observed, tmp_path: Path) -> None:
    now = (seen.returned - 1) * STEP
    tests = [test for _, query, legend in panels() for test in shows_values(query, legend_labels(legend), now)]
    run_query_tests(tmp_path / "panels.json", recorded(scrapes[: seen.returned], STEP), tests)


@needs_promtool
def test_the_alert_for_the_dead_node_fires_and_no_other(
    scrapes: list[list[Sample]], seen: Observed, tmp_path: Path
) -> None:
    moments = [(seen.killed, []), (seen.returned, [NODE_DOWN]), (seen.returned + 1, [])]
    tests = [gives('ALERTS{alertstate="firing"}', (count - 1) * STEP, *firing) for count, firing in moments]
    run_query_tests(tmp_path / "alerts.json", recorded(scrapes, STEP), tests, ALERTS)


def test_pending_prompt_tokens_rise_and_fall_back_to_zero(seen: Observed) -> None:
    series = re.compile(r'^pdproxy_prefill_pending_tokens_estimate\{model="m"\} (\S+)$', re.MULTILINE)
    levels = [float(value) for page in seen.scrapes for value in series.findall(page)]
    assert levels[0] == 0
    assert max(levels) > 0
