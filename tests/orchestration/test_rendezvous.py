"""Both legs at once: what goes over the wire, and everything that can go wrong between them."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import pytest

from pdproxy.nodes.node import Node, Role
from pdproxy.observe.labels import Phase
from pdproxy.orchestration.context import MOST_WAITING, SHUT_SECONDS, OrchestrationConfig
from pdproxy.planning.plan import LEAST_LOADED
from pdproxy.request import Endpoint
from pdproxy.settings.types import OnPrefillFailure
from tests.fakes.faults import FaultKind, InjectedFault
from tests.fakes.kv_transfer import FakeKvTransfer
from tests.fakes.node import FakeNode
from tests.fakes.reading import follow
from tests.fakes.waiting import TICKETS_PATH
from tests.orchestration.answers import read_answer
from tests.orchestration.cluster import MODEL, FakeCluster, Got
from tests.orchestration.prompts import WORDS, body_for, right

CHAT, COMPLETIONS, RESPONSES = Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.RESPONSES
STREAM = body_for(CHAT, stream=True)
WHOLE = body_for(CHAT, stream=False)
HANG, RESET = InjectedFault(FaultKind.HANG), InjectedFault(FaultKind.RESET)


def check_right(got: Got) -> None:
    assert got.status == 200
    answer = read_answer(CHAT, got.body)
    assert (answer.texts[0], answer.error, answer.ended) == (right(CHAT), None, True)


def params(node: FakeNode, leg: int = 0) -> Mapping[str, Any]:
    found: Mapping[str, Any] = node.legs()[leg].body["kv_transfer_params"]
    return found


def deliveries(cluster: FakeCluster) -> dict[str, float]:
    outcomes = ("ticket", "none", "failed", "unneeded")
    counts = {outcome: cluster.count("pdproxy_deliveries_total", outcome=outcome) for outcome in outcomes}
    return {outcome: count for outcome, count in counts.items() if count}


async def until_it_waits(cluster: FakeCluster, node: FakeNode) -> None:
    for _ in range(100):
        if node.waiting:
            return
        await asyncio.sleep(0)
    pytest.fail("no decode leg waits")


async def slow_prefill(cluster: FakeCluster) -> asyncio.Event:
    """The first prefill node's answers wait for the event that is returned."""
    go, send = asyncio.Event(), cluster.transport.send

    async def held(request: Any, timeouts: Any) -> Any:
        response = await send(request, timeouts)
        if request.url.startswith("http://p0:") and b"do_remote_decode" in request.body:
            try:
                await go.wait()
            except BaseException:
                await response.aclose()
                raise
        return response

    cluster.transport.send = held  # type: ignore[method-assign]
    return go


WAITS = [
    (endpoint, stream) for endpoint in Endpoint for stream in (False, True) if (endpoint, stream) != (RESPONSES, True)
]


async def test_a_stream_that_begins_before_its_ticket_goes_out_in_turn() -> None:
    """Of responses: events about itself come first, and would look as if the node had not waited."""
    cluster = FakeCluster(prefills=1, decodes=1)
    got = await cluster.ask(RESPONSES, body_for(RESPONSES, stream=True))
    assert got.route == "disaggregated"
    assert params(cluster.decodes[0])["do_remote_prefill"]
    assert (cluster.decodes[0].waiting.deliveries, cluster.fabric.pulled) == ([], 1)
    await cluster.settle()


@pytest.mark.parametrize(("endpoint", "stream"), WAITS)
async def test_the_decode_leg_waits_and_is_brought_its_ticket(endpoint: Endpoint, stream: bool) -> None:
    cluster = FakeCluster(prefills=1, decodes=1)
    got = await cluster.ask(endpoint, body_for(endpoint, stream=stream))
    [decode], [prefill] = cluster.decodes, cluster.prefills
    assert got.route == "disaggregated"
    [(wait_id, ticket)] = decode.waiting.deliveries
    assert params(decode) == {"pdproxy_wait": {"id": wait_id, "seconds": 3600.0}}
    assert ticket is not None
    assert ticket["remote_request_id"] == params(prefill)["pdproxy_hand_over"] != wait_id
    assert "remote_prefill_cached_tokens" not in ticket
    assert (cluster.fabric.pulled, cluster.fabric.released, deliveries(cluster)) == (1, set(), {"ticket": 1})
    await cluster.settle()


