"""The live page in a real browser."""

import asyncio
import dataclasses
import re
from collections.abc import Awaitable, Callable

import pytest
from prometheus_client import CollectorRegistry

from pdproxy.admin.context import AdminContext
from pdproxy.credential import Secret
from pdproxy.nodes.demand import Advice, Limit
from pdproxy.nodes.drain import Drainer
from pdproxy.nodes.node import Bars, Node, Role
from pdproxy.observe.labels import Outcome, Prediction
from pdproxy.orchestration.request_record import AnswerRecord
from pdproxy.reasons import RouteReason
from pdproxy.request import Endpoint
from tests.admin.browser import CHROMIUM, new_page, served
from tests.admin.reading import text_of
from tests.admin.sample_state import SampleState
from tests.fakes.faults import FaultKind, InjectedFault
from tests.fakes.refused import refuse
from tests.orchestration.cluster import FakeCluster
from tests.orchestration.prompts import body_for

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")

HOSTILE = "<img src=x onerror=alert(1)>"


def context_of(cluster: FakeCluster, token: str = "") -> AdminContext:
    live, clock, drainer = (
        cluster.context.in_flight,
        cluster.clock,
        Drainer(cluster.pool, cluster.clock, cluster.context.background),
    )
    return AdminContext(
        cluster.pool, drainer, CollectorRegistry(), asyncio.Event(), token=Secret(token), live=live, clock=clock
    )


Look = Callable[[AdminContext], Awaitable[str]]


@pytest.fixture
def look(chromium_url: str) -> Look:
    """The page as it is once it has asked."""

    async def looked(context: AdminContext) -> str:
        async with served(context) as address, new_page(chromium_url) as page:
            await page.show(f"{address}/ui")
            await page.until("['content', 'ask'].some((id) => document.getElementById(id)?.hidden === false)")
            whole = str(await page.value("document.documentElement.outerHTML"))
            assert not page.complaints
        return whole

    return looked


async def test_nodes_and_a_request_on_the_way_are_shown(look: Look) -> None:
    cluster = FakeCluster(prefills=1, decodes=2)
    await cluster.ask(Endpoint.CHAT, body_for(Endpoint.CHAT, stream=True), name="req-before")
    cluster.decodes[0].fault = InjectedFault(FaultKind.RESET, at=3, times=1)
    await cluster.ask(Endpoint.CHAT, body_for(Endpoint.CHAT, stream=True), name="req-moved")
    cluster.pool.add(Node(HOSTILE, "http://x", (Role.PREFILL,)))
    reply = await cluster.orchestrator.answer(
        cluster.request(Endpoint.CHAT, body_for(Endpoint.CHAT, stream=True), name="req-here")
    )
    assert not isinstance(reply.body, bytes)
    cluster.clock.advance(2.5)
    page = await look(context_of(cluster))
    await reply.body.aclose()
    await cluster.settle()
    nodes, requests = text_of(page, "nodes"), text_of(page, "requests")
    assert "p0 prefill ● up" in nodes
    assert "○ joining" in nodes
    assert "not known 1 serve, 1 more 2 serve ● complete 4 100.0 %" in text_of(page, "cohorts")
    assert "&lt;img src=x onerror=alert(1)&gt;" in nodes
    assert re.search(r"req-here · tiny · /v1/chat/completions · p0 → d\d .*decode 2\.5 s; now: decode", requests)
    assert "req-moved" not in requests
    assert re.search(r"req-moved .*decode d0 reset stream moved on ✓ answered", text_of(page, "failures"))
    assert text_of(page, "ready") == "● /ready: ready"
    assert text_of(page, "cause") == "◐ a node, and others took over: d0"
    assert text_of(page, "told").startswith("3 of 4 nodes are up.")
    # The usage of a stream that moved does not tell who computed its prompt: one request counts.
    assert re.search(r"prefill node 1 \d+ \d+ ", text_of(page, "hits"))


