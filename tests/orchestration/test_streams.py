"""Streams besides faults: drains, deadlines, sampling, errors that are the client's own."""

import asyncio
import dataclasses
from typing import Any

import pytest

from pdproxy.errors import ClientError, Fault, NodeFault
from pdproxy.orchestration.context import OrchestrationConfig
from pdproxy.request import Endpoint
from pdproxy.response import ProxyResponse, ResponseStream
from pdproxy.transport.port import HttpRequest, HttpResponse, Timeouts
from tests.fakes.faults import FaultKind, InjectedFault
from tests.fakes.reading import pieces_of
from tests.orchestration.answers import read_answer
from tests.orchestration.cluster import FakeCluster
from tests.orchestration.prompts import body_for, right

CHAT, COMPLETIONS = Endpoint.CHAT, Endpoint.COMPLETIONS


async def _begin(cluster: FakeCluster, endpoint: Endpoint, **more: Any) -> ProxyResponse:
    return await cluster.orchestrator.answer(cluster.request(endpoint, body_for(endpoint, stream=True, **more)))


async def _pieces(reply: ProxyResponse, count: int) -> bytes:
    return b"".join([await stream_of(reply).read() for _ in range(count)])


def stream_of(reply: ProxyResponse) -> ResponseStream:
    """The stream of a reply that is one."""
    assert not isinstance(reply.body, bytes)
    return reply.body


async def _rest(reply: ProxyResponse) -> bytes:
    return b"".join([piece async for piece in pieces_of(stream_of(reply))])


async def test_a_stream_moves_when_its_node_leaves() -> None:
    cluster = FakeCluster()
    reply = await _begin(cluster, CHAT)
    seen = await _pieces(reply, 3)
    cluster.pool.leaving("d0").set()
    answer = read_answer(CHAT, seen + await _rest(reply))
    assert (answer.texts[0], answer.roles, len(answer.ids)) == (right(CHAT), 1, 1)
    assert len(cluster.decodes[1].legs()) == 1
    assert cluster.count("pdproxy_migrations_total", outcome="done") == 1
    assert cluster.pool.view("d0").reason == "", "leaving is no fault"
    await cluster.settle()


@pytest.mark.parametrize(("cohorts", "then"), [(("old", "new", "old"), 2), (("old", "new", "new"), 1)])
async def test_a_stream_stays_in_its_cohort_while_that_has_a_node(cohorts: tuple[str, ...], then: int) -> None:
    """During an upgrade the nodes of another cohort may have other weights."""
    cluster = FakeCluster(decodes=3)
    nodes = [dataclasses.replace(cluster.pool.view(f"d{place}").node, cohort=cohorts[place]) for place in range(3)]
    cluster.pool.bring_up(nodes[0])
    for node in nodes[1:]:
        cluster.pool.drain(node.name)
    reply = await _begin(cluster, CHAT)
    seen = await _pieces(reply, 3)
    for node in nodes[1:]:
        cluster.pool.rejoin(node.name)
        cluster.pool.bring_up(node)
    cluster.pool.leaving("d0").set()
    assert read_answer(CHAT, seen + await _rest(reply)).texts[0] == right(CHAT)
    assert [bool(fake.legs()) for fake in cluster.decodes][1:] == [then == 1, then == 2]
    await cluster.settle()


async def test_a_stream_moves_when_its_node_leaves_while_pieces_are_handed_on() -> None:
    cluster = FakeCluster()
    reply = await _begin(cluster, CHAT, tokens=20)
    seen = [await _pieces(reply, 2)]

    def sink(piece: bytes) -> bool:
        seen.append(piece)
        if len(seen) == 4:
            cluster.pool.leaving("d0").set()
        return True

    assert not isinstance(reply.body, bytes)
    await reply.body.pipe_to(sink)
    assert len(seen) == 4, "the next piece asks for a decision"
    answer = read_answer(CHAT, b"".join(seen) + await _rest(reply))
    assert (answer.texts[0], answer.roles, answer.ended) == (right(CHAT, 20), 1, True)
    assert len(cluster.decodes[1].legs()) == 1
    await cluster.settle()