async def test_the_prefill_leg_goes_out_first() -> None:
    cluster = FakeCluster(prefills=1, decodes=1)
    sent: list[str] = []
    send = cluster.transport.send

    async def recorded(request: Any, timeouts: Any) -> Any:
        sent.append(request.url.removeprefix("http://"))
        return await send(request, timeouts)

    cluster.transport.send = recorded  # type: ignore[method-assign]
    await cluster.ask(CHAT, WHOLE)
    assert sent == [f"p0:8000{CHAT}", f"d0:8000{CHAT}", f"d0:8000{TICKETS_PATH}"]
    await cluster.settle()


async def test_a_delivery_carries_what_a_leg_carries() -> None:
    cluster = FakeCluster(prefills=1, decodes=1)
    await cluster.ask(CHAT, WHOLE)
    [delivery] = [seen for seen in cluster.decodes[0].seen if seen.path == TICKETS_PATH]
    assert ("authorization", "Bearer k") in delivery.headers
    assert ("x-request-id", "r-1") in delivery.headers


async def test_the_client_gets_nothing_before_the_first_event() -> None:
    cluster = FakeCluster(prefills=1, decodes=1)
    go = await slow_prefill(cluster)
    asking = asyncio.ensure_future(cluster.ask(CHAT, STREAM))
    await until_it_waits(cluster, cluster.decodes[0])
    for _ in range(20):
        await asyncio.sleep(0)
    assert not asking.done()
    assert len(cluster.decodes[0].waiting) == 1
    go.set()
    check_right(await asking)
    await cluster.settle()


@pytest.mark.parametrize("ill", [RESET, HANG, InjectedFault(FaultKind.STATUS, status=500)], ids=str)
async def test_a_prefill_leg_that_fails_leaves_the_decode_leg_waiting(ill: InjectedFault) -> None:
    cluster = FakeCluster()
    cluster.prefills[0].fault = ill
    check_right(await cluster.ask(CHAT, STREAM))
    assert [len(node.legs()) for node in cluster.nodes] == [1, 1, 1, 0]
    assert [len(node.waiting.deliveries) for node in cluster.decodes] == [1, 0]
    assert (cluster.decodes[0].cut, cluster.fabric.pulled) == (0, 1)
    await cluster.settle()


async def test_without_a_prefill_node_the_decode_leg_that_waits_is_told_to_compute() -> None:
    cluster = FakeCluster()
    for node in cluster.prefills:
        node.fault = RESET
    check_right(got := await cluster.ask(CHAT, STREAM))
    assert got.route == "local"
    [(_, ticket)] = cluster.decodes[0].waiting.deliveries
    assert ticket is None
    assert (deliveries(cluster), len(cluster.decodes[0].legs())) == ({"none": 1}, 1)
    assert cluster.count("pdproxy_local_total", reason="prefill_failed") == 1
    await cluster.settle()


async def test_the_last_prefill_node_fails_while_the_decode_node_drains() -> None:
    cluster = FakeCluster(prefills=1, decodes=1)
    go = await slow_prefill(cluster)
    cluster.prefills[0].fault = InjectedFault(FaultKind.RESET, at=0)
    asking = asyncio.ensure_future(cluster.ask(CHAT, STREAM))
    await until_it_waits(cluster, cluster.decodes[0])
    cluster.pool.drain("d0")
    go.set()
    check_right(await asking)
    assert deliveries(cluster) == {"none": 1}
    await cluster.settle()


async def test_a_prefill_error_for_the_client_closes_the_decode_leg() -> None:
    cluster = FakeCluster(config=OrchestrationConfig(on_prefill_failure=OnPrefillFailure.FAIL))
    for node in cluster.prefills:
        node.fault = RESET
    assert (await cluster.ask(CHAT, STREAM)).status == 502
    assert (cluster.decodes[0].cut, deliveries(cluster)) == (1, {})
    await cluster.settle()


async def test_the_decode_legs_own_refusal_does_not_wait_for_the_prefill() -> None:
    cluster = FakeCluster()
    await slow_prefill(cluster)
    cluster.decodes[0].fault = InjectedFault(FaultKind.STATUS, status=400)
    assert (await cluster.ask(CHAT, STREAM)).status == 400
    assert (cluster.prefills[0].cut, len(cluster.fabric.released) + len(cluster.background_tasks)) == (1, 1)
    assert cluster.count("pdproxy_leg_faults_total", leg="decode", fault="client_error") == 1
    assert cluster.count("pdproxy_leg_faults_total", leg="prefill", fault="client_error") == 0
    await cluster.settle()


