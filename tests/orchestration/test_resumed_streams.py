"""Streams of nodes that write journals: wherever they break, the client gets the bytes of an unbroken one.

`make test-long` has the whole table.
"""

import asyncio
import dataclasses
import itertools
import json
import logging
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pdproxy.observe.labels import Move
from pdproxy.orchestration.context import OrchestrationConfig
from pdproxy.request import Endpoint
from pdproxy.stream import journal
from tests.fakes.faults import FaultKind, InjectedFault, error_events
from tests.fakes.node import FakeNode, Script
from tests.orchestration.answers import read_answer
from tests.orchestration.cluster import FakeCluster, read
from tests.orchestration.prompts import body_for, right
from tests.tables import spread

CHAT, COMPLETIONS = Endpoint.CHAT, Endpoint.COMPLETIONS
TOKENS = 8
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
MEDIA = [{"role": "user", "content": [{"type": "text", "text": "one two three"}, IMAGE]}]
_FINGERPRINT = b',"system_fingerprint":"vllm-0.32.0-fake"'
_ODD = re.compile(rb'(cmpl-)\d+|("created":)\d+')


def _shape(endpoint: Endpoint, **more: Any) -> tuple[Endpoint, dict[str, Any]]:
    return endpoint, {**body_for(endpoint, stream=True, tokens=TOKENS), **more}


SHAPES: dict[str, tuple[Endpoint, dict[str, Any]]] = {
    "plain": _shape(COMPLETIONS),
    "usage": _shape(COMPLETIONS, stream_options={"include_usage": True}),
    "usage-always": _shape(CHAT, stream_options={"include_usage": True, "continuous_usage_stats": True}),
    "chat": _shape(CHAT),
    "hidden-reasoning": _shape(CHAT, include_reasoning=False),
    "tools": _shape(CHAT, tools=[TOOL]),
    "json": _shape(CHAT, response_format={"type": "json_object"}),
    "regex": _shape(COMPLETIONS, structured_outputs={"regex": "a+"}),
    "penalties": _shape(COMPLETIONS, presence_penalty=1.0),
    "seeded": _shape(COMPLETIONS, temperature=1.0, seed=7),
    "logprobs": _shape(CHAT, logprobs=True, top_logprobs=2),
    "choices": _shape(COMPLETIONS, n=3, stream_options={"include_usage": True}),
    "chat-choices": _shape(CHAT, n=2),
    "echo": _shape(COMPLETIONS, echo=True),
    "token-ids": _shape(CHAT, return_token_ids=True),
    "stop": _shape(COMPLETIONS, stop=[right(COMPLETIONS)[20:26]]),
    "stop-held": _shape(CHAT, stop=["never there, and long"]),
    "media": _shape(CHAT, messages=MEDIA),
    "messages": _shape(Endpoint.MESSAGES),
    "responses": _shape(Endpoint.RESPONSES),
}


def seen(body: bytes) -> bytes:
    """A stream whose ids and times are made equal; within it, they must be those of one answer.

    The fingerprint is left out: vLLM writes it into the last event, which a stream that is ended by the proxy lacks.
    """
    for found in (re.findall(rb"cmpl-\d+", body), re.findall(rb'"created":\d+', body)):
        assert len(set(found)) <= 1
    return _ODD.sub(rb"\1\g<2>0", body).replace(_FINGERPRINT, b"")


async def ask(cluster: FakeCluster, shape: str, **more: Any) -> bytes:
    """The client's answer; everything is given back."""
    endpoint, body = SHAPES[shape]
    got = await cluster.ask(endpoint, {**body, **more})
    assert got.status == 200
    await cluster.settle()
    return got.body


async def uncut(shape: str, burst: int = 1, **more: Any) -> bytes:
    """The client's answer from nodes that stay well, as `seen`; nothing is added for moves. It is asked for once."""
    known, key = _known(), (shape, burst, repr(more))
    if key not in known:
        cluster = FakeCluster(1, 1, config=OrchestrationConfig(migrations=0), burst=burst)
        known[key] = seen(await ask(cluster, shape, **more))
    return known[key]