async def test_a_stream_that_cannot_move_stays_on_a_leaving_node() -> None:
    cluster = FakeCluster(journaling=0)
    reply = await _begin(cluster, COMPLETIONS)
    seen = await _pieces(reply, 2)
    cluster.pool.leaving("d0").set()
    answer = read_answer(COMPLETIONS, seen + await _rest(reply))
    assert (answer.texts[0], answer.error) == (right(COMPLETIONS), None)
    assert cluster.decodes[1].legs() == []
    await cluster.settle()


async def test_a_stream_with_nowhere_to_go_stays() -> None:
    cluster = FakeCluster(decodes=1)
    reply = await _begin(cluster, CHAT)
    cluster.pool.leaving("d0").set()
    assert read_answer(CHAT, await _rest(reply)).texts[0] == right(CHAT)
    await cluster.settle()


async def test_a_node_that_is_removed_loses_its_streams_to_others() -> None:
    cluster = FakeCluster()
    reply = await _begin(cluster, CHAT)
    cluster.pool.remove("d0")
    assert read_answer(CHAT, await _rest(reply)).texts[0] == right(CHAT)
    assert len(cluster.decodes[1].legs()) == 1
    await cluster.settle()


async def test_the_deadline_ends_a_stream_with_an_error_event() -> None:
    cluster = FakeCluster()
    reply = await _begin(cluster, CHAT)
    cluster.clock.advance(3600)
    answer = read_answer(CHAT, await _rest(reply))
    assert answer.error is not None
    assert (answer.error["code"], answer.ended) == ("deadline", True)
    await cluster.settle()


@pytest.mark.parametrize("endpoint", Endpoint)
async def test_the_deadline_ends_a_stream_that_stands_still(endpoint: Endpoint) -> None:
    cluster = FakeCluster()
    cluster.decodes[0].fault = InjectedFault(FaultKind.STALL, at=3)
    reply = await _begin(cluster, endpoint)
    cluster.clock.advance(3590)
    began = cluster.clock.now()
    answer = read_answer(endpoint, await _rest(reply))
    assert answer.error is not None
    assert "deadline" in str(answer.error)
    assert answer.ended
    assert cluster.clock.now() - began == pytest.approx(10)
    assert cluster.pool.view("d0").reason == "", "our own deadline is no fault of a node"
    assert cluster.decodes[1].legs() == []
    await cluster.settle()


async def test_the_deadline_bounds_every_leg() -> None:
    cluster = FakeCluster(config=OrchestrationConfig(prefill_headers=10_000, decode_headers=10_000))
    cluster.prefills[0].fault = cluster.prefills[1].fault = InjectedFault(FaultKind.HANG)
    began = cluster.clock.now()
    got = await cluster.ask(CHAT, body_for(CHAT, stream=False))
    assert (got.status, got.json()["error"]["code"]) == (504, "deadline")
    assert cluster.clock.now() - began == pytest.approx(3600)
    assert cluster.pool.view("p0").reason == "", "our own deadline is no fault of a node"
    await cluster.settle()


@pytest.mark.parametrize("kind", [FaultKind.RESET, FaultKind.STALL, FaultKind.ERROR_EVENT, FaultKind.GARBAGE])
@pytest.mark.parametrize("endpoint", Endpoint)
async def test_nothing_that_follows_a_streams_end_matters(endpoint: Endpoint, kind: FaultKind) -> None:
    cluster = FakeCluster()
    cluster.decodes[0].fault = InjectedFault(kind, at=100)
    answer = read_answer(endpoint, (await cluster.ask(endpoint, body_for(endpoint, stream=True))).body)
    assert (answer.texts[0], answer.error, answer.ended) == (right(endpoint), None, True)
    assert cluster.count("pdproxy_requests_total", endpoint=endpoint, outcome="ok") == 1
    assert cluster.decodes[1].legs() == []
    await cluster.settle()


async def test_migration_can_be_turned_off() -> None:
    cluster = FakeCluster(config=OrchestrationConfig(migrations=0))
    cluster.decodes[0].fault = InjectedFault(FaultKind.RESET, at=3)
    answer = read_answer(CHAT, (await cluster.ask(CHAT, body_for(CHAT, stream=True))).body)
    assert answer.error is not None
    assert cluster.decodes[1].legs() == []
    assert cluster.count("pdproxy_steps_total", leg="decode", fault="reset", step="error_event") == 1
    await cluster.settle()