async def test_an_incident_is_answered_at_a_glance(look: Look) -> None:
    """A decode node dies under a stream; the other one takes it over, and nobody notices."""
    cluster = FakeCluster(prefills=1, decodes=2)
    cluster.decodes[0].fault = InjectedFault(FaultKind.RESET, at=3, times=1)
    quiet = await look(context_of(cluster))
    assert text_of(quiet, "cause") == "● nothing is wrong"
    assert (text_of(quiet, "since"), text_of(quiet, "hit")) == ("\u2013", "none of 0 requests in 5 minutes failed")
    await cluster.ask(Endpoint.CHAT, body_for(Endpoint.CHAT, stream=True), name="req-moved")
    refuse(cluster.pool, "d0")
    cluster.clock.advance(190)
    page = await look(context_of(cluster))
    assert text_of(page, "cause") == "✕ a node: d0"
    assert re.fullmatch(r"\d\d:\d\d:\d\d UTC, 3 min ago", text_of(page, "since"))
    hit = "none of 1 requests in 5 minutes failed; 1 leg failed, and others took over"
    assert text_of(page, "hit") == hit
    what = r"\d\d:\d\d:\d\d d0 has been out for 3 min \(last fault: refused; legs failed in a row: 4\)\."
    assert re.fullmatch(what, text_of(page, "what"))
    assert text_of(page, "loss") == "Served, with less room: 1 of 2 decode nodes take requests as usual."


async def test_the_first_line_is_about_hand_overs(look: Look) -> None:
    cluster = FakeCluster(prefills=1, decodes=1)
    await cluster.ask(Endpoint.CHAT, body_for(Endpoint.CHAT, stream=False))
    page = await look(context_of(cluster))
    share = "Computed twice: the prompts of 0 of 1 tickets in 5 minutes (0%)"
    assert text_of(page, "hand-overs") == f"● nothing keeps hand-overs from happening. {share}"
    cannot = "d0 cannot reach p0 at 127.0.0.1:5600: set NODE_ADDRESS"
    cluster.pool.bar(Bars({("p0", "d0"): cannot}))
    cluster.clock.advance(190)
    page = await look(context_of(cluster))
    assert re.fullmatch(r"\d\d:\d\d:\d\d UTC, 3 min ago", text_of(page, "since"))
    assert re.fullmatch(rf"\d\d:\d\d:\d\d {re.escape(cannot)}\.", text_of(page, "what"))
    whole = f"✕ hand-overs fail: decode nodes compute the prompts themselves; {cannot}"
    assert text_of(page, "hand-overs") == whole
    assert text_of(page, "cause") == "✕ hand-overs between p0, d0"
    assert text_of(page, "next-what") == "Set NODE_ADDRESS. Then see whether it works:"
    cluster.pool.bar(Bars({("p0", "d0"): "other tokens"}))
    page = await look(context_of(cluster))
    assert text_of(page, "cause").startswith("✕ nodes that hand nothing over")
    assert text_of(page, "ready") == "◐ /ready: degraded"
    assert page.index('id="hand-overs"') < page.index('id="cause"')


async def test_whoever_is_hit_is_named(look: Look) -> None:
    cluster = FakeCluster(prefills=1, decodes=1)
    for key, number in (("alice", 3), ("bob", 1)):
        for _ in range(number):
            request = cluster.request(Endpoint.CHAT, body_for(Endpoint.CHAT, stream=True), api_key=key)
            record = AnswerRecord.of(request, cluster.clock.now)
            cluster.context.in_flight.recent.ended(record, cluster.clock.now(), Outcome.FAILED)
    page = await look(context_of(cluster))
    assert text_of(page, "cause").startswith("✕ us: this proxy")
    assert text_of(page, "hit") == "4 of 4 requests in 5 minutes failed"
    assert text_of(page, "hit-most") == "key alice: 3, key bob: 1; model tiny: 4; /v1/chat/completions: 4"


