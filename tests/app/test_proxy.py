"""Requests and responses of the whole proxy over real connections, in front of fake nodes."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from pdproxy import __version__
from pdproxy.observe.labels import Task
from pdproxy.request import Endpoint
from pdproxy.settings.model import Health, Keys, Limits, Settings
from pdproxy.settings.types import FirstHandOver
from tests.app.running_proxy import SOON, RunningProxy, bearer, running_proxy
from tests.fakes.faults import FaultKind, InjectedFault

SETTINGS = Settings(limits=Limits(body_bytes=2000))
ASK: dict[str, Any] = {"model": "m", "prompt": "one two three four", "max_tokens": 4}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "one two three"}], "max_tokens": 4}

JSON = {"content-type": "application/json"}


@pytest.fixture
async def server() -> AsyncIterator[RunningProxy]:
    """A proxy that lets everybody in."""
    async with running_proxy(SETTINGS) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[RunningProxy]:
    """The same, one for all requests that leave it as it was."""
    async with running_proxy(SETTINGS) as made:
        yield made


ON_SHARED_LOOP = pytest.mark.asyncio(loop_scope="module")


def message(response: httpx.Response) -> str:
    """The sentence of an OpenAI-shaped error."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


@pytest.mark.parametrize("asked", FirstHandOver)
async def test_nodes_pass_the_known_answer_test_before_they_serve_unless_it_is_off(asked: FirstHandOver) -> None:
    async with running_proxy(Settings(health=Health(first_hand_over=asked)), prefill_dialect=7) as made:
        route = (await made.client.post("/v1/completions", json=ASK)).headers["x-pdproxy-route"].split(";")[0]
        shown = 'pdproxy_pair_barred{decode="decode-0",prefill="prefill-0"} 1.0' in (await metrics(made))
        running = {task.get_name() for task in asyncio.all_tasks()}
    proved = asked is FirstHandOver.KNOWN_ANSWER
    assert (route, shown) == (("local", True) if proved else ("disaggregated", False))
    assert Task.PROOF in running, "it bars pairs whose tickets are of no use, whatever nodes are tested with"


async def metrics(made: RunningProxy) -> str:
    return (await made.operator.get("/metrics")).text


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", ASK), ("/v1/chat/completions", CHAT)])
async def test_an_answer_goes_through_both_nodes(server: RunningProxy, path: str, body: dict[str, Any]) -> None:
    whole = await server.client.post(path, json=body, headers={"x-request-id": "mine"})
    assert (whole.status_code, whole.headers["x-request-id"]) == (200, "mine")
    assert whole.headers["x-pdproxy-route"].startswith("disaggregated; reason=nothing_cached; cached=0/")
    assert "kv_transfer_params" not in {name for name, value in whole.json().items() if value is not None}
    streamed = await server.client.post(path, json={**body, "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.text.endswith("data: [DONE]\n\n")
    for node, wish in ((server.prefill, "do_remote_decode"), (server.decode, "do_remote_prefill")):
        legs = [seen.body for seen in node.legs() if seen.body.get("model") == "m"][-2:]
        assert [leg["kv_transfer_params"][wish] for leg in legs] == [True, True]


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "words"),
    [
        ("POST", "/v1/completions", b"{", 400, "JSON"),
        ("POST", "/v1/completions", b"[]", 400, "object"),
        ("POST", "/v1/messages", b'{"messages": []}', 400, "model"),
        ("POST", "/v1/completions", json.dumps({**ASK, "model": "nobody"}).encode(), 404, "Valid aliases: m"),
        ("POST", "/v1/completions", json.dumps({**ASK, "max_tokens": -1}).encode(), 400, "max_tokens"),
        ("POST", "/v1/completions", json.dumps({**ASK, "prompt": "a" * 3000}).encode(), 413, "2000 bytes"),
        ("GET", "/v1/completions", b"", 405, "takes POST"),
        ("POST", "/v1/models", b"", 405, "takes GET"),
        ("GET", "/v1/models/nobody", b"", 404, "/v1/models"),
        ("POST", "/v1/nothing", b"{}", 404, "/v1/chat/completions"),
        ("POST", "/reset_prefix_cache", b"{}", 404, "changes or stops"),
        ("GET", "/v1/responses/resp_1", b"", 404, "not kept"),
    ],
)
@ON_SHARED_LOOP
async def test_errors_name_what_is_wrong(
    shared: RunningProxy, method: str, path: str, content: bytes, status: int, words: str
) -> None:
    got = await shared.client.request(method, path, content=content, headers=JSON)
    assert got.status_code == status
    assert words in message(got)
    assert got.headers["x-request-id"].startswith("req-")