async def test_without_another_node_the_stream_ends_in_an_error_event() -> None:
    cluster = FakeCluster(decodes=1)
    cluster.decodes[0].fault = InjectedFault(FaultKind.RESET, at=3, times=1)
    answer = read_answer(CHAT, (await cluster.ask(CHAT, body_for(CHAT, stream=True))).body)
    assert answer.error is not None
    assert right(CHAT).startswith(answer.texts[0])
    assert cluster.count("pdproxy_migrations_total", outcome="failed") == 1
    await cluster.settle()


async def test_a_sampled_stream_is_continued_from_what_the_client_has() -> None:
    cluster = FakeCluster()
    cluster.decodes[0].fault = InjectedFault(FaultKind.RESET, at=4)
    body = body_for(COMPLETIONS, stream=True)
    del body["temperature"]
    answer = read_answer(COMPLETIONS, (await cluster.ask(COMPLETIONS, body)).body)
    assert (answer.texts[0], answer.error) == (right(COMPLETIONS), None)
    await cluster.settle()


async def test_an_error_event_with_a_4xx_is_the_clients_own() -> None:
    cluster = FakeCluster()
    cluster.decodes[0].fault = InjectedFault(FaultKind.ERROR_EVENT, at=0, status=400)
    got = await cluster.ask(CHAT, body_for(CHAT, stream=True))
    assert (got.status, got.json()["error"]["code"]) == (400, 400)
    assert cluster.decodes[1].legs() == []
    await cluster.settle()


async def test_a_4xx_in_the_middle_is_passed_on_and_ends_the_stream() -> None:
    cluster = FakeCluster()
    cluster.decodes[0].fault = InjectedFault(FaultKind.ERROR_EVENT, at=3, status=400)
    answer = read_answer(CHAT, (await cluster.ask(CHAT, body_for(CHAT, stream=True))).body)
    assert answer.error is not None
    assert (answer.error["code"], answer.ended) == (400, True)
    assert cluster.decodes[1].legs() == []
    await cluster.settle()


async def test_a_stream_that_breaks_after_its_finish_reason_is_finished_by_us() -> None:
    cluster = FakeCluster()
    cluster.decodes[0].fault = InjectedFault(
        FaultKind.RESET, at=9
    )  # the role, eight tokens; usage and the end are missing
    asked = body_for(CHAT, stream=True, stream_options={"include_usage": True})
    answer = read_answer(CHAT, (await cluster.ask(CHAT, asked)).body)
    assert (answer.texts[0], answer.finishes, answer.ended, answer.error) == (right(CHAT), {0: "length"}, True, None)
    assert answer.usage is not None
    assert answer.usage["completion_tokens"] == 8
    assert cluster.decodes[1].legs() == []
    await cluster.settle()


@pytest.mark.parametrize(("at", "whole"), [(9, False), (10, True)])
async def test_messages_with_a_stop_reason_are_finished_by_us(at: int, whole: bool) -> None:
    cluster = FakeCluster(journaling=0)
    cluster.decodes[0].fault = InjectedFault(
        FaultKind.RESET, at=at
    )  # the start, eight tokens, the reason; the end is missing
    got = await cluster.ask(Endpoint.MESSAGES, body_for(Endpoint.MESSAGES, stream=True))
    answer = read_answer(Endpoint.MESSAGES, got.body)
    assert (answer.texts[0], answer.ended) == (right(Endpoint.MESSAGES), True)
    assert (answer.error is None, got.body.endswith(b'event: message_stop\ndata: {"type":"message_stop"}\n\n')) == (
        whole,
        whole,
    )
    await cluster.settle()


@pytest.mark.parametrize(
    ("journaling", "more", "answer", "reason"),
    [
        (2, {}, "yes", "none"),
        (2, {"use_beam_search": True}, "no", "beam_search"),
        (0, {"use_beam_search": True}, "no", "beam_search"),
        (0, {}, "no", "no_journal"),
    ],
)
async def test_whether_streams_could_be_continued_is_counted(
    journaling: int, more: dict[str, Any], answer: str, reason: str
) -> None:
    cluster = FakeCluster(journaling=journaling)
    await cluster.ask(CHAT, body_for(CHAT, stream=True, **more))
    assert cluster.count("pdproxy_continuable_total") == 1
    assert cluster.count("pdproxy_continuable_total", answer=answer, reason=reason) == 1