WIDTH, HEIGHT = 360, 740
"""CSS pixels of a small phone."""
TOO_WIDE = f"""[...document.body.querySelectorAll('*')].filter(e => !e.closest('thead, .skip, [aria-hidden]')
    && e.getBoundingClientRect().right > {WIDTH + 1}).map(e => e.outerHTML.slice(0, 80))"""
TOO_SMALL = "[...document.querySelectorAll('main *')].filter(e => parseFloat(getComputedStyle(e).fontSize) < 14).length"
TOO_LOW = "[...document.querySelectorAll('button')].filter(e => e.offsetParent && e.offsetHeight < 44).length"


async def test_the_page_is_readable_on_a_phone_and_nothing_moves(chromium_url: str) -> None:
    async with served(SampleState().context()) as address, new_page(chromium_url) as page:
        await page.become_phone(WIDTH, HEIGHT)
        await page.show(f"{address}/ui")
        await page.until("document.getElementById('cause')?.textContent.startsWith('✕')")
        assert await page.value(TOO_WIDE) == []
        assert await page.value("document.documentElement.scrollWidth") <= WIDTH
        assert await page.value(TOO_SMALL) == await page.value(TOO_LOW) == 0
        needed = "needed 2 prefill (1.6; 2 are up) and 5 decode (4.3; 2 are up) nodes"
        assert needed in await page.value("document.getElementById('advice').textContent")
        # All three answers are on the first screen.
        assert await page.value("document.getElementById('hit-most').getBoundingClientRect().bottom") < HEIGHT
        assert await page.value("document.getAnimations().length") == 0


async def test_equal_nodes_are_needed_for_prompts_and_streams_together(chromium_url: str) -> None:
    advice = Advice(prefill=1.6, decode=4.3, limit=Limit.CACHE, minutes=60)
    context = dataclasses.replace(context_of(FakeCluster(0, 0, shared=2)), advice=lambda: advice)
    async with served(context) as address, new_page(chromium_url) as page:
        await page.show(f"{address}/ui")
        await page.until("document.getElementById('advice')?.textContent")
        told = await page.value("document.getElementById('advice').textContent")
        assert "needed 6 nodes (1.6 for prompts, 4.3 for streams; 2 are up) for what" in told
        assert "; streams by " in told


@pytest.mark.parametrize("width", [700, 740, 820])
async def test_nothing_is_wider_than_a_window(chromium_url: str, width: int) -> None:
    async with served(SampleState().context()) as address, new_page(chromium_url) as page:
        await page.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False
        )
        await page.show(f"{address}/ui")
        await page.until("document.getElementById('cause')?.textContent.startsWith('✕')")
        assert await page.value("document.documentElement.scrollWidth") <= width


async def test_the_page_asks_for_the_token(look: Look) -> None:
    page = await look(context_of(FakeCluster(), token="s3cret"))
    assert re.search(r'<form id="ask">', page)
    assert re.search(r'<main id="content"[^>]* hidden="">', page)
    assert text_of(page, "told") == "This proxy asks for its admin token."


async def test_plans_are_shown_once_there_are_some(look: Look) -> None:
    cluster = FakeCluster(prefills=1, decodes=1)
    live = cluster.context.in_flight
    for outcome in (Prediction.RIGHT, Prediction.LESS):
        live.plans[RouteReason.CACHED] += 1
        live.planned_hits[Role.PREFILL].add(1000, 800, 700 if outcome is Prediction.RIGHT else 0, outcome)
    page = await look(context_of(cluster))
    assert 'id="planning"' in page
    assert text_of(page, "planned").startswith("prefill node 2 2,000 80.0 % 35.0 % 50.0 % decode node 0 0 ")
    assert text_of(page, "reasons").startswith("most of it is cached there 2 100.0 %")
    assert not re.search(r'<section id="planning"[^>]* hidden', page)
    assert re.search(r'<section id="planning"[^>]* hidden', await look(context_of(FakeCluster())))
