"""Run every query of the dashboard and of the alerts against a real proxy and real nodes."""

import json
import secrets
from pathlib import Path

import httpx
import pytest
import yaml
import zmq
from prometheus_client.samples import Sample

from deploy.local.model.quiz import quiz
from deploy.local.node import SERVED_NAME
from deploy.local.paths import ROOT
from deploy.local.ports import HOST
from deploy.local.stack import Proxy
from tests.deploy.prometheus.promtool import gives, needs_promtool, recorded, run_query_tests, shows_values
from tests.deploy.prometheus.queries import Selector, legend_labels, samples_of, selectors, with_all_chosen
from tests.e2e.conftest import REQUEST_TIMEOUT_S, Pair
from tests.e2e.legs import complete, hand_over, prefill, release
from tests.e2e.metrics_reader import watch

pytestmark = pytest.mark.e2e

OF_NODES = ("pdproxy_connector_", "vllm:")
MINUTE = 60.0
BOARD = ROOT / "deploy/grafana/dashboards/pdproxy.json"
ALERTS = ROOT / "deploy/prometheus/alerts.yml"
WITH_KEYS = {"pdproxy_connector_key_file_changes_total", "pdproxy_connector_side_channel_refused_total"}
"""Not exported here: these nodes have no ticket keys. `tests/connector` covers reads of the file, and refusals."""
SCRAPED = ROOT / "deploy/prometheus/prometheus.yml"


QUIET = {
    *("pdproxy_leg_faults_total", "pdproxy_steps_total", "pdproxy_local_total", "pdproxy_stream_stall_seconds_bucket"),
    *("pdproxy_kv_event_lag_seconds_count", "pdproxy_kv_event_lag_seconds_bucket", "pdproxy_kv_places_forgotten_total"),
}
"""Series with a value after a failure, or with KV events. `tests/watch` runs these panels against a real proxy whose
legs fail and whose streams move."""
STILL = {
    *("vllm:kv_cache_usage_perc", "vllm:num_preemptions_total", "vllm:num_requests_running"),
    *("vllm:num_requests_waiting", "up", "pdproxy_connector_barred_tickets_total"),
}
"""Series of nodes that may stay constant while all goes well."""
WHILE_CUT = {"pdproxy_connector_barred_peers"}
"""Above 0 while no read from a node works; `tests/e2e/test_cut_paths.py` cuts the network between two."""


def panels() -> list[tuple[str, str]]:
    """Query and legend of every panel."""
    asked = [target for panel in json.loads(BOARD.read_text())["panels"] for target in panel.get("targets", [])]
    return [(with_all_chosen(target["expr"]), target["legendFormat"]) for target in asked]


def panels_of_nodes() -> list[tuple[str, str]]:
    """Those of them with series of nodes."""
    return [(query, legend) for query, legend in panels() if any(name in query for name in OF_NODES)]