@ON_SHARED_LOOP
async def test_a_coding_that_is_not_understood_is_refused(shared: RunningProxy) -> None:
    got = await shared.client.post("/v1/completions", content=b"x", headers={**JSON, "content-encoding": "br"})
    assert got.status_code == 415
    assert "content-encoding" in message(got)


@ON_SHARED_LOOP
async def test_messages_get_errors_in_their_own_shape(shared: RunningProxy) -> None:
    got = await shared.client.post("/v1/messages", json={"model": "nobody", "messages": [], "max_tokens": 3})
    assert got.json()["type"] == "error"
    assert got.status_code in (400, 404)


async def test_the_other_pages(server: RunningProxy) -> None:
    listing = (await server.client.get("/v1/models")).json()
    assert [models["id"] for models in listing["data"]] == ["m"]
    assert (await server.client.get("/v1/models/m")).json()["id"] == "m"
    assert (await server.client.get("/health")).status_code == 200
    assert (await server.client.get("/ready")).status_code == 200
    document = (await server.client.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.")
    assert document["info"]["version"] == __version__
    assert document["paths"].keys() == {*Endpoint, "/v1/models", "/health", "/ready"}
    server.running.leaving.set()
    assert (await server.client.get("/ready")).status_code == 503


@ON_SHARED_LOOP
async def test_other_endpoints_pass_through(shared: RunningProxy) -> None:
    got = await shared.client.post("/v1/embeddings?x=1", json={"model": "m", "input": "hello"})
    assert got.status_code == 200
    assert got.json()["path"] == "/v1/embeddings?x=1"


async def test_a_client_that_disconnects_in_mid_stream_leaves_nothing_behind(server: RunningProxy) -> None:
    server.decode.fault = InjectedFault(FaultKind.STALL, at=2)
    async with server.client.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as got:
        async for _ in got.aiter_bytes():
            break
    await server.until("pdproxy_requests_active 0.0")
    await server.until('pdproxy_node_active{node="decode-0",role="decode"} 0.0')
    await server.until('pdproxy_requests_total{endpoint="/v1/completions",model="m",outcome="client_gone"} 1.0')


async def test_with_keys_requests_need_one(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("sk-one alice\n")
    async with running_proxy(Settings(keys=Keys(file=path)), "sk-one") as server:
        assert (await server.client.post("/v1/completions", json=ASK)).status_code == 200
        server.client.headers.update(bearer("sk-two"))
        assert (await server.client.get("/v1/models")).status_code == 401
        refused = await server.client.post("/v1/completions", json=ASK)
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert (await server.client.get("/health")).status_code == 200


@pytest.mark.parametrize("prompt", ["one two", ["one two", "three"]], ids=["one", "list"])
async def test_a_client_that_reads_to_the_end_has_not_disconnected(
    server: RunningProxy, prompt: str | list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pdproxy.intake")
    got = await server.client.post("/v1/completions", json={**ASK, "prompt": prompt, "stream": True})
    assert got.text.endswith("data: [DONE]\n\n")
    await server.until("pdproxy_requests_active 0.0")
    assert "client left" not in caplog.messages


@pytest.mark.parametrize("page", ["/health", "/ready", "/v1/models", "/v1/models/m", "/openapi.json"])
@ON_SHARED_LOOP
async def test_head_is_get_without_the_body(shared: RunningProxy, page: str) -> None:
    got = await shared.client.head(page)
    assert (got.status_code, got.content) == (200, b"")
    assert int(got.headers["content-length"]) > 2


@ON_SHARED_LOOP
async def test_other_methods_get_405_with_the_right_one(shared: RunningProxy) -> None:
    for method in ("OPTIONS", "HEAD", "PUT"):
        got = await shared.client.request(method, "/v1/completions")
        assert (got.status_code, got.headers["allow"]) == (405, "POST")
    assert (await shared.client.post("/health")).headers["allow"] == "GET, HEAD"


async def test_a_too_long_body_with_expect_gets_no_100(server: RunningProxy) -> None:
    async with asyncio.timeout(SOON):
        reader, writer = await asyncio.open_connection(server.client.base_url.host, server.client.base_url.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"expect: 100-continue\r\ncontent-length: 9000\r\n\r\n"
        )
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 413 ")
