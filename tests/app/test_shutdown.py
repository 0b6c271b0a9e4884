"""Requests that a shutdown cuts short get an error that says so."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pdproxy.intake.exchange import Message
from pdproxy.response import EXCHANGE_EXTENSION, Sink
from pdproxy.settings.model import Limits, Settings
from tests.app.running_proxy import SOON, RunningProxy, running_proxy
from tests.fakes.faults import FaultKind, InjectedFault
from tests.fakes.server_exchange import WithoutDirectWrites

COMPLETION = {"model": "m", "prompt": "one two", "max_tokens": 5}
LIST = {**COMPLETION, "prompt": ["one two", "three"]}
MESSAGES = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
RESPONSE = {"model": "m", "input": "hello", "max_output_tokens": 5}


@pytest.fixture
async def server() -> AsyncIterator[RunningProxy]:
    async with running_proxy(Settings()) as running:
        yield running


JSON = (b"content-type", b"application/json")


class Call(WithoutDirectWrites):
    """One request, spoken to the application as a server does; the server cancels what is not over in time."""

    chunk_sink: Sink | None = None

    def __init__(self, server: RunningProxy, path: str, body: dict[str, Any]) -> None:
        self._incoming = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        self.sent: list[Message] = []
        self.began = asyncio.Event()
        straight = {EXCHANGE_EXTENSION: self}
        head = {"method": "POST", "path": path, "query_string": b"", "headers": [JSON]}
        scope = {"type": "http", **head, "extensions": straight}
        self.task = asyncio.ensure_future(server.running.clients(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if not self._incoming:
            await asyncio.Event().wait()
        return self._incoming.pop()

    async def _send(self, message: Message) -> None:
        self.sent.append(message)
        if message.get("body"):
            self.began.set()

    @property
    def sink(self) -> Sink:
        return self._take

    def _take(self, piece: bytes) -> bool:
        self.sent.append({"type": "http.response.body", "body": piece, "more_body": True})
        self.began.set()
        return True

    async def cut_short(self) -> bytes:
        """The whole body, once the task was cancelled."""
        self.task.cancel()
        await asyncio.wait_for(self.task, SOON)
        assert self.sent[-1].get("more_body", False) is False
        return b"".join(message.get("body", b"") for message in self.sent)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", COMPLETION),
        ("/v1/completions", LIST),
        ("/v1/chat/completions", MESSAGES),
        ("/v1/messages", MESSAGES),
        ("/v1/responses", RESPONSE),
    ],
    ids=["completion", "list", "chat", "messages", "responses"],
)
async def test_a_stream_ends_in_an_error_event(
    server: RunningProxy, path: str, body: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    server.decode.fault = InjectedFault(FaultKind.STALL, at=2)
    call = Call(server, path, {**body, "stream": True})
    await asyncio.wait_for(call.began.wait(), SOON)
    said = await call.cut_short()
    assert call.sent[0]["status"] == 200
    events = said.split(b"\n\n")
    if path in ("/v1/completions", "/v1/chat/completions"):
        assert json.loads(events[-3].removeprefix(b"data: "))["error"]["code"] == "shutting_down"
        assert events[-2] == b"data: [DONE]"
    else:
        assert events[-2].startswith(b"event: error\ndata: ")
    await server.until(f'pdproxy_requests_total{{endpoint="{path}",model="m",outcome="failed"}} 1.0')
    await server.until('pdproxy_node_active{node="decode-0",role="decode"} 0.0')
    (line,) = [vars(record) for record in caplog.records if record.name == "pdproxy.orchestration.access_log"]
    assert (line["levelname"], line["status"], line["code"], line["node"]) == (
        "WARNING", 200, "shutting_down", "decode-0"
    )  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_a_request_without_response_yet_gets_503(server: RunningProxy, path: str) -> None:
    server.decode.fault = InjectedFault(FaultKind.HANG)
    call = Call(server, path, COMPLETION)
    await server.until('pdproxy_node_active{node="decode-0",role="decode"} 1.0')
    said = await call.cut_short()
    assert call.sent[0]["status"] == 503
    assert (b"retry-after", b"1") in call.sent[0]["headers"]
    assert json.loads(said)["error"]["code"] == "shutting_down"
    counted = "other" if path == "/v1/embeddings" else path
    await server.until(f'pdproxy_requests_total{{endpoint="{counted}",model="m",outcome="failed"}} 1.0')
    await server.until('pdproxy_node_active{node="decode-0",role="decode"} 0.0')


async def test_a_request_that_waits_in_the_queue_gets_503() -> None:
    async with running_proxy(Settings(limits=Limits(concurrency=1))) as server:
        server.decode.fault = InjectedFault(FaultKind.HANG)
        runs = Call(server, "/v1/completions", COMPLETION)
        await server.until('pdproxy_node_active{node="decode-0",role="decode"} 1.0')
        waits = Call(server, "/v1/completions", COMPLETION)
        await server.until("pdproxy_requests_queued 1.0")
        said = await waits.cut_short()
        assert waits.sent[0]["status"] == 503
        assert json.loads(said)["error"]["code"] == "shutting_down"
        await server.until("pdproxy_requests_queued 0.0")
        await runs.cut_short()
        await server.until("pdproxy_requests_active 0.0")