@cache
def _known() -> dict[tuple[str, int, str], bytes]:
    """The answers that `uncut` has got so far."""
    return {}


async def broken(shape: str, *faults: InjectedFault | None, **options: Any) -> tuple[bytes, FakeCluster]:
    """The client's answer where the first decode nodes have these faults, as `seen`; all can resume."""
    cluster = FakeCluster(**{"decodes": 3, "journaling": 3} | options)
    for node, fault in zip(cluster.decodes, faults, strict=False):
        node.fault = fault
    return seen(await ask(cluster, shape)), cluster


KINDS = (FaultKind.RESET, FaultKind.STALL, FaultKind.ERROR_EVENT, FaultKind.ABORT, FaultKind.SHORT, FaultKind.GARBAGE)
CUTS = (1, 2, 4, 7, 8, 10)
ROUTE = "/v1/pdproxy/streams"
OVER = InjectedFault(FaultKind.RESET, at=3)


def moves(cluster: FakeCluster, move: Move) -> float:
    return cluster.count("pdproxy_stream_stall_seconds_count", move=move)


@pytest.mark.parametrize("shape", SHAPES)
async def test_an_unbroken_stream_is_what_it_is_without_a_journal(shape: str) -> None:
    cluster = FakeCluster(journaling=2)
    assert seen(await ask(cluster, shape)) == await uncut(shape)
    (leg,) = cluster.decodes[0].legs()
    assert leg.path == ROUTE + SHAPES[shape][0]
    assert leg.body.get("return_token_ids") == SHAPES[shape][1].get("return_token_ids")
    assert cluster.count("pdproxy_continuable_total", answer="yes", reason="none") == 1


@pytest.mark.parametrize(("shape", "kind", "at"), spread(SHAPES, KINDS, CUTS))
async def test_the_client_gets_the_same_bytes_wherever_it_breaks(shape: str, kind: FaultKind, at: int) -> None:
    got, cluster = await broken(shape, InjectedFault(kind, at=at))
    assert got == await uncut(shape)
    moved = [node.legs() for node in cluster.decodes[1:] if node.legs()]
    assert len(moved) <= 1
    for (leg,) in moved:
        assert leg.path == ROUTE + SHAPES[shape][0]
        assert sum(moves(cluster, move) for move in Move) == 1


@pytest.mark.parametrize(("shape", "first", "second", "burst"), spread(SHAPES, (1, 3, 5), (1, 2, 4), (1, 3)))
async def test_it_may_break_again_and_again(shape: str, first: int, second: int, burst: int) -> None:
    faults = [InjectedFault(FaultKind.RESET, at=at) for at in (first, second)]
    got, cluster = await broken(shape, *faults, burst=burst)
    assert got == await uncut(shape, burst)
    assert sum(moves(cluster, move) for move in Move) <= 2


CACHED = re.compile(rb'("(?:cached_tokens|cache_read_input_tokens|input_tokens)":)\d+')


def uncached(body: bytes) -> bytes:
    """Without what was cached: a node that breaks before its first record has read the ticket, which then is gone."""
    return CACHED.sub(rb"\g<1>0", body)


EVERY_83RD = [pytest.param(byte, marks=() if byte == 831 else pytest.mark.long) for byte in range(1, 3000, 83)]


@pytest.mark.parametrize("byte", EVERY_83RD)
@pytest.mark.parametrize("shape", SHAPES)
async def test_it_may_break_at_any_byte(shape: str, byte: int) -> None:
    got, _ = await broken(shape, InjectedFault(FaultKind.RESET, byte=byte))
    assert uncached(got) == uncached(await uncut(shape))