async def test_what_cannot_be_disaggregated_is_computed_by_one_node() -> None:
    cluster = FakeCluster()
    got = await cluster.ask(COMPLETIONS, body_for(COMPLETIONS, stream=False, prompt_logprobs=1))
    assert (got.status, got.route) == (200, "local")
    assert cluster.count("pdproxy_local_total", reason="prompt_logprobs") == 1
    assert [node.legs() for node in cluster.prefills] == [[], []]


async def test_streams_in_parallel_do_not_mix() -> None:
    cluster = FakeCluster()
    bodies = [
        {"prompt": f"alpha {number} beta", "max_tokens": 6, "stream": True, "temperature": 0} for number in range(40)
    ]
    alone = [read_answer(COMPLETIONS, (await cluster.ask(COMPLETIONS, body)).body).texts for body in bodies]
    together = await asyncio.gather(*(cluster.ask(COMPLETIONS, body, name=f"r-{i}") for i, body in enumerate(bodies)))
    assert [read_answer(COMPLETIONS, got.body).texts for got in together] == alone
    await cluster.settle()


async def test_load_is_spread_and_given_back() -> None:
    cluster = FakeCluster()
    streams = [await _begin(cluster, CHAT) for _ in range(6)]
    assert [view.active for view in cluster.pool.state().nodes] == [0, 0, 3, 3]
    for reply in streams:
        await _rest(reply)
    await cluster.settle()


@pytest.mark.parametrize(("at", "seconds"), [(0, 77.0), (3, 11.0)])
async def test_a_first_event_may_take_as_long_as_a_head(at: int, seconds: float) -> None:
    cluster = FakeCluster(config=OrchestrationConfig(decode_headers=77.0, stall=11.0))
    cluster.decodes[0].fault = InjectedFault(FaultKind.STALL, at=at)
    began = cluster.clock.now()
    answer = read_answer(CHAT, (await cluster.ask(CHAT, body_for(CHAT, stream=True))).body)
    assert answer.texts[0] == right(CHAT)
    assert cluster.clock.now() - began == seconds
    await cluster.settle()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_the_only_reachable_node_is_found(role: str) -> None:
    cluster = FakeCluster(prefills=6, decodes=6, config=OrchestrationConfig(retries=1))
    for node in (cluster.prefills if role == "prefill" else cluster.decodes)[:5]:
        node.fault = InjectedFault(FaultKind.REFUSE)
    got = await cluster.ask(CHAT, body_for(CHAT, stream=True))
    assert read_answer(CHAT, got.body).texts[0] == right(CHAT)
    assert got.route == "disaggregated"
    assert sum(len(node.legs()) for node in cluster.prefills) == 1
    await cluster.settle()


@pytest.mark.parametrize("retries", [0, 1, 2, 5])
@pytest.mark.parametrize(
    ("kind", "tried"),
    [(FaultKind.RESET, 2), (FaultKind.ABORT, 6), (FaultKind.STATUS, 6), (FaultKind.GARBAGE, 6)],
    ids=str,
)
async def test_a_request_that_breaks_nodes_is_tried_on_a_few_only(kind: FaultKind, tried: int, retries: int) -> None:
    """One that may end the processes of nodes is tried on two, and none is tried on all there are."""
    cluster = FakeCluster(prefills=1, decodes=8, config=OrchestrationConfig(retries=retries))
    for node in cluster.decodes:
        node.fault = InjectedFault(kind, at=-1 if kind is FaultKind.RESET else 0)
    assert (await cluster.ask(CHAT, body_for(CHAT, stream=False))).status >= 500
    assert sum(len(node.legs()) for node in cluster.decodes) == min(tried, 1 + retries)
    await cluster.settle()


