"""The dashboard's and the alerts' queries for nodes, run on what real nodes export."""

import json
import secrets
from pathlib import Path

import httpx
import pytest
import yaml
import zmq
from prometheus_client.samples import Sample

from deploy.local.model.quiz import quiz
from deploy.local.node import Node
from deploy.local.paths import ROOT
from deploy.local.ports import HOST
from tests.deploy.prometheus.promtool import gives, needs_promtool, recorded, run_query_tests, shows_values
from tests.deploy.prometheus.queries import Selector, legend_labels, samples_of, selectors
from tests.e2e.conftest import REQUEST_TIMEOUT_S, Pair
from tests.e2e.legs import complete, hand_over, prefill, release
from tests.e2e.metrics_reader import watch

pytestmark = pytest.mark.e2e

OURS = "pdproxy_connector_"
MINUTE = 60.0
BOARD = ROOT / "deploy/grafana/dashboards/pdproxy.json"
ALERTS = ROOT / "deploy/prometheus/alerts.yml"
KEY_FILE = "pdproxy_connector_key_file_changes_total"
"""Not exported here: these nodes have no ticket keys. `tests/connector/test_ticket_keys.py` counts the looks."""


def panels() -> list[tuple[str, str]]:
    """Query and legend of what the dashboard asks of nodes."""
    asked = [target for panel in json.loads(BOARD.read_text())["panels"] for target in panel.get("targets", [])]
    return [
        (target["expr"].replace("$__rate_interval", "10m"), target["legendFormat"])
        for target in asked
        if OURS in target["expr"]
    ]


def of_alerts() -> list[Selector]:
    """Every series of nodes that an alert reads."""
    rules = [rule["expr"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    asked = {each for rule in rules for each in selectors(rule) if each.metric.startswith(OURS)}
    return sorted((each for each in asked if each.metric != KEY_FILE), key=str)


def live(pair: Pair, seed: int) -> None:
    """Whatever can happen on nodes, once: two turns, a ticket that nobody reads, a wrong one, and junk."""
    talk = quiz(seed, 1200)
    for turn in (1, 2):
        hand_over(pair.prefill.url, pair.decode.url, talk.at_turn(turn))
    _unread(pair, seed + 1)
    _refused(pair, seed + 2)
    _junk(pair)


def _unread(pair: Pair, seed: int) -> None:
    name, ended = secrets.token_hex(16), watch(pair.prefill.url, "leases_ended", how="released")
    prefill(pair.prefill.url, quiz(seed, 300).prompt(), pdproxy_hand_over=name)
    release(pair.prefill.url, name)
    ended.reaches(1)


def _refused(pair: Pair, seed: int) -> None:
    question, refused = quiz(seed, 300), watch(pair.decode.url, "refused")
    got = complete(pair.decode.url, question.prompt(), params={"do_remote_prefill": True})
    assert got.text == question.answer
    refused.reaches(1)


def _junk(pair: Pair) -> None:
    junk = watch(pair.prefill.url, "junk")
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 5000
        dealer.connect(f"tcp://{HOST}:{pair.prefill.spec.side_channel_port}")
        dealer.send_multipart([b"junk"])
    # A node sends its counts along with steps of the engine.
    question = quiz(1, 100)
    while not junk.grown():
        assert complete(pair.prefill.url, question.prompt()).text == question.answer


def scrape(pair: Pair) -> list[Sample]:
    """What both nodes export, with the labels that Prometheus gives them."""
    nodes: dict[str, Node] = {"prefill": pair.prefill, "decode": pair.decode}
    samples = []
    for role, node in nodes.items():
        page = httpx.get(f"{node.url}/metrics", timeout=REQUEST_TIMEOUT_S, trust_env=False).raise_for_status().text
        added = {"job": "vllm", "instance": node.url, "role": role}
        samples += [sample._replace(labels={**sample.labels, **added}) for sample in samples_of(page)]
    return samples


@pytest.fixture(scope="module")
def history(pair: Pair) -> list[list[Sample]]:
    """Two scrapes; everything happened before the first, and once more before the second."""
    scrapes = []
    for turn in (0, 1):
        live(pair, 8000 + 10 * turn)
        scrapes.append(scrape(pair))
    return scrapes


def grown(selector: Selector, history: list[list[Sample]]) -> dict[frozenset[tuple[str, str]], float]:
    """By how much each series grew between the two scrapes; one that is new, by all that it has."""
    before, after = (
        {frozenset(sample.labels.items()): sample.value for sample in selector.of(scrape)} for scrape in history
    )
    return {labels: value - before.get(labels, 0) for labels, value in after.items()}


@pytest.mark.parametrize(("query", "legend"), panels())
def test_every_panel_of_the_nodes_reads_series_that_grow(history: list[list[Sample]], query: str, legend: str) -> None:
    for selector in selectors(query):
        found = grown(selector, history)
        assert any(value > 0 for value in found.values())
        assert all(legend_labels(legend) <= {label for label, value in labels if value} for labels in found)


@needs_promtool
def test_every_panel_of_the_nodes_shows_something(history: list[list[Sample]], tmp_path: Path) -> None:
    tests = [
        test
        for query, legend in panels()
        for test in (
            *shows_values(query, legend_labels(legend), MINUTE),
            gives(f"count(abs({query}) < Inf) == bool count({query})", MINUTE, "{}"),
            gives(f"count(({query}) > 0) > bool 0", MINUTE, "{}"),
        )
    ]
    run_query_tests(tmp_path / "panels.json", recorded(history, MINUTE), tests)


@pytest.mark.parametrize("selector", of_alerts(), ids=lambda each: each.metric)
def test_every_series_of_the_alerts_is_exported(history: list[list[Sample]], selector: Selector) -> None:
    """With its labels; what values they take, tests/test_metrics_page.py knows: a lease takes long to expire."""
    found = Selector(selector.metric, ()).of(history[-1])
    assert any(sample.value > 0 for sample in found)
    assert all({matcher.label for matcher in selector.matchers} <= sample.labels.keys() for sample in found)