async def test_the_new_leg_is_the_clients_request_with_all_records() -> None:
    again = InjectedFault(FaultKind.RESET, at=2, times=1)
    got, cluster = await broken("choices", OVER, again, again)
    assert got == await uncut("choices")
    legs = [leg for node in cluster.decodes for leg in node.legs()]
    legs.sort(key=lambda leg: len(str(leg.body.get("pdproxy_resume"))))
    records = [leg.body.get("pdproxy_resume", {}).get("records", []) for leg in legs]
    assert [len(each) for each in records][:3] == [0, 3, 5]
    assert all(earlier == later[: len(earlier)] for earlier, later in itertools.pairwise(records))
    added = ("pdproxy_resume", "kv_transfer_params")
    bodies = [{key: value for key, value in leg.body.items() if key not in added} for leg in legs]
    assert all(body == bodies[0] for body in bodies)
    assert len({dict(leg.headers)["x-request-id"] for leg in legs}) == 1
    prefills = [leg.body for node in cluster.prefills for leg in node.legs()]
    assert len(prefills) == len(legs), "the prompt is prefilled for each node"
    assert all("pdproxy_resume" not in body for body in prefills)


async def test_hidden_reasoning_is_known_though_no_event_shows_it() -> None:
    cluster = FakeCluster(journaling=2)
    cluster.decodes[0].fault = InjectedFault(FaultKind.RESET, at=2)
    assert seen(await ask(cluster, "hidden-reasoning")) == await uncut("hidden-reasoning")
    (leg,) = cluster.decodes[1].legs()
    produced = [ids for _, groups, *_ in leg.body["pdproxy_resume"]["records"] for ((_, ids),) in groups]
    assert len(produced) == 2


@pytest.mark.parametrize("shape", ["chat", "tools", "messages"])
async def test_without_migrations_nothing_is_added(shape: str) -> None:
    cluster = FakeCluster(journaling=2, config=OrchestrationConfig(migrations=0))
    assert seen(await ask(cluster, shape)) == await uncut(shape)
    (leg,) = cluster.decodes[0].legs()
    assert leg.path == SHAPES[shape][0]
    assert "return_token_ids" not in leg.body
    for node in cluster.decodes:
        node.fault = OVER
    answer = read_answer(SHAPES[shape][0], await ask(cluster, shape))
    assert answer.error is not None


@pytest.mark.parametrize("shape", ["chat", "tools", "choices"])
async def test_a_lone_node_writes_a_journal_for_another_may_join(shape: str) -> None:
    cluster = FakeCluster(decodes=2, journaling=1)
    reply, got = await _pieces(cluster, shape, 3)
    cluster.decodes[1].can_resume = True
    cluster.amend("d1", can_resume=True)
    cluster.pool.leaving("d0").set()
    assert seen(got + await read(reply)) == await uncut(shape)
    assert [leg.path.startswith(ROUTE) for node in cluster.decodes for leg in node.legs()] == [True, True]


async def test_what_has_a_journal_goes_to_nodes_that_can_resume() -> None:
    cluster = FakeCluster(decodes=4, journaling=1)
    cluster.amend("d3", can_resume=True)
    cluster.decodes[3].can_resume = True
    cluster.decodes[0].fault = OVER
    assert seen(await ask(cluster, "chat")) == await uncut("chat")
    assert [len(node.legs()) for node in cluster.decodes] == [1, 0, 0, 1]


@pytest.mark.parametrize(("shape", "at", "exact"), [("chat", 1, False), ("choices", 3, False), ("responses", 2, False)])
async def test_without_a_node_that_can_resume_the_stream_ends_in_an_error_event(
    shape: str, at: int, exact: bool
) -> None:
    cluster = FakeCluster(decodes=3, journaling=2)
    cluster.decodes[0].fault = InjectedFault(FaultKind.RESET, at=at)
    cluster.decodes[1].fault = InjectedFault(FaultKind.REFUSE)
    answer = read_answer(SHAPES[shape][0], await ask(cluster, shape))
    assert (answer.error is None, answer.ended) == (exact, True)
    assert cluster.decodes[2].legs() == []
    assert cluster.count("pdproxy_migrations_total", outcome="failed") == 1


