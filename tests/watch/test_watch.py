"""The live page, the dashboard's queries and the alerts, while a node of a real proxy dies and comes back."""

import asyncio
import contextlib
import dataclasses
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.samples import Sample

from tests.admin.browser import CHROMIUM, chromium
from tests.admin.reading import text_of
from tests.app.running_proxy import plain_client
from tests.deploy.prometheus.promtool import gives, needs_promtool, recorded, run_query_tests, shows_values
from tests.deploy.prometheus.queries import legend_labels, samples_of, selectors, with_all_chosen
from tests.fakes.kv_transfer import FakeKvTransfer
from tests.fakes.loopback import LoopbackNode
from tests.fakes.node import FakeNode
from tests.orchestration.prompts import WORDS
from tests.watch.load import MODEL, TOKENS, Load
from tests.watch.process import SOON, Process, serving

SETTINGS: dict[str, Any] = {
    "health": {"interval": 0.2, "timeout": 5.0, "failures": 2, "slow_start": 0.0},
    "limits": {"concurrency": 8, "queue": 2},
}
MOST_REQUESTS = SETTINGS["limits"]["concurrency"] + SETTINGS["limits"]["queue"]
"""Requests that may run and wait; more are rejected."""
DEAD = 'pdproxy_node_up{node="decode-0",role="decode",state="down"} 1.0'
BACK = 'pdproxy_node_up{node="decode-0",role="decode",state="up"} 1.0'
SCRAPES = 15
"""Scrapes while the node is down, and after; each stands for the scrape interval of prometheus.yml."""


@dataclasses.dataclass(slots=True)
class Observed:
    """Everything that operators could see during the run.

    Attributes:
        scrapes: the `/metrics` pages, a tenth of a second apart.
        killed, returned: number of the first scrape with the killed node down, and of the first with it up again.
        state: the live page's data while the node was down.
        page: the live page as Chromium rendered it then; empty without Chromium.
        complaints: what Chromium wrote to stderr.
        ended: what the clients got, see `Load.ended`.
        after: right answers between the kill and the return.
    """

    scrapes: list[str] = dataclasses.field(default_factory=list)
    killed: int = 0
    returned: int = 0
    state: dict[str, Any] = dataclasses.field(default_factory=dict)
    page: str = ""
    complaints: str = ""
    ended: Counter[str] = dataclasses.field(default_factory=Counter)
    after: int = 0


async def observe(folder: Path) -> Observed:
    """Run it once."""
    fabric, seen = FakeKvTransfer(), Observed()
    nodes = [LoopbackNode(FakeNode(name, fabric), pace=0.04) for name in ("prefill", "decode", "decode")]
    async with contextlib.AsyncExitStack() as stack:
        for node in nodes:
            await stack.enter_async_context(node)
        entries = [{"url": node.url, "role": node.node.name, "model": MODEL} for node in nodes]
        proxy = await stack.enter_async_context(serving(folder, {**SETTINGS, "nodes": entries}))
        client = await stack.enter_async_context(plain_client(proxy.clients))
        await stack.enter_async_context(_scraping(proxy, seen))
        await _until(lambda: seen.scrapes[-1:] != [] and seen.scrapes[-1].count('state="up"} 1.0') == len(nodes))
        await _odd_requests(client)
        load = Load(client)
        async with load.running():
            await _kill_and_restart(load, nodes[1], proxy, seen)
        seen.ended = load.ended
    assert fabric.wrong == []
    return seen


async def _kill_and_restart(load: Load, victim: LoopbackNode, proxy: Process, seen: Observed) -> None:
    await _within(load.more(12))
    await _until(lambda: victim.node.running >= 3)
    await victim.kill()
    right = load.ended["right"]
    await _until(lambda: DEAD in seen.scrapes[-1])
    seen.killed = next(number for number, page in enumerate(seen.scrapes) if DEAD in page)
    await _within(load.more(12))
    async with plain_client(proxy.operators) as operator:
        seen.state = (await operator.get("/ui/state")).json()
    if CHROMIUM:
        seen.page, seen.complaints = await chromium(f"{proxy.operators}/ui", "--dump-dom")
    await _until(lambda: len(seen.scrapes) >= seen.killed + SCRAPES)
    seen.after = load.ended["right"] - right
    await victim.start()
    await _until(lambda: BACK in seen.scrapes[-1])
    seen.returned = next(n for n, page in enumerate(seen.scrapes) if n > seen.killed and BACK in page)
    await _until(lambda: len(seen.scrapes) >= seen.returned + SCRAPES)


async def _odd_requests(client: httpx.AsyncClient) -> None:
    """Requests that the load does not send: one that a single node computes, an invalid one, too many at a time."""
    body = {"model": MODEL, "prompt": WORDS, "max_tokens": TOKENS, "stream": True}
    alone = await client.post("/v1/completions", json={**body, "prompt": [7]})
    wrong = await client.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
    crowd = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(MOST_REQUESTS + 10)))
    assert (alone.status_code, wrong.status_code) == (200, 400)
    assert {each.status_code for each in crowd} == {200, 429}


@contextlib.asynccontextmanager
async def _scraping(proxy: Process, seen: Observed) -> AsyncIterator[None]:
    async def scrape() -> None:
        async with plain_client(proxy.operators) as client:
            while True:
                seen.scrapes.append((await client.get("/metrics")).text)
                await asyncio.sleep(0.1)

    task = asyncio.create_task(scrape())
    try:
        yield
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON):
        while not holds():  # noqa: ASYNC110 - the condition has no event of its own
            await asyncio.sleep(0.01)


async def _within(work: Awaitable[None]) -> None:
    async with asyncio.timeout(SOON):
        await work


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
    """Everything that operators could see, in one run."""
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
    assert text_of(seen.page, "ready") == "● /ready: ready"
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
