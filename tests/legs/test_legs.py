"""The three calls to nodes: what goes out, what an answer means, and that every response is closed."""

import dataclasses
import json
from collections.abc import AsyncIterator

import pytest
from msgspec import Raw

from pdproxy.errors import Fault, NodeFault
from pdproxy.legs.calls import (
    FAULT_BODY_BYTES,
    PrefillAnswer,
    decode,
    fault_of,
    prefill,
    read_answer,
    read_prefill,
    release,
)
from pdproxy.nodes.node import RANK_HEADER, Node, Role
from pdproxy.request import Endpoint, Headers, Json, header
from pdproxy.response import ChunkSink, Sink
from pdproxy.transport.port import HttpRequest, HttpResponse, Timeouts
from pdproxy.usage import CacheUse

NODE = Node("p0", "http://127.0.0.1:1", (Role.PREFILL,))
PATIENCE = Timeouts(1, 2, 3)
HEADERS: Headers = (("x-request-id", "r1"),)
STREAM: Headers = (("content-type", "text/event-stream; charset=utf-8"),)
TICKET = {"remote_host": "h", "remote_prefill_cached_tokens": 4}


class Answer:
    """A scripted response."""

    def __init__(self, status: int, headers: Headers, pieces: list[bytes]) -> None:
        self.status = status
        self.headers = headers
        self.pieces = pieces
        self.closed = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece

    def take_whole(self) -> bytes | None:
        """Nothing: its pieces are read one by one."""
        return None

    async def pipe_to(self, sink: Sink, chunk_sink: ChunkSink | None = None) -> None:
        pass

    async def aclose(self) -> None:
        self.closed += 1


class Wire:
    """Gives every request the same answer, and records the requests."""

    def __init__(self, status: int, body: bytes, headers: Headers = (("content-type", "application/json"),)) -> None:
        self.answer = Answer(status, headers, [body[:7], body[7:]])
        self.requests: list[HttpRequest] = []
        self.timeouts: list[Timeouts] = []

    async def send(self, request: HttpRequest, timeouts: Timeouts) -> HttpResponse:
        self.requests.append(request)
        self.timeouts.append(timeouts)
        return self.answer

    async def aclose(self) -> None:
        pass


def wire(answer: Json) -> Wire:
    return Wire(200, json.dumps(answer).encode())


async def run_prefill(to: Wire, endpoint: Endpoint = Endpoint.CHAT) -> PrefillAnswer:
    return await prefill(to, NODE, endpoint, {"model": "m", "user": "ü\ud800"}, HEADERS, PATIENCE, lambda: None)


async def test_a_prefill_brings_a_ticket() -> None:
    to = wire({"kv_transfer_params": TICKET, "usage": {"prompt_tokens": 9}})
    assert await run_prefill(to) == PrefillAnswer(Raw(b'{"remote_host":"h"}'), 4, 9)
    (request,) = to.requests
    assert (request.method, request.url) == ("POST", "http://127.0.0.1:1/v1/chat/completions")
    assert json.loads(request.body) == {"model": "m", "user": "ü\ud800"}
    assert request.headers == (("x-request-id", "r1"), ("content-type", "application/json"))
    assert to.timeouts == [PATIENCE]
    assert to.answer.closed


@pytest.mark.parametrize(
    ("ticket", "usage", "cached"),
    [
        ({"remote_host": "h"}, {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 3}}, 3),
        (TICKET, {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 3}}, 4),
        (TICKET, None, 4),
        ({"remote_host": "h"}, None, None),
    ],
)
async def test_cached_tokens_are_read_from_the_ticket_or_from_usage(
    ticket: Json, usage: object, cached: int | None
) -> None:
    answer = await run_prefill(wire({"kv_transfer_params": ticket, "usage": usage}))
    assert answer.cached_tokens == cached


