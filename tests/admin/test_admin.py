"""The operator's HTTP application."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client import CollectorRegistry

from pdproxy.admin.app import admin_app
from pdproxy.admin.context import AdminContext, Readiness, readiness
from pdproxy.background import Background
from pdproxy.credential import Secret
from pdproxy.errors import Fault
from pdproxy.nodes.cache_advice import EventsSeen
from pdproxy.nodes.drain import Drainer
from pdproxy.nodes.node import Bars, Binding, Capacity, Footprint, Node, Role, State
from pdproxy.nodes.outlier import FailureEvidence, LegOrigin
from pdproxy.nodes.pool import Pool
from pdproxy.nodes.pool_entry import LegLoad
from pdproxy.observe.labels import Leg
from pdproxy.observe.metrics import Metrics
from pdproxy.orchestration.context import OrchestrationConfig, OrchestrationContext
from pdproxy.orchestration.keeping import Keeping
from pdproxy.orchestration.request_queue import QueueStatus
from pdproxy.planning.conversations import Conversations
from pdproxy.planning.prefix import Place
from pdproxy.planning.shares import LimitsByKey
from pdproxy.settings.types import Keep, OnNoDecode, OnPrefillFailure
from tests.fakes.clock import FakeClock
from tests.fakes.memory_transport import MemoryTransport
from tests.nodes.fake_pool import until
from tests.nodes.test_cache_advice import HYBRID, WITHOUT_UNIT

PREFILL = Node("p1", "http://p1", (Role.PREFILL,), "tiny")
DECODE = Node("d1", "http://d1", (Role.DECODE,), "tiny")
NEW = {"url": "http://127.0.0.1:9/", "role": "decode"}


def make_context(token: str = "", on_prefill_failure: OnPrefillFailure = OnPrefillFailure.RETRY) -> AdminContext:
    clock, registry = FakeClock(), CollectorRegistry()
    pool = Pool(clock, metrics=Metrics(registry))
    return AdminContext(
        pool, Drainer(pool, clock, Background(clock)), registry, asyncio.Event(), on_prefill_failure, 30, Secret(token)
    )


def client_of(context: AdminContext) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(admin_app(context)), base_url="http://admin")


def serve(context: AdminContext, *nodes: Node) -> None:
    for node in nodes:
        context.pool.add(node)
        context.pool.bring_up(node)


@pytest.fixture
async def context() -> AsyncIterator[AdminContext]:
    made = make_context()
    yield made
    await made.drainer.background.aclose()


@pytest.fixture
async def client(context: AdminContext) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(context) as made:
        yield made


async def test_health_needs_no_nodes(client: httpx.AsyncClient) -> None:
    assert (await client.get("/health")).json() == {"status": "ok"}


async def test_prometheus_finds_every_node_on_whichever_host(client: httpx.AsyncClient, context: AdminContext) -> None:
    """Nodes that do not serve, too: that they are down is what it should see."""
    serve(context, Node("prefill-0", "http://10.0.0.1:8100", (Role.PREFILL,), "tiny"))
    context.pool.add(Node("decode-0", "https://[fd00::2]:8200/behind/", (Role.DECODE,), "tiny"))
    assert (await client.get("/prometheus/targets")).json() == [
        {
            "targets": ["10.0.0.1:8100"],
            "labels": {"role": "prefill", "node": "prefill-0", "__scheme__": "http", "__metrics_path__": "/metrics"},
        },
        {
            "targets": ["[fd00::2]:8200"],
            "labels": {
                "role": "decode",
                "node": "decode-0",
                "__scheme__": "https",
                "__metrics_path__": "/behind/metrics",
            },
        },
    ]


async def test_ready_needs_a_decode_node(client: httpx.AsyncClient, context: AdminContext) -> None:
    assert (await client.get("/ready")).status_code == 503
    serve(context, PREFILL)
    assert (await client.get("/ready")).json() == {"status": "no decode node serves"}
    serve(context, DECODE)
    assert (await client.get("/ready")).status_code == 200


async def test_ready_is_degraded_while_nothing_is_handed_over(client: httpx.AsyncClient, context: AdminContext) -> None:
    """Requests are served all the same."""
    serve(context, PREFILL)
    serve(context, DECODE)
    assert (await client.get("/ready")).json() == {"status": "ready"}
    why = f"{DECODE.name} cannot reach {PREFILL.name} at 127.0.0.1:5600: set NODE_ADDRESS"
    context.pool.bar(Bars({(PREFILL.name, DECODE.name): why}))
    answer = await client.get("/ready")
    assert (answer.status_code, answer.json()) == (200, {"status": "degraded"})
    state = (await client.get("/ui/state")).json()
    assert state["ready"] == "degraded"
    assert state["incident"]["hand_overs"].startswith(
        f"hand-overs fail: decode nodes compute the prompts themselves; {why}"
    )
    assert state["incident"]["cause"] == "hand_overs"


async def test_ready_is_degraded_while_no_prefill_node_serves(client: httpx.AsyncClient, context: AdminContext) -> None:
    """The page says the same; where none is known, there is nothing to hand over."""
    serve(context, DECODE)
    assert (await client.get("/ready")).json() == {"status": "ready"}
    serve(context, PREFILL)
    assert (await client.get("/ready")).json() == {"status": "ready"}
    context.pool.give_up(PREFILL.name, "health: refused")
    answer = await client.get("/ready")
    assert (answer.status_code, answer.json()) == (200, {"status": "degraded"})
    told = (await client.get("/ui/state")).json()["incident"]["hand_overs"]
    assert told.startswith("nothing is handed over: no prefill node serves.")


async def test_ready_is_degraded_while_prefill_nodes_decode(context: AdminContext) -> None:
    last_resort = dataclasses.replace(context, on_no_decode=OnNoDecode.PREFILL)
    serve(context, PREFILL, DECODE)
    context.pool.give_up(DECODE.name, "health: refused")
    assert readiness(last_resort) is Readiness.DEGRADED
    assert readiness(context) is Readiness.NO_DECODE


async def test_a_node_that_is_up_has_no_reason(client: httpx.AsyncClient, context: AdminContext) -> None:
    serve(context, DECODE)
    origin = LegOrigin("r-1")
    context.pool.leg_failed(DECODE.name, Leg.DECODE, Fault.RESET, origin, FailureEvidence.SERVED)
    assert (await client.get("/nodes/d1")).json()["reason"] == ""
    context.pool.give_up(DECODE.name, "health: refused")
    assert (await client.get("/nodes/d1")).json()["reason"] == "health: refused"


async def test_ready_with_a_prefill_node_alone_where_it_is_the_last_resort(context: AdminContext) -> None:
    last_resort = dataclasses.replace(context, on_no_decode=OnNoDecode.PREFILL)
    assert readiness(last_resort) is Readiness.NO_DECODE
    serve(context, PREFILL)
    assert readiness(last_resort) is Readiness.READY


async def test_ready_needs_a_prefill_node_where_the_policy_is_fail() -> None:
    context = make_context(on_prefill_failure=OnPrefillFailure.FAIL)
    async with client_of(context) as client:
        serve(context, DECODE)
        assert (await client.get("/ready")).status_code == 503
        serve(context, PREFILL)
        assert (await client.get("/ready")).status_code == 200


async def test_not_ready_when_shutting_down(client: httpx.AsyncClient, context: AdminContext) -> None:
    serve(context, DECODE)
    context.leaving.set()
    assert (await client.get("/ready")).status_code == 503
    assert (await client.get("/health")).status_code == 200


async def test_metrics_are_shown_in_the_form_asked_for(client: httpx.AsyncClient, context: AdminContext) -> None:
    serve(context, DECODE)
    plain = await client.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain")
    assert 'pdproxy_node_up{node="d1",role="decode",state="up"} 1.0' in plain.text
    open_metrics = await client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert open_metrics.text.endswith("# EOF\n")


async def test_nodes_are_listed_with_what_runs_on_them(client: httpx.AsyncClient, context: AdminContext) -> None:
    serve(context, DECODE)
    with context.pool.acquire("d1"):
        (listed,) = (await client.get("/nodes")).json()["nodes"]
    assert (listed["name"], listed["state"], listed["active"], listed["model"]) == ("d1", "up", 1, "tiny")
    assert (await client.get("/nodes/d1")).json()["name"] == "d1"


async def test_a_node_is_listed_with_what_its_cache_holds(client: httpx.AsyncClient, context: AdminContext) -> None:
    serve(context, PREFILL, dataclasses.replace(DECODE, capacity=Capacity(4096, None, 2, Binding.ATTENTION)))
    assert (await client.get("/nodes/p1")).json()["capacity"] is None
    told = {"tokens": 4096, "sequences": None, "longest": 2, "binding": "attention"}
    assert (await client.get("/nodes/d1")).json()["capacity"] == told


async def test_a_node_is_listed_with_what_makes_hits_rare() -> None:
    context = dataclasses.replace(make_context(), events=lambda name: EventsSeen.OFF)
    serve(context, HYBRID, dataclasses.replace(WITHOUT_UNIT, name="p2"))
    async with client_of(context) as client:
        listed = {node["name"]: node["prefix_cache"] for node in (await client.get("/nodes")).json()["nodes"]}
        assert (await client.get("/nodes/p2")).json()["prefix_cache"] == listed["p2"]
    assert listed["p1"]["facts"][1] == "the shortest prompt whose next turn has a hit: 17 tokens"
    assert [len(listed[name]["advice"]) for name in ("p1", "p2")] == [1, 2]
    assert "publishes no KV events" in listed["p1"]["advice"][0]


async def test_nodes_are_listed_with_what_is_taken_of_them_and_with_what_waits(context: AdminContext) -> None:
    serve(context, PREFILL, DECODE)
    waits = QueueStatus(3, 7, {"alice": 7}, {"tiny": 7}, 12.5)
    async with client_of(dataclasses.replace(context, queue=lambda: waits)) as client:
        with context.pool.acquire("d1", LegLoad(footprint=Footprint(700, 2))):
            listed = (await client.get("/nodes")).json()
    assert [node["footprint"] for node in listed["nodes"]] == [
        {"tokens": 0, "sequences": 0},
        {"tokens": 700, "sequences": 2},
    ]
    assert listed["queue"] == {
        "running": 3, "waiting": 7, "by_key": {"alice": 7}, "by_model": {"tiny": 7}, "seconds": 12.5
    }  # fmt: skip


async def test_a_node_is_listed_with_its_fingerprint_and_with_whom_it_exchanges_no_tickets(
    client: httpx.AsyncClient, context: AdminContext
) -> None:
    parts = {"checkpoint": "c1", "all": "feed"}
    serve(context, PREFILL, dataclasses.replace(DECODE, cohort="0.32.0+0.1.0+feed", fingerprint=parts))
    context.pool.bar(Bars({("p1", "d1"): "far apart"}, {"d1": "far apart"}))
    listed = {node["name"]: node for node in (await client.get("/nodes")).json()["nodes"]}
    assert (listed["d1"]["cohort"], listed["d1"]["fingerprint"]) == ("0.32.0+0.1.0+feed", parts)
    assert listed["d1"]["barred"] == ["no tickets with any node: far apart", "no tickets with p1: far apart"]
    assert listed["p1"]["barred"] == ["no tickets with d1: far apart"]
    shown = {node["name"]: node["barred"] for node in (await client.get("/ui/state")).json()["nodes"]}
    assert shown["p1"] == listed["p1"]["barred"]


async def test_an_upgrade_is_shown_by_cohort(client: httpx.AsyncClient, context: AdminContext) -> None:
    serve(context, *(dataclasses.replace(node, cohort="old") for node in (PREFILL, DECODE)))
    serve(context, Node("d2", "http://d2", (Role.DECODE,), "tiny", cohort="new"))
    context.pool.acquire("d2", LegLoad(footprint=Footprint(1, 1))).release()
    shown = (await client.get("/nodes")).json()["cohorts"]
    assert shown == (await client.get("/ui/state")).json()["cohorts"]
    assert [(each["name"], each["complete"], each["share"]) for each in shown] == [("old", True, 0), ("new", False, 1)]
    assert shown[0]["decode"] == {"serving": 1, "terminating": 0, "others": 0}


async def test_a_node_asks_without_a_token_whether_it_may_go() -> None:
    context = make_context(token="word")
    serve(context, Node("d1", "http://10.0.0.7:8000", (Role.DECODE,), "tiny"))
    async with client_of(context) as client:
        said = await client.get("/may-leave", params={"host": "10.0.0.7", "port": 8000})
        assert said.json() == {"leave": True, "why": "no node that could follow it is on its way"}
        context.pool.add(Node("d2", "http://10.0.0.8:8000", (Role.DECODE,)))
        said = await client.get("/may-leave", params={"host": "10.0.0.7", "port": 8000})
        assert said.json() == {"leave": False, "why": "the nodes that follow it make no pair yet: d2 (joining)"}
        for wrong in ("host=x", "host=x&port=0", "port=8000"):
            assert (await client.get(f"/may-leave?{wrong}")).status_code == 400
    await context.drainer.background.aclose()


async def test_a_node_is_added_and_joins(client: httpx.AsyncClient, context: AdminContext) -> None:
    answer = await client.post("/nodes", json=NEW)
    assert answer.status_code == 201
    assert (answer.json()["name"], answer.json()["state"]) == ("127.0.0.1:9", "joining")
    assert context.pool.view("127.0.0.1:9").node.url == "http://127.0.0.1:9"
    assert (await client.post("/nodes", json=NEW)).status_code == 409


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"url": "ftp://x"}, "url"),
        ({"url": "http://user:pass@x"}, "url"),
        ({"url": "http://x/v1"}, "url"),
        ({"url": "http://x:99999"}, "url"),
        ({"url": "http://"}, "url"),
        ({"url": "http://x:0"}, "url"),
        ({"url": "http://a b"}, "url"),
        ({"url": "http://x\r\ny"}, "url"),
        ({"url": "http://[::1"}, "url"),
        ({"roles": ["both"]}, "roles"),
        ({"weight": 0}, "weight"),
        ({"name": "a b"}, "name"),
        ({"colour": "red"}, "colour"),
    ],
)
async def test_an_unusable_node_is_refused_by_its_field(
    client: httpx.AsyncClient, context: AdminContext, change: dict[str, object], param: str
) -> None:
    answer = await client.post("/nodes", json={**NEW, **change})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert context.pool.state().nodes == ()


async def test_a_node_is_drained_and_rejoins(client: httpx.AsyncClient, context: AdminContext) -> None:
    serve(context, DECODE)
    answer = await client.post("/nodes/d1/drain?seconds=10")
    assert (answer.status_code, answer.json()["state"]) == (202, "draining")
    assert (await client.post("/nodes/d1/rejoin")).json()["state"] == "joining"


async def test_a_node_forgets_the_conversations_that_it_keeps(context: AdminContext) -> None:
    clock, metrics, place = FakeClock(), Metrics(CollectorRegistry()), Place("p1")
    book = Conversations(Keep.AUTO, lambda: "a-conversation-id", LimitsByKey(), 3600.0)
    book.keep(book.turn("", [1], 0.0, named=True), place, 100, 0.0)
    keeping = Keeping(book, clock, metrics.keeps, None)
    planning = OrchestrationContext(
        MemoryTransport([], clock), context.pool, metrics, clock, OrchestrationConfig(), keeping=keeping
    )
    serve(context, PREFILL, DECODE)
    async with client_of(dataclasses.replace(context, orchestration=planning)) as client:
        for node, forgotten in (("d1", 0), ("p1", 1), ("p1", 0)):
            answer = await client.post(f"/nodes/{node}/forget")
            assert (answer.status_code, answer.json()) == (202, {"forgotten": forgotten})
    assert book.to_forget(place) == ["a-conversation-id"]


async def test_where_no_node_is_to_keep_anything_there_is_nothing_to_forget(
    client: httpx.AsyncClient, context: AdminContext
) -> None:
    serve(context, PREFILL)
    assert (await client.post("/nodes/p1/forget")).json() == {"forgotten": 0}


async def test_a_node_is_removed_when_its_requests_ended(client: httpx.AsyncClient, context: AdminContext) -> None:
    serve(context, DECODE)
    leg = context.pool.acquire("d1")
    assert (await client.delete("/nodes/d1")).status_code == 202
    assert context.pool.view("d1").state is State.DRAINING
    leg.release()
    await until(lambda: not context.pool.state().nodes)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/nodes/x"),
        ("DELETE", "/nodes/x"),
        ("POST", "/nodes/x/drain"),
        ("POST", "/nodes/x/rejoin"),
        ("POST", "/nodes/x/forget"),
    ],
)
async def test_an_unknown_node_is_a_404(client: httpx.AsyncClient, method: str, path: str) -> None:
    answer = await client.request(method, path)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "node_not_found"


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf", "x"])
async def test_a_drain_needs_a_usable_deadline(client: httpx.AsyncClient, context: AdminContext, seconds: str) -> None:
    serve(context, DECODE)
    assert (await client.post(f"/nodes/d1/drain?seconds={seconds}")).status_code == 400
    assert context.pool.view("d1").state is State.UP


async def test_with_a_token_nodes_are_the_operators_alone() -> None:
    async with client_of(make_context(token="s3cret")) as client:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic s3cret"}):
            refused = await client.get("/nodes", headers=headers)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
        assert (await client.get("/nodes", headers={"authorization": "bearer s3cret"})).status_code == 200
        assert (await client.get("/health")).status_code == 200


async def test_a_plan_is_explained_to_the_operator_alone(context: AdminContext) -> None:
    transport = MemoryTransport([], FakeClock())
    planning = OrchestrationContext(
        transport, context.pool, Metrics(CollectorRegistry()), FakeClock(), OrchestrationConfig()
    )
    serve(context, PREFILL, DECODE)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    async with client_of(dataclasses.replace(context, orchestration=planning, token=Secret("t"))) as client:
        assert (await client.post("/debug/plan", json=body)).status_code == 401
        client.headers["authorization"] = "Bearer t"
        shown = (await client.post("/debug/plan", json=body)).json()
        assert (shown["prefill"]["node"], shown["decode"]["node"]) == ("p1", "d1")
        assert [each["node"] for each in shown["candidates"]["decode"]] == ["d1"]
        for path, wrong, status in (
            ("/debug/plan", {**body, "model": "huge"}, 404),
            ("/debug/plan?endpoint=/v2", body, 400),
            ("/debug/plan?endpoint=/v1/completions", {"model": 7}, 400),
        ):
            assert (await client.post(path, json=wrong)).status_code == status
        context.pool.drain("d1")
        assert (await client.post("/debug/plan", json=body)).status_code == 503


async def test_without_a_planner_no_plan_is_explained(client: httpx.AsyncClient) -> None:
    assert (await client.post("/debug/plan", json={})).status_code == 404


async def test_roles_of_a_node_are_changed_while_it_serves(client: httpx.AsyncClient, context: AdminContext) -> None:
    serve(context, dataclasses.replace(DECODE, roles=tuple(Role)))
    changed = await client.patch("/nodes/d1", json={"roles": ["decode"]})
    assert (changed.status_code, changed.json()["roles"], changed.json()["state"]) == (202, ["decode"], "up")
    wrong = await client.patch("/nodes/d1", json={"roles": []})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "roles")
    assert (await client.patch("/nodes/nobody", json={"roles": ["decode"]})).status_code == 404


async def test_one_server_is_one_node(client: httpx.AsyncClient, context: AdminContext) -> None:
    serve(context, DECODE)
    again = await client.post("/nodes", json={"url": DECODE.url, "role": "prefill", "name": "other"})
    assert (again.status_code, "d1" in again.text) == (409, True)


async def test_a_node_without_roles_does_both(client: httpx.AsyncClient) -> None:
    made = await client.post("/nodes", json={"url": "http://127.0.0.1:9"})
    assert made.json()["roles"] == ["prefill", "decode"]


async def test_a_node_is_scraped_once_for_each_role(client: httpx.AsyncClient, context: AdminContext) -> None:
    serve(context, dataclasses.replace(DECODE, roles=tuple(Role)))
    found = (await client.get("/prometheus/targets")).json()
    assert [target["labels"]["role"] for target in found] == ["prefill", "decode"]
