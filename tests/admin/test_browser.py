"""The live page in a real browser."""

import asyncio
import re

import pytest
from prometheus_client import CollectorRegistry

from pdproxy.admin.context import AdminContext
from pdproxy.credential import Secret
from pdproxy.nodes.drain import Drainer
from pdproxy.nodes.node import Node, Role
from pdproxy.observe.labels import Prediction, RouteReason
from pdproxy.request import Endpoint
from tests.admin.browser import CHROMIUM, chromium, served
from tests.admin.reading import text_of
from tests.fakes.faults import FaultKind, InjectedFault
from tests.orchestration.cluster import FakeCluster
from tests.orchestration.prompts import body_for

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")

HOSTILE = "<img src=x onerror=alert(1)>"


def context_of(cluster: FakeCluster, token: str = "") -> AdminContext:
    live, clock, drainer = cluster.context.in_flight, cluster.clock, Drainer(cluster.pool, cluster.clock)
    return AdminContext(
        cluster.pool, drainer, CollectorRegistry(), asyncio.Event(), token=Secret(token), live=live, clock=clock
    )


async def look(context: AdminContext) -> str:
    """The page as it is once it has asked a few times."""
    async with served(context) as address:
        page, complaints = await chromium(f"{address}/ui", "--dump-dom")
    broken = re.findall(r"CONSOLE.*(?:Uncaught|Content Security Policy).*", complaints)
    assert not broken
    return page


async def test_nodes_and_a_request_on_the_way_are_shown() -> None:
    cluster = FakeCluster(prefills=1, decodes=2)
    cluster.decodes[0].fault = InjectedFault(FaultKind.RESET, at=3, times=1)
    await cluster.ask(Endpoint.CHAT, body_for(Endpoint.CHAT, stream=True), name="req-moved")
    cluster.pool.add(Node(HOSTILE, "http://x", Role.PREFILL))
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
    assert "not known 1 serve, 1 more 2 serve ● complete 3 100.0 %" in text_of(page, "cohorts")
    assert "&lt;img src=x onerror=alert(1)&gt;" in nodes
    assert re.search(r"req-here · tiny · /v1/chat/completions · p0 → d\d .*decode 2\.5 s; now: decode", requests)
    assert "req-moved" not in requests
    assert re.search(r"req-moved .*decode d0 reset stream moved on ✓ answered", text_of(page, "failures"))
    assert text_of(page, "ready") == "● ready"
    assert text_of(page, "told").startswith("3 of 4 nodes are up.")
    assert re.search(r"prefill node 1 \d+ 1 ", text_of(page, "hits"))


async def test_the_page_asks_for_the_token() -> None:
    page = await look(context_of(FakeCluster(), token="s3cret"))
    assert re.search(r'<form id="ask">', page)
    assert re.search(r'<main id="content"[^>]* hidden="">', page)
    assert text_of(page, "told") == "This proxy asks for its admin token."


async def test_plans_are_shown_once_there_are_some() -> None:
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