@pytest.mark.parametrize(
    ("endpoint", "usage", "written"),
    [
        (Endpoint.CHAT, {"prompt_tokens": 9, "prompt_tokens_details": {"created_cache_tokens": 4}}, 4),
        (Endpoint.RESPONSES, {"input_tokens": 9, "input_tokens_details": {"cache_write_tokens": 4}}, 4),
        (Endpoint.MESSAGES, {"input_tokens": 1, "cache_creation_input_tokens": 4, "cache_read_input_tokens": 4}, 4),
        (Endpoint.CHAT, {"prompt_tokens": 9, "prompt_tokens_details": {"created_cache_tokens": None}}, None),
        (Endpoint.COMPLETIONS, {"prompt_tokens": 9}, None),
        (Endpoint.COMPLETIONS, None, None),
    ],
)
async def test_tokens_that_a_prefill_left_in_its_cache_are_read_from_usage(
    endpoint: Endpoint, usage: object, written: int | None
) -> None:
    answer = await run_prefill(wire({"kv_transfer_params": TICKET, "usage": usage}), endpoint)
    assert answer.cache_use == CacheUse(4, written)


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (b'{"kv_transfer_params": null}', Fault.NO_TICKET),
        (b'{"kv_transfer_params": {}}', Fault.NO_TICKET),
        (b"{}", Fault.NO_TICKET),
        (b"<html>", Fault.INVALID_BODY),
        (b"[1]", Fault.INVALID_BODY),
        (b"", Fault.INVALID_BODY),
    ],
)
async def test_an_answer_without_a_ticket_is_a_fault(body: bytes, fault: Fault) -> None:
    to = Wire(200, body)
    with pytest.raises(NodeFault) as caught:
        await run_prefill(to)
    assert caught.value.fault is fault
    assert to.answer.closed


@pytest.mark.parametrize(
    ("status", "headers", "fault"),
    [
        (400, (), Fault.CLIENT_ERROR),
        (404, (), Fault.CLIENT_ERROR),
        (422, (), Fault.CLIENT_ERROR),
        (429, (), Fault.BUSY),
        (503, (("retry-after", "1"),), Fault.BUSY),
        (503, (), Fault.SERVER_ERROR),
        (500, (), Fault.SERVER_ERROR),
        (502, (), Fault.SERVER_ERROR),
        (302, (), Fault.INVALID_BODY),
        (101, (), Fault.INVALID_BODY),
    ],
)
async def test_a_status_names_the_fault(status: int, headers: Headers, fault: Fault) -> None:
    assert fault_of(status, headers) is fault
    to = Wire(status, b'{"error": {"message": "no"}}', (("set-cookie", "a=b"), *headers))
    with pytest.raises(NodeFault) as caught:
        await run_prefill(to)
    error = caught.value
    assert (error.fault, error.status, error.body, error.headers) == (fault, status, to_body(to), headers)
    assert to.answer.closed


def to_body(to: Wire) -> bytes:
    return b"".join(to.answer.pieces)


async def test_an_endless_error_is_not_kept() -> None:
    to = Wire(500, b"x" * (FAULT_BODY_BYTES + 1))
    with pytest.raises(NodeFault) as caught:
        await run_prefill(to)
    assert caught.value.body == b""


async def test_a_decode_leg_hands_its_body_on() -> None:
    to = Wire(200, b"data: [DONE]\n\n", STREAM)
    response = await decode(to, NODE, Endpoint.COMPLETIONS, {"stream": True}, HEADERS, PATIENCE, stream=True)
    assert [piece async for piece in response] == [b"data: [", b"DONE]\n\n"]
    assert to.requests[0].url.endswith("/v1/completions")
    assert not to.answer.closed


@pytest.mark.parametrize(("stream", "headers"), [(True, (("content-type", "application/json"),)), (False, STREAM)])
async def test_a_stream_is_answered_by_a_stream_and_nothing_else_is(stream: bool, headers: Headers) -> None:
    to = Wire(200, b"{}", headers)
    with pytest.raises(NodeFault) as caught:
        await decode(to, NODE, Endpoint.CHAT, {"stream": stream}, HEADERS, PATIENCE, stream=stream)
    assert caught.value.fault is Fault.INVALID_BODY
    assert to.answer.closed