@pytest.mark.parametrize("forwarded", [False, True])
async def test_a_request_that_ends_nodes_under_kept_connections_ends_two(forwarded: bool) -> None:
    """The node is gone by the time that the request is sent once more, on a fresh connection."""
    cluster = FakeCluster(prefills=1, decodes=5)
    ended, send = list[str](), cluster.transport.send

    async def ends(request: HttpRequest, timeouts: Timeouts) -> HttpResponse:
        node = request.url.split("/")[2]
        if node.startswith("p"):
            return await send(request, timeouts)
        ended.append(node)
        raise NodeFault(Fault.REFUSED, f"{node} refused", resent=True)

    cluster.transport.send = ends  # type: ignore[method-assign]
    if forwarded:
        with pytest.raises(ClientError) as caught:
            await cluster.forward("/v1/embeddings")
        assert caught.value.status == 503
    else:
        assert (await cluster.ask(CHAT, body_for(CHAT, stream=True))).status == 503
    assert len(set(ended)) == len(ended) == 2
    cluster.transport.send = send  # type: ignore[method-assign]
    await cluster.settle()


@pytest.mark.parametrize("at", [-1, 0, 3, 5])
async def test_a_stream_that_ends_nodes_ends_two(at: int) -> None:
    """Nobody knows whether it is what ended the first one; if the second breaks off too before the client has got
    anything more, no third one gets it."""
    cluster = FakeCluster(decodes=5)
    for node in cluster.decodes:
        node.fault = InjectedFault(FaultKind.RESET)
    cluster.decodes[0].fault = InjectedFault(FaultKind.RESET, at=at)
    got = await cluster.ask(CHAT, body_for(CHAT, stream=True))
    assert sum(bool(node.legs()) for node in cluster.decodes) == 2
    if at < 1:
        assert got.status == 502
    else:
        assert read_answer(CHAT, got.body).error is not None
    await cluster.settle()


async def test_a_stream_outlives_any_number_of_nodes_while_it_goes_on() -> None:
    cluster = FakeCluster(decodes=4)
    for node, at in zip(cluster.decodes, (-1, 3, 3, -2), strict=True):
        node.fault = InjectedFault(FaultKind.RESET, at=at) if at >= -1 else None
    answer = read_answer(CHAT, (await cluster.ask(CHAT, body_for(CHAT, stream=True))).body)
    assert (answer.texts[0], answer.error) == (right(CHAT), None)
    await cluster.settle()


async def test_terminating_nodes_serve_while_there_are_no_others() -> None:
    cluster = FakeCluster()
    for node in cluster.nodes:
        cluster.pool.terminate(node.name)
    reply = await _begin(cluster, CHAT)
    seen = await _pieces(reply, 3)
    [going] = [node for node in cluster.decodes if node.legs()]
    cluster.pool.leaving(going.name).set()
    for node in cluster.decodes:
        if node is not going:
            cluster.pool.drain(node.name)
    answer = read_answer(CHAT, seen + await _rest(reply))
    assert answer.texts[0] == right(CHAT)
    assert len(going.legs()) == 1, "nothing else could take the stream"
    assert cluster.count("pdproxy_migrations_total", outcome="done") == 0
    await cluster.settle()


@pytest.mark.parametrize("kind", [FaultKind.STATUS, FaultKind.RESET])
@pytest.mark.parametrize(("going", "status"), [(True, 503), (False, None)])
async def test_how_an_ending_node_fails_is_not_the_clients_business(
    kind: FaultKind, going: bool, status: int | None
) -> None:
    cluster = FakeCluster(decodes=1)
    cluster.decodes[0].fault = InjectedFault(kind)
    if going:
        cluster.pool.terminate("d0")
    reply = await cluster.ask(CHAT, body_for(CHAT, stream=False))
    usual = {FaultKind.STATUS: 500, FaultKind.RESET: 502}
    assert reply.status == (status or usual[kind])
    await cluster.settle()


async def test_a_stream_on_the_last_resort_moves_to_a_node_that_comes() -> None:
    cluster = FakeCluster()
    cluster.pool.terminate("d0")
    cluster.pool.drain("d1")
    reply = await _begin(cluster, CHAT)
    seen = await _pieces(reply, 3)
    assert len(cluster.decodes[0].legs()) == 1
    cluster.pool.rejoin("d1")
    cluster.pool.bring_up(cluster.pool.view("d1").node)
    cluster.pool.leaving("d0").set()
    answer = read_answer(CHAT, seen + await _rest(reply))
    assert answer.texts[0] == right(CHAT)
    assert [len(node.legs()) for node in cluster.decodes] == [1, 1]
    assert (await cluster.ask(CHAT, body_for(CHAT, stream=False))).status == 200
    assert [len(node.legs()) for node in cluster.decodes] == [1, 2]
    await cluster.settle()