async def test_where_nothing_was_out_any_node_is_asked_anew() -> None:
    """The role is out, and nothing that was generated: the only other node cannot resume."""
    cluster = FakeCluster(decodes=2, journaling=1)
    cluster.decodes[0].fault = InjectedFault(FaultKind.RESET, at=1)
    endpoint, body = SHAPES["tools"]
    got = await cluster.ask(endpoint, {**body, "include_reasoning": False})
    assert seen(got.body) == await uncut("tools", include_reasoning=False)
    (leg,) = cluster.decodes[1].legs()
    assert (leg.path, moves(cluster, Move.RESTARTED)) == (endpoint, 1)
    await cluster.settle()


async def test_on_nodes_without_the_route_a_stream_ends_in_an_error_event() -> None:
    cluster = FakeCluster(journaling=0)
    cluster.decodes[0].fault = InjectedFault(FaultKind.RESET, at=5)
    answer = read_answer(CHAT, await ask(cluster, "chat"))
    assert (answer.error is None, answer.ended) == (False, True)
    (leg,) = cluster.decodes[0].legs()
    assert (leg.path, "return_token_ids" in leg.body) == (CHAT, False)
    assert cluster.decodes[1].legs() == []
    assert cluster.count("pdproxy_continuable_total", answer="no", reason="no_journal") == 1


@pytest.mark.parametrize("status", [400, 404, 405, 500, 503])
async def test_a_node_that_does_not_resume_gives_way_to_another(status: int) -> None:
    refusal = InjectedFault(FaultKind.STATUS, status=status)
    legs = 0
    for faults in ((OVER, refusal, None), (OVER, None, refusal)):
        got, cluster = await broken("tools", *faults)
        assert got == await uncut("tools")
        legs += sum(len(node.legs()) for node in cluster.decodes)
    assert legs >= 5, "at least one of the two was refused"


@pytest.mark.parametrize("status", [400, 404])
async def test_where_all_refuse_to_resume_the_stream_ends_in_an_error_event(status: int) -> None:
    refusal = InjectedFault(FaultKind.STATUS, status=status)
    got, cluster = await broken("tools", OVER, refusal, refusal)
    answer = read_answer(CHAT, got)
    assert answer.error is not None
    assert answer.error["code"] in ("stream_broken", "node_failed")
    assert cluster.pool.view("d1").reason == "", "a node that does not resume is no bad node"


async def test_a_node_that_lost_the_route_is_asked_at_the_endpoint() -> None:
    cluster = FakeCluster(journaling=2)
    for node in cluster.decodes:
        node.can_resume = False
    assert read_answer(CHAT, await ask(cluster, "chat")).texts == read_answer(CHAT, await uncut("chat")).texts
    assert [leg.path for leg in cluster.decodes[0].legs()] == [ROUTE + CHAT, CHAT]
    assert sum(len(node.legs()) for node in cluster.prefills) == 1, "the same ticket serves"
    assert cluster.count("pdproxy_steps_total", leg="decode", fault="no_route", step="at_endpoint") == 1


async def test_a_node_may_leave_a_stream_to_the_endpoint() -> None:
    cluster = FakeCluster(journaling=2)
    cluster.decodes[0].stores_responses = True
    assert seen(await ask(cluster, "responses")) == await uncut("responses")
    assert [leg.path for leg in cluster.decodes[0].legs()] == [ROUTE + Endpoint.RESPONSES, Endpoint.RESPONSES]
    assert cluster.fabric.pulled == 1, "the same ticket serves"
    assert cluster.count("pdproxy_continuable_total", answer="no", reason="no_journal") == 1


async def test_an_error_that_no_record_follows_is_noticed() -> None:
    """A node that fails inside ends its stream with an error event of its own."""
    cluster = FakeCluster(decodes=2, journaling=2)
    node = cluster.decodes[0]
    respond = node.respond

    def fail_inside(path: str, raw: bytes, headers: tuple[tuple[str, str], ...] = ()) -> Script:
        script = respond(path, raw, headers)
        if not path.startswith(ROUTE):
            return script
        broken_off = error_events(CHAT, 500, "engine died")
        return dataclasses.replace(script, pieces=(*script.pieces[:4], b"".join(broken_off)))

    node.respond = fail_inside  # type: ignore[method-assign]
    assert seen(await ask(cluster, "tools")) == await uncut("tools")
    assert cluster.count("pdproxy_leg_faults_total", leg="decode", fault="error_event") == 1


