"""What can happen to a stream besides a fault: drains, deadlines, sampling, errors that are the client's own."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pdproxy.orchestration.context import OrchestrationConfig
from pdproxy.request import Endpoint
from pdproxy.response import ProxyResponse
from tests.fakes.faults import FaultKind, InjectedFault
from tests.orchestration.answers import read_answer
from tests.orchestration.cluster import FakeCluster
from tests.orchestration.prompts import body_for, right

CHAT, COMPLETIONS = Endpoint.CHAT, Endpoint.COMPLETIONS


async def _begin(world: FakeCluster, endpoint: Endpoint, **more: Any) -> ProxyResponse:
    return await world.orchestrator.answer(world.request(endpoint, body_for(endpoint, stream=True, **more)))


async def _pieces(reply: ProxyResponse, count: int) -> bytes:
    stream: AsyncIterator[bytes] = aiter_of(reply)
    return b"".join([await anext(stream) for _ in range(count)])


def aiter_of(reply: ProxyResponse) -> AsyncIterator[bytes]:
    """The stream of a reply that is one."""
    assert not isinstance(reply.body, bytes)
    return reply.body


async def _rest(reply: ProxyResponse) -> bytes:
    return b"".join([piece async for piece in aiter_of(reply)])


async def test_a_stream_moves_when_its_node_leaves() -> None:
    world = FakeCluster()
    reply = await _begin(world, CHAT)
    seen = await _pieces(reply, 3)
    world.pool.leaving("d0").set()
    told = read_answer(CHAT, seen + await _rest(reply))
    assert (told.texts[0], told.roles, len(told.ids)) == (right(CHAT), 1, 1)
    assert len(world.decodes[1].legs()) == 1
    assert world.count("pdproxy_migrations_total", outcome="done") == 1
    assert world.pool.view("d0").reason == "", "leaving is no fault"
    await world.settle()


async def test_a_stream_moves_when_its_node_leaves_while_pieces_are_handed_on() -> None:
    world = FakeCluster()
    reply = await _begin(world, CHAT, tokens=20)
    seen = [await _pieces(reply, 2)]

    def sink(piece: bytes) -> bool:
        seen.append(piece)
        if len(seen) == 4:
            world.pool.leaving("d0").set()
        return True

    assert not isinstance(reply.body, bytes)
    await reply.body.pipe_to(sink)
    assert len(seen) == 4, "the next piece asks for a decision"
    told = read_answer(CHAT, b"".join(seen) + await _rest(reply))
    assert (told.texts[0], told.roles, told.ended) == (right(CHAT, 20), 1, True)
    assert len(world.decodes[1].legs()) == 1
    await world.settle()


@pytest.mark.parametrize("more", [{"presence_penalty": 1.0}, {"n": 2}], ids=str)
async def test_a_stream_that_cannot_move_stays_on_a_leaving_node(more: dict[str, object]) -> None:
    world = FakeCluster()
    reply = await _begin(world, COMPLETIONS, **more)
    seen = await _pieces(reply, 2)
    world.pool.leaving("d0").set()
    told = read_answer(COMPLETIONS, seen + await _rest(reply))
    assert (told.texts[0], told.error) == (right(COMPLETIONS), None)
    assert world.decodes[1].legs() == []
    await world.settle()


async def test_a_stream_with_nowhere_to_go_stays() -> None:
    world = FakeCluster(decodes=1)
    reply = await _begin(world, CHAT)
    world.pool.leaving("d0").set()
    assert read_answer(CHAT, await _rest(reply)).texts[0] == right(CHAT)
    await world.settle()


async def test_a_node_that_is_removed_loses_its_streams_to_others() -> None:
    world = FakeCluster()
    reply = await _begin(world, CHAT)
    world.pool.remove("d0")
    assert read_answer(CHAT, await _rest(reply)).texts[0] == right(CHAT)
    assert len(world.decodes[1].legs()) == 1
    await world.settle()


async def test_the_deadline_ends_a_stream_with_an_error_event() -> None:
    world = FakeCluster()
    reply = await _begin(world, CHAT)
    world.clock.advance(3600)
    told = read_answer(CHAT, await _rest(reply))
    assert told.error is not None
    assert (told.error["code"], told.ended) == ("deadline", True)
    await world.settle()


@pytest.mark.parametrize("endpoint", Endpoint)
async def test_the_deadline_ends_a_stream_that_stands_still(endpoint: Endpoint) -> None:
    world = FakeCluster()
    world.decodes[0].trouble = InjectedFault(FaultKind.STALL, at=3)
    reply = await _begin(world, endpoint)
    world.clock.advance(3590)
    began = world.clock.now()
    told = read_answer(endpoint, await _rest(reply))
    assert told.error is not None
    assert "deadline" in str(told.error)
    assert told.ended
    assert world.clock.now() - began == pytest.approx(10)
    assert world.pool.view("d0").reason == "", "our own deadline is no fault of a node"
    assert world.decodes[1].legs() == []
    await world.settle()


async def test_the_deadline_bounds_every_leg() -> None:
    world = FakeCluster(config=OrchestrationConfig(prefill_headers=10_000, decode_headers=10_000))
    world.prefills[0].trouble = world.prefills[1].trouble = InjectedFault(FaultKind.HANG)
    began = world.clock.now()
    got = await world.ask(CHAT, body_for(CHAT, stream=False))
    assert (got.status, got.json()["error"]["code"]) == (504, "deadline")
    assert world.clock.now() - began == pytest.approx(3600)
    assert world.pool.view("p0").reason == "", "our own deadline is no fault of a node"
    await world.settle()


@pytest.mark.parametrize("ill", [FaultKind.RESET, FaultKind.STALL, FaultKind.ERROR_EVENT, FaultKind.GARBAGE])
@pytest.mark.parametrize("endpoint", Endpoint)
async def test_nothing_that_follows_a_streams_end_matters(endpoint: Endpoint, ill: FaultKind) -> None:
    world = FakeCluster()
    world.decodes[0].trouble = InjectedFault(ill, at=100)
    told = read_answer(endpoint, (await world.ask(endpoint, body_for(endpoint, stream=True))).body)
    assert (told.texts[0], told.error, told.ended) == (right(endpoint), None, True)
    assert world.count("pdproxy_requests_total", endpoint=endpoint, outcome="ok") == 1
    assert world.decodes[1].legs() == []
    await world.settle()


async def test_migration_can_be_turned_off() -> None:
    world = FakeCluster(config=OrchestrationConfig(migrations=0))
    world.decodes[0].trouble = InjectedFault(FaultKind.RESET, at=3)
    told = read_answer(CHAT, (await world.ask(CHAT, body_for(CHAT, stream=True))).body)
    assert told.error is not None
    assert world.decodes[1].legs() == []
    assert world.count("pdproxy_steps_total", leg="decode", fault="reset", step="error_event") == 1
    await world.settle()


async def test_without_another_node_the_stream_ends_in_an_error_event() -> None:
    world = FakeCluster(decodes=1)
    world.decodes[0].trouble = InjectedFault(FaultKind.RESET, at=3, times=1)
    told = read_answer(CHAT, (await world.ask(CHAT, body_for(CHAT, stream=True))).body)
    assert told.error is not None
    assert right(CHAT).startswith(told.texts[0])
    assert world.count("pdproxy_migrations_total", outcome="failed") == 1
    await world.settle()


async def test_a_sampled_stream_goes_on_from_where_the_client_is() -> None:
    world = FakeCluster()
    world.decodes[0].trouble = InjectedFault(FaultKind.RESET, at=4)
    body = body_for(COMPLETIONS, stream=True)
    del body["temperature"]
    told = read_answer(COMPLETIONS, (await world.ask(COMPLETIONS, body)).body)
    assert (told.texts[0], told.error) == (right(COMPLETIONS), None)
    await world.settle()


async def test_an_error_event_with_a_4xx_is_the_clients_own() -> None:
    world = FakeCluster()
    world.decodes[0].trouble = InjectedFault(FaultKind.ERROR_EVENT, at=0, status=400)
    got = await world.ask(CHAT, body_for(CHAT, stream=True))
    assert (got.status, got.json()["error"]["code"]) == (400, 400)
    assert world.decodes[1].legs() == []
    await world.settle()


async def test_a_4xx_in_the_middle_is_passed_on_and_ends_the_stream() -> None:
    world = FakeCluster()
    world.decodes[0].trouble = InjectedFault(FaultKind.ERROR_EVENT, at=3, status=400)
    told = read_answer(CHAT, (await world.ask(CHAT, body_for(CHAT, stream=True))).body)
    assert told.error is not None
    assert (told.error["code"], told.ended) == (400, True)
    assert world.decodes[1].legs() == []
    await world.settle()


async def test_a_stream_that_breaks_after_its_last_word_is_finished_by_us() -> None:
    world = FakeCluster()
    world.decodes[0].trouble = InjectedFault(
        FaultKind.RESET, at=9
    )  # the role, eight tokens; usage and the end are missing
    asked = body_for(CHAT, stream=True, stream_options={"include_usage": True})
    told = read_answer(CHAT, (await world.ask(CHAT, asked)).body)
    assert (told.texts[0], told.finishes, told.ended, told.error) == (right(CHAT), {0: "length"}, True, None)
    assert told.usage is not None
    assert told.usage["completion_tokens"] == 8
    assert world.decodes[1].legs() == []
    await world.settle()


@pytest.mark.parametrize(("at", "whole"), [(9, False), (10, True)])
async def test_messages_that_have_told_why_they_stop_are_finished_by_us(at: int, whole: bool) -> None:
    world = FakeCluster()
    world.decodes[0].trouble = InjectedFault(
        FaultKind.RESET, at=at
    )  # the start, eight tokens, the reason; the end is missing
    got = await world.ask(Endpoint.MESSAGES, body_for(Endpoint.MESSAGES, stream=True))
    told = read_answer(Endpoint.MESSAGES, got.body)
    assert (told.texts[0], told.ended) == (right(Endpoint.MESSAGES), True)
    assert (told.error is None, got.body.endswith(b'event: message_stop\ndata: {"type":"message_stop"}\n\n')) == (
        whole,
        whole,
    )
    await world.settle()


async def test_whether_streams_could_be_continued_is_counted() -> None:
    world = FakeCluster()
    await world.ask(CHAT, body_for(CHAT, stream=True))
    await world.ask(CHAT, body_for(CHAT, stream=True, presence_penalty=1.0))
    assert world.count("pdproxy_continuable_total", answer="yes", reason="none") == 1
    assert world.count("pdproxy_continuable_total", answer="no", reason="penalties") == 1


async def test_what_cannot_be_disaggregated_is_computed_by_one_node() -> None:
    world = FakeCluster()
    got = await world.ask(COMPLETIONS, body_for(COMPLETIONS, stream=False, prompt_logprobs=1))
    assert (got.status, got.headers["x-pdproxy-route"]) == (200, "local")
    assert world.count("pdproxy_local_total", reason="prompt_logprobs") == 1
    assert [node.legs() for node in world.prefills] == [[], []]


async def test_streams_in_parallel_do_not_mix() -> None:
    world = FakeCluster()
    bodies = [
        {"prompt": f"alpha {number} beta", "max_tokens": 6, "stream": True, "temperature": 0} for number in range(40)
    ]
    alone = [read_answer(COMPLETIONS, (await world.ask(COMPLETIONS, body)).body).texts for body in bodies]
    together = await asyncio.gather(*(world.ask(COMPLETIONS, body, name=f"r-{i}") for i, body in enumerate(bodies)))
    assert [read_answer(COMPLETIONS, got.body).texts for got in together] == alone
    await world.settle()


async def test_load_is_spread_and_given_back() -> None:
    world = FakeCluster()
    streams = [await _begin(world, CHAT) for _ in range(6)]
    assert [view.active for view in world.pool.snapshot().nodes] == [0, 0, 3, 3]
    for reply in streams:
        await _rest(reply)
    await world.settle()


@pytest.mark.parametrize(("at", "seconds"), [(0, 77.0), (3, 11.0)])
async def test_a_first_event_may_take_as_long_as_a_head(at: int, seconds: float) -> None:
    world = FakeCluster(config=OrchestrationConfig(decode_headers=77.0, stall=11.0))
    world.decodes[0].trouble = InjectedFault(FaultKind.STALL, at=at)
    began = world.clock.now()
    told = read_answer(CHAT, (await world.ask(CHAT, body_for(CHAT, stream=True))).body)
    assert told.texts[0] == right(CHAT)
    assert world.clock.now() - began == seconds
    await world.settle()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_one_node_of_many_that_can_be_reached_is_found(role: str) -> None:
    world = FakeCluster(prefills=6, decodes=6, config=OrchestrationConfig(retries=1))
    for node in (world.prefills if role == "prefill" else world.decodes)[:5]:
        node.trouble = InjectedFault(FaultKind.REFUSE)
    got = await world.ask(CHAT, body_for(CHAT, stream=True))
    assert read_answer(CHAT, got.body).texts[0] == right(CHAT)
    assert got.headers["x-pdproxy-route"] == "disaggregated"
    assert sum(len(node.legs()) for node in world.prefills) == 1
    await world.settle()


async def test_a_request_that_breaks_nodes_meets_only_a_few() -> None:
    world = FakeCluster(decodes=8, config=OrchestrationConfig(retries=2))
    for node in world.decodes:
        node.trouble = InjectedFault(FaultKind.RESET)
    assert (await world.ask(CHAT, body_for(CHAT, stream=False))).status == 502
    assert sum(len(node.legs()) for node in world.decodes) == 3
    await world.settle()
