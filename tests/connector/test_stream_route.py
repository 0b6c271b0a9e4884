"""Answers of the journal's route where there is no stream to journal, and ends of streams that break."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from vllm.v1.engine import FinishReason

from connector.resume_order import KEY, verify
from connector.ticket_fields import Refusal
from tests.connector.api_server import SECRET, ApiServer, FakeCore
from tests.connector.stream_shapes import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    STREAMS,
    Shape,
    ask,
    chat,
    completion,
    core_for,
    nameless,
    read,
    response,
    streamed,
)

COMPLETION = Shape(COMPLETIONS, completion())
THREE = Shape(COMPLETIONS, completion(n=3), ("A long one it is.", "Ab.", "Abc, and so on."))
PATHS = (COMPLETIONS, CHAT, MESSAGES, RESPONSES)


EVERY = {"stream": True, "prompt": "a", "input": "a", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}
"""Enough for each of the endpoints."""


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"stream": true}',
        b'{"model": "tiny", "stream": true, "max_tokens": "many"}',
        json.dumps({"model": "another", **EVERY}).encode(),
        json.dumps({"model": "tiny", "temperature": -3, **EVERY}).encode(),
    ],
    ids=range(7),
)
async def test_an_error_is_the_endpoint_s_own(plain_server: ApiServer, path: str, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    async with plain_server.on(FakeCore()) as client:
        own = await client.post(path, content=body, headers=headers)
        ours = await client.post(STREAMS + path, content=body, headers=headers)
    assert own.status_code >= 400
    assert (ours.status_code, ours.json()) == (own.status_code, own.json())


async def test_a_body_of_another_type_is_refused_as_by_the_endpoint(plain_server: ApiServer) -> None:
    async with plain_server.on(FakeCore()) as client:
        own = await client.post(CHAT, content=b"a", headers={"content-type": "text/plain"})
        ours = await client.post(STREAMS + CHAT, content=b"a", headers={"content-type": "text/plain"})
    assert (ours.status_code, ours.json()) == (own.status_code, own.json())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *((path, {"stream": False}) for path in PATHS),
        (COMPLETIONS, {"prompt": ["one", "two"]}),
        (COMPLETIONS, {"echo": True, "logprobs": 1}),
        (CHAT, {"use_beam_search": True, "n": 2}),
        (RESPONSES, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    ],
)
async def test_what_cannot_be_resumed_is_refused_and_keeps_its_ticket(
    plain_server: ApiServer, path: str, body: Mapping[str, Any]
) -> None:
    base = {COMPLETIONS: completion(), CHAT: chat(), MESSAGES: chat(), RESPONSES: response()}[path]
    core = core_for(plain_server, COMPLETION)
    ticket = {"kv_transfer_params": {"do_remote_prefill": True}}
    async with plain_server.on(core) as client:
        answer = await client.post(STREAMS + path, json={"model": "tiny", "stream": True, **base, **ticket, **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (400, "NotResumableError", 400)
    assert error["message"]
    assert (core.added, core.rejected) == ([], 0)


@pytest.mark.parametrize(
    ("enabled", "tools", "body"),
    [
        (True, None, {"background": True}),
        (True, None, {"store": True}),
        (True, None, {"store": False, "previous_response_id": "resp_1"}),
        (False, object(), {"tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]}),
        (False, object(), {"tools": [{"type": "mcp", "server_label": "here"}]}),
    ],
)
async def test_responses_with_a_state_of_the_node_s_are_refused(
    plain_server: ApiServer, monkeypatch: pytest.MonkeyPatch, enabled: bool, tools: Any, body: Mapping[str, Any]
) -> None:
    async with plain_server.on(core_for(plain_server, COMPLETION)) as client:
        first = await client.post(STREAMS + RESPONSES, json={"model": "tiny", "stream": True, **response()})
        handler = _streamed_handler(plain_server)
        monkeypatch.setattr(handler, "enable_store", enabled)
        monkeypatch.setattr(handler, "tool_server", tools)
        answer = await client.post(STREAMS + RESPONSES, json={"model": "tiny", "stream": True, **response(**body)})
    assert first.status_code == 200
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "NotResumableError")


def _streamed_handler(server: ApiServer) -> Any:
    return server.app.state.endpoint_plugins[0]._streams._handlers[RESPONSES]


GOOD = [1, [[[0, [60]]]]]


@pytest.mark.parametrize(
    "order",
    [
        None,
        [],
        {},
        {"records": {}},
        {"records": [None]},
        {"records": [[1]]},
        {"records": [[-1, []]]},
        {"records": [[True, []]]},
        {"records": [[1, [[]]]]},
        {"records": [[1, [[[0]]]]]},
        {"records": [[1, [[[-1, [1]]]]]]},
        {"records": [[1, [[[0, "60"]]]]]},
        {"records": [[1, [[[0, [60.5]]]]]]},
        {"records": [[1, [[[0, [60], "abort", None]]]]]},
        {"records": [[1, [[[0, [60], "stop", []]]]]]},
        {"records": [[1, [[[0, [60]]]], []]]},
        {"records": [[1, [[[0, [60]]]], {"id": [{}]}]]},
        {"records": [GOOD, [1, []]]},
        {"records": [[1, [[[1, [60]]]]]]},
        {"records": [[1, [[[0, [100_000]]]]]]},
        {"records": [GOOD] * 41},
        {"records": [[1, [[[0, [60], "stop", None]]]], GOOD]},
    ],
    ids=range(22),
)
async def test_bad_records_are_refused_with_a_sentence(plain_server: ApiServer, order: Any) -> None:
    core = core_for(plain_server, COMPLETION)
    async with plain_server.on(core) as client:
        body = {"model": "tiny", "stream": True, **completion(max_tokens=40), KEY: order}
        answer = await client.post(STREAMS + COMPLETIONS, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "BadRequestError")
    assert error["message"].startswith("pdproxy_resume: ")
    assert core.added == []


@pytest.mark.parametrize(
    "records",
    [
        ["[7, [[[0, [60]]]]]"],
        ['[1, [[[0, [60], "stop", "never said"]]]]'],
    ],
)
async def test_records_that_give_other_events_are_refused(plain_server: ApiServer, records: Sequence[str]) -> None:
    async with plain_server.on(core_for(plain_server, COMPLETION)) as client:
        answer = await ask(client, Shape(COMPLETIONS, completion(stop=["never said"])), records)
    assert (answer.status_code, answer.json()["error"]["type"]) == (409, "ReplayError")


async def test_a_node_that_does_not_decode_has_no_streams(
    plain_server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_server.app.state.endpoint_plugins[0]._streams, "secret", None)
    async with plain_server.on(FakeCore()) as client:
        answer = await ask(client, COMPLETION)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, 404)


async def test_the_engine_gets_a_signed_order_for_each_choice_that_goes_on(plain_server: ApiServer) -> None:
    records = (await streamed(plain_server, THREE)).records
    ends = next(at for at, record in enumerate(records) if '"stop"' in record)
    core = core_for(plain_server, THREE)
    await streamed(plain_server, THREE, records[: ends + 1], core=core)
    assert len(core.added) == 2
    for request in core.added:
        params = request.sampling_params.extra_args["kv_transfer_params"]
        ids = verify(SECRET.encode(), request.request_id, params)
        assert isinstance(ids, list)
        assert len(ids) >= 4
        assert isinstance(verify(SECRET.encode(), "another", params), Refusal)


async def test_a_ticket_goes_with_the_order(plain_server: ApiServer) -> None:
    ticket = {"do_remote_prefill": True, "remote_engine_id": "P"}
    shape = Shape(COMPLETIONS, completion(kv_transfer_params=ticket))
    records = (await streamed(plain_server, shape)).records
    core = core_for(plain_server, shape)
    await streamed(plain_server, shape, records[:3], core=core)
    params = dict(core.added[0].sampling_params.extra_args["kv_transfer_params"])
    assert len(params.pop(KEY)["token_ids"]) == 3
    assert params == ticket


async def test_a_stream_of_which_only_the_end_is_missing_needs_no_engine(plain_server: ApiServer) -> None:
    records = (await streamed(plain_server, THREE)).records
    core = core_for(plain_server, THREE)
    rest = await streamed(plain_server, THREE, records[:-1], core=core)
    assert rest.all_events == ["data: [DONE]"]
    assert core.added == []


async def test_a_stream_is_moved_again_and_again(plain_server: ApiServer) -> None:
    records: list[str] = []
    events: list[str] = []
    whole = await streamed(plain_server, THREE)
    while not events or events[-1] != "data: [DONE]":
        leg = await streamed(plain_server, THREE, records, name=f"leg-{len(records)}")
        records += leg.records[:4]
        events += [event for part in leg.events[:4] for event in part]
    assert nameless(events) == nameless(whole.all_events)
    shown = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert {(event["id"], event["created"]) for event in shown} == {("cmpl-leg-0", shown[0]["created"])}


@pytest.mark.parametrize(("failure", "shown"), [(FinishReason.ERROR, '"error"'), (FinishReason.ABORT, '"abort"')])
async def test_an_engine_s_failure_is_shown_behind_the_last_record(
    plain_server: ApiServer, failure: FinishReason, shown: str
) -> None:
    async with plain_server.on(core_for(plain_server, COMPLETION, fail_after=4, failure=failure)) as client:
        text = (await ask(client, COMPLETION)).text
    journaled, _, broken = text.rpartition(": pdproxy ")
    assert journaled.count(": pdproxy ") == 3
    assert shown in broken
    assert broken.endswith("data: [DONE]\n\n")


async def test_a_client_that_leaves_ends_the_request(plain_server: ApiServer) -> None:
    """The server hears of it while the endpoint waits for the engine."""
    core = core_for(plain_server, COMPLETION, silent_after=4)
    sent: list[Any] = []
    body = json.dumps({"model": "tiny", "stream": True, **COMPLETION.body}).encode()
    received = [{"type": "http.request", "body": body, "more_body": False}]
    leaves = asyncio.Event()

    async def receive() -> Any:
        if received:
            return received.pop()
        await leaves.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if b"pdproxy" in message.get("body", b""):
            leaves.set()

    async with plain_server.on(core):
        await plain_server.app(_scope(STREAMS + COMPLETIONS), receive, send)
        await asyncio.sleep(0.05)
    assert core.aborted == [core.added[0].request_id]
    assert b"error" not in b"".join(message.get("body", b"") for message in sent)


async def test_a_client_that_leaves_before_its_body_is_complete_is_no_error(plain_server: ApiServer) -> None:
    messages = [{"type": "http.disconnect"}, {"type": "http.request", "body": b'{"model": ', "more_body": True}]

    async def receive() -> Any:
        return messages.pop()

    async def send(message: Any) -> None:
        raise AssertionError(message)

    async with plain_server.on(FakeCore()):
        await plain_server.app(_scope(STREAMS + COMPLETIONS), receive, send)


async def test_a_client_that_leaves_while_it_reads_nothing_ends_the_request_at_once(plain_server: ApiServer) -> None:
    core = core_for(plain_server, COMPLETION)
    body = json.dumps({"model": "tiny", "stream": True, **COMPLETION.body}).encode()
    received = [{"type": "http.request", "body": body, "more_body": False}]
    full = asyncio.Event()

    async def receive() -> Any:
        if received:
            return received.pop()
        await full.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if b"pdproxy" in message.get("body", b""):
            full.set()
            await asyncio.Event().wait()

    async with plain_server.on(core):
        await plain_server.app(_scope(STREAMS + COMPLETIONS), receive, send)
        assert not plain_server.engine.output_processor.request_states


async def test_a_comment_that_keeps_the_connection_alive_does_not_wait(
    plain_server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--sse-keep-alive-interval`; while the engine computes, and not between events and their record."""
    monkeypatch.setattr(plain_server.app.state.args, "sse_keep_alive_interval", 0.01)
    core = core_for(plain_server, COMPLETION, pause=0.006)
    async with plain_server.on(core) as client:
        text = (await ask(client, COMPLETION)).text
    assert text.count(": keep-alive\n\n") >= 20
    events = read(text.replace(": keep-alive\n\n", "")).all_events
    assert len(events) == len(core.scripts[0]) + 1


def _scope(path: str) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "state": {},
    }