async def test_a_4xx_of_the_endpoint_is_the_clients() -> None:
    cluster = FakeCluster(journaling=2)
    cluster.decodes[0].fault = InjectedFault(FaultKind.STATUS, status=400)
    endpoint, body = SHAPES["tools"]
    assert (await cluster.ask(endpoint, body)).status == 400
    await cluster.settle()


async def test_a_4xx_in_the_middle_is_passed_on() -> None:
    got, cluster = await broken("tools", InjectedFault(FaultKind.ERROR_EVENT, at=3, status=400))
    answer = read_answer(CHAT, got)
    assert answer.error is not None
    assert answer.error["code"] == 400
    assert cluster.decodes[1].legs() == []


@pytest.mark.parametrize("more", [{"use_beam_search": True}, {"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}])
async def test_what_no_journal_helps_is_asked_at_the_endpoint(more: dict[str, Any]) -> None:
    cluster = FakeCluster(journaling=2)
    endpoint, body = SHAPES["plain"]
    await cluster.ask(endpoint, {**body, **more})
    (leg,) = cluster.decodes[0].legs()
    assert leg.path == endpoint
    await cluster.settle()


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"tools": [{"type": "code_interpreter"}]}, "server_tools"),
        ({"include": ["message.output_text.logprobs"]}, "response_logprobs"),
    ],
)
async def test_some_responses_are_asked_at_the_endpoint(more: dict[str, Any], reason: str) -> None:
    cluster = FakeCluster(journaling=2)
    endpoint, body = SHAPES["responses"]
    await cluster.ask(endpoint, {**body, **more})
    (leg,) = cluster.decodes[0].legs()
    assert leg.path == endpoint
    assert cluster.count("pdproxy_continuable_total", answer="no", reason=reason) == 1
    await cluster.settle()


async def test_a_journal_beyond_its_bound_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal.Journal.__init__, "__defaults__", (100,))
    got, cluster = await broken("tools", InjectedFault(FaultKind.RESET, at=7))
    answer = read_answer(CHAT, got)
    assert answer.error is not None
    assert cluster.decodes[1].legs() == []
    assert seen(await ask(FakeCluster(journaling=2), "tools")) == await uncut("tools"), "an unbroken one needs none"


async def test_a_finished_stream_needs_no_other_node() -> None:
    got, cluster = await broken("tools", InjectedFault(FaultKind.RESET, at=8))
    assert got == await uncut("tools")
    assert cluster.decodes[1].legs() == []


async def test_a_finished_stream_is_resumed_for_its_usage() -> None:
    got, cluster = await broken("choices", InjectedFault(FaultKind.RESET, at=24))
    assert got == await uncut("choices")
    assert sum(len(node.legs()) for node in cluster.decodes[1:]) == 1


async def test_without_another_node_a_finished_stream_ends_without_its_usage() -> None:
    got, _ = await broken("choices", InjectedFault(FaultKind.RESET, at=24, times=1), decodes=1)
    answer = read_answer(COMPLETIONS, got)
    assert (answer.error, answer.usage, len(answer.finishes), answer.ended) == (None, None, 3, True)


@pytest.mark.parametrize("retries", [0, 1])
async def test_nothing_is_held_where_a_finished_stream_could_not_be_resumed(retries: int) -> None:
    faults = (InjectedFault(FaultKind.RESET, at=24, times=1), InjectedFault(FaultKind.STATUS, status=500))
    config = OrchestrationConfig(retries=retries)
    got, _ = await broken("choices", *faults, decodes=2, config=config)
    answer = read_answer(COMPLETIONS, got)
    assert (answer.error, answer.usage, len(answer.finishes), answer.ended) == (None, None, 3, True)