@pytest.mark.parametrize(
    "ill", [RESET, InjectedFault(FaultKind.STATUS, status=500), InjectedFault(FaultKind.REFUSE)], ids=str
)
async def test_a_decode_leg_that_fails_while_it_waits_does_not_disturb_the_prefill(ill: InjectedFault) -> None:
    cluster = FakeCluster()
    go = await slow_prefill(cluster)
    cluster.decodes[0].fault = ill
    asking = asyncio.ensure_future(cluster.ask(CHAT, STREAM))
    await until_it_waits(cluster, cluster.decodes[1])
    go.set()
    check_right(await asking)
    assert [len(node.legs()) for node in cluster.prefills] == [1, 0]
    assert [len(node.waiting.deliveries) for node in cluster.decodes] == [0, 1]
    assert cluster.count("pdproxy_leg_faults_total", leg="prefill", fault="reset") == 0
    assert {view.node.name: view.active for view in cluster.pool.snapshot().nodes if view.active} == {}
    await cluster.settle()


async def test_a_node_that_cannot_wait_gets_the_request_with_its_ticket() -> None:
    cluster = FakeCluster()
    cluster.pool.admit(Node("d1", cluster.decodes[1].url, Role.DECODE, MODEL))
    go = await slow_prefill(cluster)
    cluster.decodes[0].fault = RESET
    asking = asyncio.ensure_future(cluster.ask(CHAT, STREAM))
    for _ in range(20):
        await asyncio.sleep(0)
    assert cluster.decodes[1].legs() == []
    go.set()
    check_right(await asking)
    assert params(cluster.decodes[1])["do_remote_prefill"]
    assert [len(node.legs()) for node in cluster.prefills] == [1, 0]
    await cluster.settle()


async def test_no_other_decode_node_ends_the_prefill() -> None:
    cluster = FakeCluster(decodes=1)
    await slow_prefill(cluster)
    cluster.decodes[0].fault = RESET
    assert (await cluster.ask(CHAT, STREAM)).status == 502
    assert cluster.prefills[0].cut == 1
    await cluster.settle()


@pytest.mark.parametrize("failing", [Role.PREFILL, Role.DECODE])
async def test_another_cohort_takes_over_both_legs(failing: Role) -> None:
    cluster = FakeCluster(config=OrchestrationConfig(routing_policy=LEAST_LOADED))
    for node, role, cohort in zip(cluster.nodes, "ppdd", "abab", strict=True):
        role_of = Role.PREFILL if role == "p" else Role.DECODE
        cluster.pool.admit(Node(node.name, node.url, role_of, MODEL, cohort=cohort, can_wait=True))
    first = next(iter(cluster.context.tie_breaker)) % 2
    left, other = (1 - first, first)
    (cluster.prefills if failing is Role.PREFILL else cluster.decodes)[left].fault = RESET
    check_right(await cluster.ask(CHAT, STREAM))
    assert [len(cluster.prefills[n].legs()) for n in (left, other)] == [1, 1]
    assert cluster.decodes[left].cut == 1
    assert [len(cluster.decodes[n].waiting.deliveries) for n in (left, other)] == [0, 1]
    await cluster.settle()


DELIVERY = {
    "refused": (InjectedFault(FaultKind.REFUSE), "refused", "d1", True),
    "reset": (RESET, "reset", "d1", True),
    "reset-after-head": (InjectedFault(FaultKind.RESET, at=0), "reset", "d1", True),
    "hang": (HANG, "headers_timeout", "d1", False),
    "stall": (InjectedFault(FaultKind.STALL, at=0), "stall", "d1", False),
    "400": (InjectedFault(FaultKind.STATUS, status=400), "client_error", "d0", False),
    "404": (InjectedFault(FaultKind.STATUS, status=404), "client_error", "d0", False),
    "429": (InjectedFault(FaultKind.STATUS, status=429), "busy", "d1", False),
    "500": (InjectedFault(FaultKind.STATUS, status=500), "server_error", "d1", True),
    "200": (InjectedFault(FaultKind.SHORT, at=0), "invalid_body", "d0", False),
}
"""The fault, its row, which decode node serves then, and whether it counts against the first."""


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("decodes", [1, 2])
@pytest.mark.parametrize("name", DELIVERY)
async def test_a_failed_delivery_sends_the_request_with_its_ticket(name: str, decodes: int, stream: bool) -> None:
    ill, fault, node, blamed = DELIVERY[name]
    cluster = FakeCluster(decodes=decodes)
    cluster.decodes[0].delivery_fault = ill
    got = await cluster.ask(CHAT, STREAM if stream else WHOLE)
    if stream:
        check_right(got)
    served = cluster.decodes[0 if decodes == 1 else int(node[1])]
    leg = served.legs()[-1].body["kv_transfer_params"]
    assert (got.status, leg["do_remote_prefill"], cluster.fabric.pulled) == (200, True, 1)
    assert [len(each.legs()) for each in cluster.prefills] == [1, 0], "no prompt is computed twice"
    assert sum(len(each.legs()) for each in cluster.decodes) == 2
    assert cluster.decodes[0].cut >= 1
    assert cluster.count("pdproxy_leg_faults_total", leg="delivery", fault=fault) == 1
    assert deliveries(cluster) == {"failed": 1}
    counted = blamed and (name == "refused" or decodes > 1)
    assert (cluster.pool.view("d0").reason != "") is counted
    await cluster.settle()


