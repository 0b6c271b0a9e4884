"""The dashboard's and the alerts' queries for nodes, asked of what real nodes tell."""

import json
import math
import re
import secrets

import httpx
import pytest
import yaml
import zmq

from deploy.local.model.quiz import quiz
from deploy.local.node import Node
from deploy.local.paths import ROOT
from deploy.local.ports import HOST
from tests.deploy.prometheus.evaluate import evaluate
from tests.deploy.prometheus.storage import Storage
from tests.e2e.conftest import REQUEST_TIMEOUT_S, Pair
from tests.e2e.legs import complete, hand_over, prefill, release
from tests.e2e.metrics_reader import watch

pytestmark = pytest.mark.e2e

OURS = "pdproxy_connector_"
MINUTE = 60.0
BOARD = ROOT / "deploy/grafana/dashboards/pdproxy.json"
ALERTS = ROOT / "deploy/prometheus/alerts.yml"
SCRAPED = ROOT / "deploy/prometheus/prometheus.yml"


def panels() -> list[tuple[str, str]]:
    """Query and legend of what the dashboard asks of nodes."""
    asked = [target for panel in json.loads(BOARD.read_text())["panels"] for target in panel.get("targets", [])]
    return [
        (target["expr"].replace("$__rate_interval", "10m"), target["legendFormat"])
        for target in asked
        if OURS in target["expr"]
    ]


def selectors() -> set[str]:
    """Every series of nodes that an alert names, as it stands there: labels, but no window."""
    rules = [rule["expr"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    return {found for rule in rules for found in re.findall(rf"{OURS}\w+(?:\{{[^}}]*\}})?", rule)}


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


def scrape(storage: Storage, pair: Pair, at: float) -> None:
    """What both nodes tell, with the labels that prometheus.yml gives them."""
    [job] = [job for job in yaml.safe_load(SCRAPED.read_text())["scrape_configs"] if job["job_name"] == "vllm"]
    targets = {target["labels"]["role"]: target for target in job["static_configs"]}
    nodes: dict[str, Node] = {"prefill": pair.prefill, "decode": pair.decode}
    assert targets.keys() == nodes.keys()
    for role, node in nodes.items():
        page = httpx.get(f"{node.url}/metrics", timeout=REQUEST_TIMEOUT_S, trust_env=False).raise_for_status().text
        storage.scraped(page, at, {"job": "vllm", "instance": node.url, **targets[role]["labels"]})


@pytest.fixture(scope="module")
def history(pair: Pair) -> Storage:
    """Two scrapes; everything happened before the first, and once more before the second."""
    storage = Storage()
    for turn in (0, 1):
        live(pair, 8000 + 10 * turn)
        scrape(storage, pair, turn * MINUTE)
    return storage


@pytest.mark.parametrize(("query", "legend"), panels())
def test_every_panel_of_the_nodes_shows_something(history: Storage, query: str, legend: str) -> None:
    found = evaluate(query, history, MINUTE)
    assert found
    assert all(math.isfinite(value) for value in found.values())
    assert any(value > 0 for value in found.values())
    named = set(re.findall(r"\{\{(\w+)\}\}", legend))
    assert all(named <= {label for label, value in labels if value} for labels in found)


@pytest.mark.parametrize("selector", sorted(selectors()))
def test_every_series_of_the_alerts_is_told(history: Storage, selector: str) -> None:
    """With its labels; what values they take, tests/test_metrics_page.py knows: a lease takes long to expire."""
    name, _, matchers = selector.partition("{")
    found = evaluate(name, history, MINUTE)
    assert any(value > 0 for value in found.values())
    named = set(re.findall(r"(\w+)=", matchers))
    assert all(named <= {label for label, _ in labels} for labels in found)