def of_alerts() -> list[Selector]:
    """Every series of nodes in an alert."""
    rules = [rule["expr"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    asked = {each for rule in rules for each in selectors(rule) if each.metric.startswith(OF_NODES)}
    return sorted((each for each in asked if each.metric not in WITH_KEYS | WHILE_CUT), key=str)


def live(pair: Pair, proxy: Proxy, seed: int) -> None:
    """Cause each event once: a request, a stream; two turns, an unread ticket, a wrong ticket and junk on nodes."""
    question = quiz(seed + 3, 300)
    assert complete(proxy.url, question.prompt()).text == question.answer
    _streamed(proxy, seed + 4)
    talk = quiz(seed, 1200)
    for turn in (1, 2):
        hand_over(pair.prefill.url, pair.decode.url, talk.at_turn(turn))
    _unread(pair, seed + 1)
    _refused(pair, seed + 2)
    _junk(pair)


def _streamed(proxy: Proxy, seed: int) -> None:
    body = {"model": SERVED_NAME, "prompt": quiz(seed, 300).prompt(), "max_tokens": 8, "temperature": 0, "stream": True}
    got = httpx.post(f"{proxy.url}/v1/completions", json=body, timeout=REQUEST_TIMEOUT_S, trust_env=False)
    assert got.raise_for_status().text.endswith("data: [DONE]\n\n")


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
    # A node sends its counts with the engine's steps.
    question = quiz(1, 100)
    while not junk.grown():
        assert complete(pair.prefill.url, question.prompt()).text == question.answer


def scrape(pair: Pair, proxy: Proxy) -> list[Sample]:
    """The metrics of the proxy and both nodes, with the labels that prometheus.yml adds."""
    jobs = {job["job_name"]: job for job in yaml.safe_load(SCRAPED.read_text())["scrape_configs"]}
    given = {each["target_label"]: each["replacement"] for each in jobs["vllm"]["relabel_configs"]}
    found = httpx.get(f"{proxy.admin_url}/prometheus/targets", timeout=REQUEST_TIMEOUT_S, trust_env=False).json()
    told = [{name: value for name, value in each["labels"].items() if name[:2] != "__"} for each in found]
    nodes = {labels["role"]: {**labels, **given} for labels in told}
    targets = [
        ("pdproxy", proxy.admin_url, jobs["pdproxy"]["static_configs"][0]["labels"]),
        ("vllm", pair.prefill.url, nodes["prefill"]),
        ("vllm", pair.decode.url, nodes["decode"]),
    ]
    samples = []
    for job, url, labels in targets:
        page = httpx.get(f"{url}/metrics", timeout=REQUEST_TIMEOUT_S, trust_env=False).raise_for_status().text
        added = {"job": job, "instance": url, **labels}
        samples.append(Sample("up", added, 1))
        samples += [sample._replace(labels={**sample.labels, **added}) for sample in samples_of(page)]
    return samples


@pytest.fixture(scope="module")
def history(pair: Pair, proxy: Proxy) -> list[list[Sample]]:
    """Two scrapes. Every event happened before the first, and again before the second."""
    scrapes = []
    for turn in (0, 1):
        live(pair, proxy, 8000 + 10 * turn)
        scrapes.append(scrape(pair, proxy))
    return scrapes


def grown(selector: Selector, history: list[list[Sample]]) -> dict[frozenset[tuple[str, str]], float]:
    """The growth of each series between the two scrapes; of a new one, its value."""
    before, after = (
        {frozenset(sample.labels.items()): sample.value for sample in selector.of(scrape)} for scrape in history
    )
    return {labels: value - before.get(labels, 0) for labels, value in after.items()}


@pytest.mark.parametrize(("query", "legend"), panels_of_nodes())
def test_every_panel_of_the_nodes_reads_series_that_grow(history: list[list[Sample]], query: str, legend: str) -> None:
    for selector in selectors(query):
        found = grown(selector, history)
        assert found
        assert selector.metric in STILL or any(value > 0 for value in found.values())
        assert all(legend_labels(legend) <= {label for label, value in labels if value} for labels in found)


@needs_promtool
def test_every_panel_shows_something(history: list[list[Sample]], tmp_path: Path) -> None:
    """Values of the labels in its legend."""
    asked = [each for each in panels() if not any(selector.metric in QUIET for selector in selectors(each[0]))]
    assert len(asked) >= len(panels()) - len(QUIET)
    tests = [test for query, legend in asked for test in shows_values(query, legend_labels(legend), MINUTE)]
    run_query_tests(tmp_path / "panels.json", recorded(history, MINUTE), tests)


@needs_promtool
def test_what_the_panels_of_the_nodes_show_is_more_than_nothing(history: list[list[Sample]], tmp_path: Path) -> None:
    asked = [query for query, _ in panels_of_nodes() if not any(each.metric in STILL for each in selectors(query))]
    tests = [
        test
        for query in asked
        for test in (
            gives(f"count(abs({query}) < Inf) == bool count({query})", MINUTE, "{}"),
            gives(f"count(({query}) > 0) > bool 0", MINUTE, "{}"),
        )
    ]
    run_query_tests(tmp_path / "panels.json", recorded(history, MINUTE), tests)


@pytest.mark.parametrize("selector", of_alerts(), ids=lambda each: each.metric)
def test_every_series_of_the_alerts_is_exported(history: list[list[Sample]], selector: Selector) -> None:
    """The series has the alert's labels. tests/test_metrics_page.py checks their values: a lease takes long to
    expire."""
    found = Selector(selector.metric, ()).of(history[-1])
    assert any(sample.value > 0 for sample in found)
    assert all({matcher.label for matcher in selector.matchers} <= sample.labels.keys() for sample in found)
    bounds = [matcher.value for matcher in selector.matchers if matcher.label == "le"]
    assert all(any(sample.labels["le"] == bound for sample in found) for bound in bounds)


def test_the_proxy_says_how_many_nodes_that_took(history: list[list[Sample]]) -> None:
    needed = {sample.labels["role"]: sample.value for sample in Selector("pdproxy_nodes_needed", ()).of(history[-1])}
    assert needed.keys() == {"prefill", "decode"}
    assert 0 < needed["prefill"] < 1