async def test_a_first_event_during_the_delivery_does_not_prove_that_the_ticket_was_read() -> None:
    cluster = FakeCluster(prefills=1, decodes=1)
    delivering, send = asyncio.Event(), cluster.transport.send

    async def slow_delivery(request: Any, timeouts: Any) -> Any:
        if request.url.endswith(TICKETS_PATH):
            delivering.set()
            await asyncio.Event().wait()
        return await send(request, timeouts)

    cluster.transport.send = slow_delivery  # type: ignore[method-assign]
    asked = asyncio.create_task(cluster.orchestrator.answer(cluster.request(CHAT, STREAM)))
    await delivering.wait()
    cluster.decodes[0].waiting.end_all()
    reply = await asked
    assert not isinstance(reply.body, bytes)
    await follow(reply.body, most=1)  # the client leaves before the usage, which would show it
    await cluster.settle()
    assert (len(cluster.fabric.released), cluster.fabric.pulled) == (1, 0)


@pytest.mark.parametrize("retries", [0, 2])
@pytest.mark.parametrize("name", DELIVERY)
async def test_a_delivery_that_there_is_no_ticket_can_fail_too(name: str, retries: int) -> None:
    cluster = FakeCluster(prefills=1, config=OrchestrationConfig(retries=retries))
    cluster.prefills[0].fault = RESET
    cluster.decodes[0].delivery_fault = DELIVERY[name][0]
    check_right(got := await cluster.ask(CHAT, STREAM))
    assert got.route == "local"
    assert [len(node.legs()) for node in cluster.decodes] == [2, 0]
    assert "kv_transfer_params" not in cluster.decodes[0].legs()[-1].body
    await cluster.settle()


async def test_a_node_that_takes_no_deliveries_is_not_made_to_wait_for_a_while() -> None:
    cluster = FakeCluster(prefills=1, decodes=1)
    cluster.decodes[0].delivery_fault = InjectedFault(FaultKind.STATUS, status=404)
    for _ in range(3):
        check_right(await cluster.ask(CHAT, STREAM))
    assert deliveries(cluster) == {"failed": 1}
    cluster.decodes[0].delivery_fault = None
    cluster.clock.advance(SHUT_SECONDS + 1)
    check_right(await cluster.ask(CHAT, STREAM))
    assert deliveries(cluster) == {"failed": 1, "ticket": 1}
    await cluster.settle()


async def test_a_decode_node_that_fails_with_its_ticket_hands_it_on() -> None:
    cluster = FakeCluster()
    cluster.decodes[0].fault = InjectedFault(FaultKind.RESET, at=0)
    check_right(await cluster.ask(CHAT, STREAM))
    assert params(cluster.decodes[1])["do_remote_prefill"]
    assert [len(node.legs()) for node in cluster.prefills] == [1, 0]
    await cluster.settle()


@pytest.mark.parametrize("body", [STREAM, WHOLE], ids=["stream", "whole"])
async def test_an_answer_that_did_not_wait_for_its_ticket_is_good(body: dict[str, Any]) -> None:
    cluster = FakeCluster(prefills=1, decodes=1)
    await slow_prefill(cluster)
    cluster.decodes[0].waiting.most = 0
    got = await cluster.ask(CHAT, body)
    assert (got.status, got.route) == (200, "local")
    assert cluster.prefills[0].cut == 1
    await cluster.settle()
    assert (len(cluster.fabric.released), deliveries(cluster)) == (1, {"unneeded": 1})
    wait_id = params(cluster.decodes[0])["pdproxy_wait"]["id"]
    assert cluster.decodes[0].waiting.deliveries == [(wait_id, None)], "should it wait all the same, it computes"
    assert cluster.count("pdproxy_local_total", reason="undelivered") == 1
    assert cluster.count("pdproxy_recomputed_total") == 0
    assert cluster.count("pdproxy_tokens_total", kind="prompt") > 0