async def _pieces(cluster: FakeCluster, shape: str, count: int) -> tuple[Any, bytes]:
    endpoint, body = SHAPES[shape]
    reply = await cluster.orchestrator.answer(cluster.request(endpoint, body))
    assert not isinstance(reply.body, bytes)
    return reply, b"".join([await reply.body.read() for _ in range(count)])


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_node_that_leaves_hands_its_streams_over(shape: str) -> None:
    cluster = FakeCluster(journaling=2)
    reply, got = await _pieces(cluster, shape, 2)
    cluster.pool.leaving("d0").set()
    assert seen(got + await read(reply)) == await uncut(shape)
    assert [len(node.legs()) for node in cluster.decodes] == [1, 1]
    assert moves(cluster, Move.RESUMED) == 1
    assert cluster.pool.view("d0").reason == "", "leaving is no fault"
    await cluster.settle()


class Pieces(tuple[bytes, ...]):
    """The pieces of an answer; ``told`` is called when the one at ``at`` goes out."""

    at: int
    told: Callable[[], None]

    def __getitem__(self, index: Any) -> Any:
        if index == self.at:
            self.told()
        return super().__getitem__(index)


def leaves_at(cluster: FakeCluster, at: int) -> None:
    """The first decode node is to leave while it sends this piece of its answer."""
    respond = cluster.decodes[0].respond

    def watched(path: str, raw: bytes, headers: tuple[tuple[str, str], ...] = ()) -> Script:
        script = respond(path, raw, headers)
        pieces = Pieces(script.pieces)
        pieces.at, pieces.told = at, cluster.pool.leaving("d0").set
        return dataclasses.replace(script, pieces=pieces)

    cluster.decodes[0].respond = watched  # type: ignore[method-assign]


async def test_hidden_reasoning_notices_that_its_node_leaves() -> None:
    """Nothing of what its node sends reaches the client: the next record asks for a decision."""
    cluster = FakeCluster(journaling=2)
    leaves_at(cluster, 1)
    reply, got = await _pieces(cluster, "hidden-reasoning", 1)
    await reply.body.pipe_to(lambda piece: pytest.fail(f"{piece!r} was passed on"))
    assert seen(got + await read(reply)) == await uncut("hidden-reasoning")
    assert len(cluster.decodes[1].legs()) == 1
    await cluster.settle()


@pytest.mark.parametrize("other", [False, True], ids=["alone", "unable"])
async def test_a_stream_stays_on_a_leaving_node_where_no_other_can_take_it(other: bool) -> None:
    cluster = FakeCluster(decodes=1 + other, journaling=1)
    reply, got = await _pieces(cluster, "choices", 3)
    cluster.pool.leaving("d0").set()
    assert seen(got + await read(reply)) == await uncut("choices")
    assert cluster.count("pdproxy_migrations_total", outcome="done") == 0
    await cluster.settle()


@pytest.mark.parametrize("shape", ["plain", "tools"])
async def test_a_finished_stream_is_not_handed_over(shape: str) -> None:
    cluster = FakeCluster(journaling=2)
    leaves_at(cluster, 7)
    assert seen(await ask(cluster, shape)) == await uncut(shape)
    assert cluster.pool.leaving("d0").is_set()
    assert cluster.decodes[1].legs() == []


async def test_usage_tells_of_the_node_that_began_the_stream() -> None:
    """The first node recomputed the prompt, and had nothing of it cached."""
    endpoint, body = SHAPES["usage"]
    for fault in (None, OVER):
        cluster = FakeCluster(journaling=2)
        cluster.fabric.deaf = True
        cluster.decodes[0].fault = fault
        usage = read_answer(endpoint, (await cluster.ask(endpoint, body)).body).usage
        assert usage is not None
        assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_a_ticket_of_a_resumed_leg_is_not_taken_for_unread() -> None:
    cluster = FakeCluster(journaling=2)
    for node in cluster.prefills:
        node.fault = InjectedFault(FaultKind.REFUSE, times=1)
    cluster.decodes[0].fault = OVER
    assert read_answer(CHAT, await ask(cluster, "tools")).error is None
    assert cluster.fabric.pulled == 1, "only the second node had a ticket"
    assert cluster.count("pdproxy_recomputed_total") == 0