@pytest.mark.parametrize("kind", ["Text/Event-Stream; charset=utf-8", "text/event-stream", "TEXT/EVENT-STREAM ;a=b"])
async def test_a_media_type_has_any_case_and_any_parameters(kind: str) -> None:
    to = Wire(200, b"data: [DONE]\n\n", (("content-type", kind),))
    assert (await decode(to, NODE, Endpoint.CHAT, {"stream": True}, HEADERS, PATIENCE, stream=True)).status == 200
    with pytest.raises(NodeFault):
        await decode(to, NODE, Endpoint.CHAT, {"stream": False}, HEADERS, PATIENCE, stream=False)


@pytest.mark.parametrize("kind", ["APPLICATION/JSON", "application/json; charset=utf-8", "text/event-streams", ""])
async def test_what_is_no_event_stream_is_an_answer_in_one_piece(kind: str) -> None:
    to = Wire(200, b"{}", (("content-type", kind),))
    assert (await decode(to, NODE, Endpoint.CHAT, {"stream": False}, HEADERS, PATIENCE, stream=False)).status == 200
    with pytest.raises(NodeFault):
        await decode(to, NODE, Endpoint.CHAT, {"stream": True}, HEADERS, PATIENCE, stream=True)


async def test_a_whole_answer_is_read_and_closed() -> None:
    to = Wire(200, b'{"id": "1"}')
    assert await read_answer(to.answer) == {"id": "1"}
    assert to.answer.closed
    with pytest.raises(NodeFault):
        await read_answer(Wire(200, b'{"id": "1"}').answer, limit=3)


async def test_a_release_is_a_cheap_completion() -> None:
    to = wire({"choices": []})
    await release(to, NODE, "m", "hand-over-0123456789", PATIENCE, (("authorization", "Bearer x"),))
    (request,) = to.requests
    assert request.url.endswith("/v1/completions")
    assert ("authorization", "Bearer x") in request.headers
    assert json.loads(request.body) == {
        "model": "m",
        "prompt": [0],
        "max_tokens": 1,
        "kv_transfer_params": {"pdproxy_release": "hand-over-0123456789"},
    }
    assert to.answer.closed


def ranks_of(requests: list[HttpRequest]) -> list[str | None]:
    return [header(request.headers, RANK_HEADER) for request in requests]


@pytest.mark.parametrize(("count", "told"), [(1, [None]), (2, ["0", "1"]), (3, ["0", "1", "2"])])
async def test_a_release_goes_to_every_rank(count: int, told: list[str | None]) -> None:
    to = wire({"choices": []})
    await release(to, dataclasses.replace(NODE, ranks=count), "m", "hand-over-0123456789", PATIENCE)
    assert ranks_of(to.requests) == told
    assert len({request.body for request in to.requests}) == 1
    assert to.answer.closed == count


class Deaf(Wire):
    """Cannot be reached on its first rank."""

    async def send(self, request: HttpRequest, timeouts: Timeouts) -> HttpResponse:
        response = await super().send(request, timeouts)
        if header(request.headers, RANK_HEADER) == "0":
            raise NodeFault(Fault.RESET, "as told")
        return response


async def test_a_rank_that_fails_does_not_keep_the_release_from_others() -> None:
    to = Deaf(200, b"{}")
    with pytest.raises(NodeFault):
        await release(to, dataclasses.replace(NODE, ranks=3), "m", "hand-over-0123456789", PATIENCE)
    assert ranks_of(to.requests) == ["0", "1", "2"]
    assert to.answer.closed == 2


async def test_a_failed_release_is_a_fault() -> None:
    with pytest.raises(NodeFault):
        await release(Wire(500, b""), NODE, "m", "hand-over-0123456789", PATIENCE)


def test_the_decode_node_does_not_get_what_the_prefill_node_had_cached() -> None:
    params = {"do_remote_prefill": True, "remote_prefill_cached_tokens": 7, "x": [1]}
    assert read_prefill(Endpoint.CHAT, {"kv_transfer_params": params}) == PrefillAnswer(
        Raw(b'{"do_remote_prefill":true,"x":[1]}'), 7
    )
