"""The live page and its state, without a browser."""

import asyncio
import re
import time
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from pdproxy import __version__
from pdproxy.admin.app import admin_app
from pdproxy.admin.context import AdminContext
from pdproxy.admin.page import policy
from pdproxy.credential import Secret
from pdproxy.errors import Fault
from pdproxy.failures import Step
from pdproxy.nodes.drain import Drainer
from pdproxy.nodes.node import Node, Role
from pdproxy.observe.labels import Leg, Prediction
from pdproxy.orchestration.in_flight import LegFailure
from pdproxy.orchestration.request_record import FailureRecord
from pdproxy.reasons import RouteReason
from pdproxy.request import Endpoint
from pdproxy.settings.types import OnNoDecode, OnPrefillFailure
from tests.fakes.refused import refuse
from tests.orchestration.cluster import FakeCluster, read
from tests.orchestration.prompts import body_for

CHAT = body_for(Endpoint.CHAT, stream=True)


def client_of(cluster: FakeCluster, token: str = "", **policies: Any) -> httpx.AsyncClient:
    drainer = Drainer(cluster.pool, cluster.clock, cluster.context.background)
    live, clock = cluster.context.in_flight, cluster.clock
    context = AdminContext(
        cluster.pool,
        drainer,
        CollectorRegistry(),
        asyncio.Event(),
        token=Secret(token),
        live=live,
        clock=clock,
        **policies,
    )
    return httpx.AsyncClient(transport=httpx.ASGITransport(admin_app(context)), base_url="http://admin")


async def test_a_request_is_shown_with_where_its_time_goes() -> None:
    cluster = FakeCluster(prefills=1, decodes=1)
    async with client_of(cluster) as client:
        reply = await cluster.orchestrator.answer(cluster.request(Endpoint.CHAT, CHAT))
        cluster.clock.advance(2.5)
        state = (await client.get("/ui/state")).json()
        (shown,) = state["requests"]
        assert (state["ready"], state["on_the_way"]) == ("ready", 1)
        assert (shown["id"], shown["model"], shown["endpoint"]) == ("r-1", "tiny", "/v1/chat/completions")
        assert (shown["prefill"], shown["decode"], shown["phase"]) == ("p0", "d0", "decode")
        assert shown["seconds"] == {"queue": 0, "plan": 0, "prefill": 0, "handover": 0, "decode": 2.5}
        assert [(node["name"], node["state"], node["active"]) for node in state["nodes"]] == [
            ("p0", "up", 0),
            ("d0", "up", 1),
        ]
        await read(reply)
        after = (await client.get("/ui/state")).json()
    assert (after["on_the_way"], after["requests"]) == (0, [])
    assert {of["way"]: of["prompts"] for of in after["hits"]} == {"disaggregated": 1, "local": 0, "recomputed": 0}
    await cluster.settle()


async def test_plans_by_what_is_cached_are_shown_against_what_was() -> None:
    cluster = FakeCluster(prefills=1, decodes=1)
    live = cluster.context.in_flight
    live.plans[RouteReason.CACHED] += 3
    live.planned_hits[Role.PREFILL].add(1000, 800, 700, Prediction.RIGHT)
    live.planned_hits[Role.PREFILL].add(1000, 800, 0, Prediction.LESS)
    async with client_of(cluster) as client:
        state = (await client.get("/ui/state")).json()
    assert state["planned_hits"] == [
        {"role": "prefill", "prompts": 2, "prompt_tokens": 2000, "planned": 1600, "real": 700, "wrong": 1},
        {"role": "decode", "prompts": 0, "prompt_tokens": 0, "planned": 0, "real": 0, "wrong": 0},
    ]
    assert state["plans"] == {reason.value: 3 * (reason is RouteReason.CACHED) for reason in RouteReason}