async def test_the_client_leaves_at_every_await() -> None:
    endpoint, body = SHAPES["choices"]
    for turn in itertools.count():
        cluster = FakeCluster(decodes=3, journaling=3)
        for node in cluster.decodes[:2]:
            node.fault = InjectedFault(FaultKind.RESET, at=2, times=1)
        task = asyncio.ensure_future(cluster.ask(endpoint, body))
        for _ in range(turn):
            if not task.done():
                await asyncio.sleep(0)
        finished = task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await cluster.settle()
        assert len(asyncio.all_tasks()) == 1, "no task of ours is left"
        if finished:
            assert turn > 30
            return


async def test_a_stall_is_measured_and_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = OrchestrationConfig(stall=11.0)
    again = InjectedFault(FaultKind.RESET, at=3, times=1)
    _, cluster = await broken("tools", InjectedFault(FaultKind.STALL, at=3), again, config=config, decodes=2)
    (line,) = [record for record in caplog.records if record.message == "request ended"]
    told = {name: getattr(line, name) for name in ("moves", "moved", "stall_ms")}
    assert told == {"moves": 2, "moved": "resumed", "stall_ms": pytest.approx(11_000, abs=1)}
    assert moves(cluster, Move.RESUMED) == 2
    assert cluster.count("pdproxy_stream_stall_seconds_sum", move="resumed") == pytest.approx(11.0, abs=0.01)


async def test_a_moved_stream_tells_its_span() -> None:
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    with provider.get_tracer("test").start_as_current_span("request"):
        await broken("hidden-reasoning", InjectedFault(FaultKind.STALL, at=2), config=OrchestrationConfig(stall=11.0))
    (span,) = spans.get_finished_spans()
    told = dict(span.attributes or {})
    shown = {
        "pdproxy.moves": 1,
        "pdproxy.moved": "resumed",
        "pdproxy.stall_ms": pytest.approx(11_000, abs=1),
        "pdproxy.route": "disaggregated",
        "pdproxy.outcome": "ok",
    }
    assert {name: told[name] for name in shown} == shown
    (event,) = span.events
    its = dict(event.attributes or {})
    assert (event.name, its["pdproxy.move"], its["pdproxy.from_node"]) == ("pdproxy.moved", "resumed", "d0")
    assert its["pdproxy.to_node"] in ("d1", "d2")


async def test_an_unmoved_request_says_nothing_of_moves(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    await ask(FakeCluster(journaling=2), "tools")
    (line,) = [record for record in caplog.records if record.message == "request ended"]
    assert not hasattr(line, "moves")


async def test_prompts_of_a_list_are_resumed_each_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    endpoint, body = SHAPES["choices"]
    whole = await FakeCluster(journaling=2).ask(endpoint, {**body, "prompt": ["one two", "three four five", "six"]})
    caplog.set_level(logging.INFO)
    caplog.clear()
    cluster = FakeCluster(decodes=3, journaling=3)
    cluster.decodes[0].fault = InjectedFault(FaultKind.RESET, at=2)
    got = await cluster.ask(endpoint, {**body, "prompt": ["one two", "three four five", "six"]})
    answer, right = read_answer(endpoint, got.body), read_answer(endpoint, whole.body)
    assert (answer.texts, answer.usage, answer.error) == (right.texts, right.usage, None)
    (line,) = [record for record in caplog.records if record.message == "request ended"]
    assert line.moves == 1  # type: ignore[attr-defined]
    await cluster.settle()


def test_the_fake_node_refuses_what_the_route_refuses() -> None:
    node = FakeNode("d0", FakeCluster().fabric)
    node.can_resume = True
    body = {"model": "tiny", "prompt": "a b", "max_tokens": 2, "stream": True}
    bad: list[Any] = [[], {}, {"records": {}}, {"records": [1]}, {"records": [], "more": 1}]
    for order in bad:
        raw = json.dumps({**body, "pdproxy_resume": order}).encode()
        assert node.respond(ROUTE + COMPLETIONS, raw).status == 400
    assert node.respond(ROUTE + COMPLETIONS, json.dumps({**body, "stream": False}).encode()).status == 400
    assert node.respond(ROUTE + Endpoint.COMPLETIONS, json.dumps(body).encode()).status == 200