async def test_the_whole_requests_deadline_ends_both_legs() -> None:
    cluster = FakeCluster(config=OrchestrationConfig(prefill_headers=3000.0, retries=10))
    for node in cluster.prefills:
        node.fault = HANG
    got = await cluster.ask(CHAT, STREAM)
    assert got.status == 504
    assert cluster.pool.view("d0").reason == ""
    await cluster.settle()


@pytest.mark.parametrize("at", [-1, 0], ids=["head", "first-event"])
async def test_the_decode_deadline_counts_from_the_delivery(at: int) -> None:
    """The first prefill node hangs for its 600 s; the decode leg's 600 s are not over then."""
    cluster = FakeCluster(config=OrchestrationConfig(prefill_headers=600.0, decode_headers=30.0, ticket_life=100.0))
    cluster.prefills[0].fault = HANG
    cluster.decodes[0].fault = InjectedFault(FaultKind.STALL if at == 0 else FaultKind.HANG, at=at)
    began = cluster.clock.now()
    check_right(await cluster.ask(CHAT, STREAM))
    assert cluster.clock.now() - began == 630.0
    assert params(cluster.decodes[1])["do_remote_prefill"], (
        "the first decode leg had its ticket before its time was over"
    )
    fault = "stall" if at == 0 else "headers_timeout"
    assert cluster.count("pdproxy_leg_faults_total", leg="decode", fault=fault) == 1
    await cluster.settle()


async def test_only_so_many_of_this_proxy_wait_on_a_node() -> None:
    cluster = FakeCluster(prefills=1, decodes=1)
    give_back = cluster.context.waiting_places.take("d0", MOST_WAITING - 1)
    more = [await cluster.ask(COMPLETIONS, body_for(COMPLETIONS, stream=False, n=n)) for n in (2, 1)]
    assert [got.status for got in more] == [200, 200]
    assert ["pdproxy_wait" in leg.body["kv_transfer_params"] for leg in cluster.decodes[0].legs()] == [False, True]
    give_back()
    give_back()
    await cluster.settle()


async def test_each_of_several_prompts_waits_and_choices_share_a_ticket() -> None:
    cluster = FakeCluster(prefills=1, decodes=1)
    body = {**body_for(COMPLETIONS, stream=True, tokens=3, n=2), "prompt": [WORDS, "four five"]}
    assert (await cluster.ask(COMPLETIONS, body)).status == 200
    assert len(cluster.decodes[0].waiting.deliveries) == cluster.fabric.pulled == 2
    await cluster.settle()


async def test_a_continued_stream_waits_too() -> None:
    cluster = FakeCluster()
    cluster.decodes[0].fault = InjectedFault(FaultKind.RESET, at=3)
    check_right(await cluster.ask(CHAT, STREAM))
    assert {"pdproxy_wait", "prompt_token_ids"} == params(cluster.decodes[1]).keys()
    assert deliveries(cluster) == {"ticket": 2}
    await cluster.settle()


async def test_a_delivery_that_overtakes_its_request_is_kept() -> None:
    node = FakeNode("d0", FakeKvTransfer())
    wait_id = "0123456789abcdef"
    node.respond(TICKETS_PATH, b'{"id": "%s", "kv_transfer_params": null}' % wait_id.encode())
    body = b'{"prompt": "a b", "kv_transfer_params": {"pdproxy_wait": {"id": "%s", "seconds": 1}}}' % wait_id.encode()
    script = node.respond("/v1/completions", body)
    assert script.waiting is not None
    assert len((await script.waiting.script(asyncio.sleep)).pieces) == 1
    assert node.fabric.wrong == []


async def test_the_phases_follow_one_another_while_the_legs_overlap(caplog: pytest.LogCaptureFixture) -> None:
    cluster = FakeCluster(prefills=1, decodes=1)
    go = await slow_prefill(cluster)
    with caplog.at_level(logging.INFO, "pdproxy.orchestration.access_log"):
        asking = asyncio.ensure_future(cluster.ask(CHAT, STREAM))
        await until_it_waits(cluster, cluster.decodes[0])
        [ride] = cluster.context.in_flight.newest(1)
        assert (ride.timeline.now, ride.timeline.nodes) == (Phase.PREFILL, {Phase.PREFILL: "p0", Phase.HANDOVER: "d0"})
        cluster.clock.advance(2.0)
        go.set()
        check_right(await asking)
    [line] = [vars(record) for record in caplog.records if record.name == "pdproxy.orchestration.access_log"]
    assert (line["prefill_node"], line["decode_node"], line["prefill_ms"]) == ("p0", "d0", 2000.0)
    assert {"handover_ms", "decode_ms"} <= line.keys()
    await cluster.settle()