async def test_of_very_many_requests_the_newest_are_shown() -> None:
    cluster = FakeCluster(prefills=1, decodes=1)
    replies = [
        await cluster.orchestrator.answer(cluster.request(Endpoint.CHAT, CHAT, name=f"r-{n}")) for n in range(60)
    ]
    async with client_of(cluster) as client:
        state = (await client.get("/ui/state")).json()
    assert state["on_the_way"] == 60
    assert [shown["id"] for shown in state["requests"]] == [f"r-{n}" for n in range(59, 9, -1)]
    for reply in replies:
        await read(reply)
    await cluster.settle()


async def test_a_failure_is_shown_with_its_consequence() -> None:
    cluster = FakeCluster(prefills=1, decodes=1)
    failure = LegFailure(cluster.clock.now(), "r-7", Leg.DECODE, "d0", Fault.STALL, Step.MIGRATE, FailureRecord())
    cluster.context.in_flight.failed(failure)
    cluster.clock.advance(3)
    async with client_of(cluster) as client:
        (shown,) = (await client.get("/ui/state")).json()["failures"]
    assert shown == {
        "ago": 3.0, "id": "r-7", "leg": "decode", "node": "d0", "fault": "stall", "step": "migrate",
        "outcome": "on_the_way",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "first", "last"),
    [
        ({}, "d0", "d1"),
        ({"on_no_decode": OnNoDecode.PREFILL}, "d0 d1", "p0"),
        ({"on_prefill_failure": OnPrefillFailure.FAIL}, "d0", "p0"),
    ],
)
async def test_nobody_is_served_since_the_last_node_went(policy: dict[str, Any], first: str, last: str) -> None:
    cluster = FakeCluster(prefills=1, decodes=2)
    async with client_of(cluster, **policy) as client:
        for names, then in ((first, 22.0), (last, 38.0)):
            for name in names.split():
                cluster.pool.give_up(name, "health: gone")
            cluster.clock.advance(then)
        cluster.pool.add(Node("d9", "http://d9", (Role.DECODE,)))
        cluster.clock.advance(2.0)
        state = (await client.get("/ui/state")).json()
    assert state["ready"] not in ("ready", "degraded")
    assert state["incident"]["since"] == 40.0


@pytest.mark.parametrize(
    ("policy", "dead", "loss"),
    [
        ({"on_no_decode": OnNoDecode.PREFILL}, "d0", "Served, slower: prefill nodes serve whole requests."),
        (
            {"on_prefill_failure": OnPrefillFailure.FAIL},
            "p0",
            "New requests get a 503: no prefill node serves, and policy.on_prefill_failure is fail.",
        ),
    ],
)
async def test_what_clients_lose_depends_on_the_policies(policy: dict[str, Any], dead: str, loss: str) -> None:
    cluster = FakeCluster(prefills=1, decodes=1)
    refuse(cluster.pool, dead)
    async with client_of(cluster, **policy) as client:
        state = (await client.get("/ui/state")).json()
    assert (state["incident"]["loss"], state["incident"]["nodes"]) == (loss, [dead])
    assert state["version"] == __version__
    assert state["at"] == pytest.approx(time.time(), abs=60)
    assert state["incident"]["next"]["docs"].startswith("https://")


async def test_with_a_token_the_page_is_empty_and_the_state_is_the_operators_alone() -> None:
    async with client_of(FakeCluster(), token="s3cret") as client:
        assert (await client.get("/ui")).status_code == 200
        assert (await client.get("/ui/state")).status_code == 401
        assert (await client.get("/ui/state", headers={"authorization": "Bearer s3cret"})).status_code == 200


async def test_the_page_takes_nothing_from_elsewhere() -> None:
    async with client_of(FakeCluster()) as client:
        page = await client.get("/ui")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"] == policy(page.text)
    assert "unsafe" not in page.headers["content-security-policy"]
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.search(r"https?://|\son\w+=|\sstyle=|innerHTML|insertAdjacentHTML|document\.write", page.text)
    assert not re.search(r"(src|href)=(?!\"(data:,|#content|/metrics)\")", page.text)
