"""Compressed bodies, pages of other origins, comments while nothing comes, path prefixes."""

import gzip
import json
import socket
import zlib

import httpx
import pytest
from backports import zstd

from pdproxy.request import Endpoint
from pdproxy.settings.model import Limits, Listen, Policy, Settings
from pdproxy.settings.types import Keep, Routing
from pdproxy.sockets import keep_alive
from tests.app.running_proxy import RunningProxy, running_proxy
from tests.fakes.faults import FaultKind, InjectedFault
from tests.orchestration.answers import read_answer
from tests.orchestration.prompts import body_for, right

CHAT = {"model": "m", **body_for(Endpoint.CHAT, stream=False)}
RAW = json.dumps(CHAT).encode()
CODINGS = {
    "gzip": gzip.compress(RAW),
    "x-gzip": gzip.compress(RAW),
    "GZIP": gzip.compress(RAW[:9]) + gzip.compress(RAW[9:]),
    "deflate": zlib.compress(RAW),
    "zstd": zstd.compress(RAW),
    "identity": RAW,
}


async def sent(proxy: RunningProxy, body: bytes, coding: str, path: str = "/v1/chat/completions") -> httpx.Response:
    """A body, and what it is said to be."""
    headers = {"content-type": "application/json", "content-encoding": coding}
    return await proxy.client.post(path, content=body, headers=headers)


async def test_compressed_bodies_are_understood_and_nodes_get_them_as_they_were() -> None:
    async with running_proxy(Settings()) as proxy:
        for coding, body in CODINGS.items():
            answer = await sent(proxy, body, coding)
            assert answer.status_code == 200, (coding, answer.text)
            assert answer.json()["choices"][0]["message"]["content"] == right(Endpoint.CHAT)
        assert (await sent(proxy, CODINGS["zstd"], "zstd", "/v1/embeddings")).status_code == 200
        legs = [each for each in proxy.decode.seen if each.path in ("/v1/chat/completions", "/v1/embeddings")]
        assert all("content-encoding" not in dict(each.headers) for each in legs)


async def test_two_frames_of_zstd_are_one_body() -> None:
    async with running_proxy(Settings()) as proxy:
        body = zstd.compress(RAW[:20]) + zstd.compress(RAW[20:])
        assert (await sent(proxy, body, "zstd")).status_code == 200


@pytest.mark.parametrize("coding", ["br", "gzip, gzip", "compress"])
async def test_another_coding_is_415_and_names_those_that_are_understood(coding: str) -> None:
    async with running_proxy(Settings()) as proxy:
        answer = await sent(proxy, RAW, coding)
        assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "gzip, deflate, zstd")


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd"])
async def test_a_body_that_is_cut_or_something_else_is_400(coding: str) -> None:
    async with running_proxy(Settings()) as proxy:
        for body in (CODINGS[coding][:-5], RAW, b"\x00"):
            answer = await sent(proxy, body, coding)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_content_encoding"), body


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
async def test_a_body_is_bounded_after_decompression_and_its_bytes_are_given_back(coding: str) -> None:
    limits = Limits(body_bytes=1 << 20, held_bytes=1 << 20)
    much = b'"' + b" " * (64 << 20)
    bomb = gzip.compress(much) if coding == "gzip" else zstd.compress(much)
    async with running_proxy(Settings(limits=limits)) as proxy:
        answer = await sent(proxy, bomb, coding)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        await proxy.until("pdproxy_body_bytes 0.0")
        assert (await sent(proxy, CODINGS[coding], coding)).status_code == 200


PAGE = "https://chat.example"
PREFLIGHT = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}


async def test_pages_of_the_named_origins_may_ask_and_others_may_not() -> None:
    async with running_proxy(Settings(listen=Listen(cors_origins=(PAGE,)))) as proxy:
        allowed = await proxy.client.options("/v1/chat/completions", headers=PREFLIGHT)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, PAGE)
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        answer = await proxy.client.post("/v1/chat/completions", json=CHAT, headers={"origin": PAGE})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
        refused = await proxy.client.options("/v1/chat/completions", headers=PREFLIGHT | {"origin": "https://other"})
        assert refused.status_code == 400
        assert "access-control-allow-origin" not in refused.headers
        streamed = await proxy.client.post(
            "/v1/chat/completions", json={**CHAT, "stream": True}, headers={"origin": PAGE}
        )
        assert read_answer(Endpoint.CHAT, streamed.content).texts == {0: right(Endpoint.CHAT)}


async def test_without_the_setting_no_page_may_ask() -> None:
    async with running_proxy(Settings()) as proxy:
        answer = await proxy.client.options("/v1/chat/completions", headers=PREFLIGHT)
        assert answer.status_code == 405
        assert "access-control-allow-origin" not in answer.headers


QUICK = Settings(listen=Listen(sse_keep_alive=0.05))


async def test_comments_come_while_a_prefill_takes_long_and_the_stream_after_them() -> None:
    async with running_proxy(QUICK) as proxy:
        proxy.prefill.stepping.clear()
        async with proxy.client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
            pieces = answer.aiter_raw()
            comments = await anext(pieces) + await anext(pieces)
            assert set(comments.decode().split("\n\n")) == {": keep-alive", ""}
            proxy.prefill.stepping.set()
            rest = b"".join([piece async for piece in pieces])
        events = rest.rpartition(b": keep-alive\n\n")[2]
        assert read_answer(Endpoint.CHAT, events).texts == {0: right(Endpoint.CHAT)}
        assert read_answer(Endpoint.CHAT, events).ended


async def answered_after_a_comment(proxy: RunningProxy, endpoint: Endpoint) -> bytes:
    """The body of a stream's answer: its prefill goes on once the first comment is here."""
    proxy.prefill.stepping.clear()
    body = {"model": "m", **body_for(endpoint, stream=True)}
    async with proxy.client.stream("POST", endpoint, json=body) as answer:
        assert answer.status_code == 200
        pieces = answer.aiter_raw()
        first = await anext(pieces)
        assert first.startswith(b": keep-alive\n\n")
        proxy.prefill.stepping.set()
        return first + b"".join([piece async for piece in pieces])


async def test_comments_go_on_through_a_retry() -> None:
    async with running_proxy(QUICK) as proxy:
        proxy.prefill.fault = InjectedFault(FaultKind.NO_TICKET, times=1)
        answer = await answered_after_a_comment(proxy, Endpoint.CHAT)
        assert right(Endpoint.CHAT)[:4].encode() in answer


@pytest.mark.parametrize("endpoint", list(Endpoint))
async def test_an_error_after_comments_is_the_streams_last_event(endpoint: Endpoint) -> None:
    """By load, for the decode node could compute alone a prompt that was sent to it before."""
    by_load = QUICK.model_copy(update={"policy": Policy(routing=Routing.LEAST_LOADED)})
    async with running_proxy(by_load) as proxy:
        for fault in (InjectedFault(FaultKind.STATUS, status=400), InjectedFault(FaultKind.RESET)):
            proxy.decode.fault = fault
            answer = await answered_after_a_comment(proxy, endpoint)
            events = answer.rpartition(b": keep-alive\n\n")[2]
            assert read_answer(endpoint, events).error is not None


async def test_a_client_that_leaves_during_comments_is_noticed() -> None:
    async with running_proxy(QUICK) as proxy:
        proxy.prefill.stepping.clear()
        async with proxy.client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
            await anext(answer.aiter_raw())
        await proxy.until("pdproxy_requests_active 0.0")


async def test_the_proxy_serves_below_a_prefix_and_without_it() -> None:
    async with running_proxy(Settings(listen=Listen(root_path="/llm/"))) as proxy:
        for path in ("/llm/v1/chat/completions", "/v1/chat/completions"):
            assert (await proxy.client.post(path, json=CHAT)).status_code == 200
        assert (await proxy.client.get("/llm/v1/models")).status_code == 200
        assert (await proxy.client.get("/other/v1/models")).status_code == 404


async def test_nodes_may_be_below_a_prefix() -> None:
    async with running_proxy(Settings(), prefix="/llm/a") as proxy:
        assert (await proxy.client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        assert (await proxy.client.post("/v1/embeddings", json={"model": "m"})).json()["path"] == "/v1/embeddings"
        assert proxy.decode.fabric.pulled > 0


def test_connections_are_probed_by_the_system() -> None:
    with socket.socket() as one:
        keep_alive(one)
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60


ODD_WISH = {"prompt_cache_retention": "48h"}
MESSAGES = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "one two"}]}


async def test_a_wish_to_be_kept_that_means_nothing_is_refused_in_the_shape_of_its_api() -> None:
    async with running_proxy(Settings()) as proxy:
        answer = await proxy.client.post("/v1/chat/completions", json={**CHAT, **ODD_WISH})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_cache_retention")
        odd = {**MESSAGES, "cache_control": {"type": "ephemeral", "ttl": "24h"}}
        answer = await proxy.client.post("/v1/messages", json=odd)
        message = "`cache_control.ttl` must be `5m` or `1h`."
        assert (answer.status_code, answer.json()) == (
            400,
            {"type": "error", "error": {"type": "invalid_request_error", "message": message}},
        )
        fine = {**MESSAGES, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
        assert (await proxy.client.post("/v1/messages", json=fine)).status_code == 200
        legs = [each.body for each in proxy.decode.seen if each.path.endswith("/v1/messages")]
        assert [leg["cache_control"] for leg in legs] == [fine["cache_control"]], "nodes get it as it came"


async def test_where_nothing_is_kept_the_fields_are_not_looked_at() -> None:
    async with running_proxy(Settings(policy=Policy(keep=Keep.OFF))) as proxy:
        assert (await proxy.client.post("/v1/chat/completions", json={**CHAT, **ODD_WISH})).status_code == 200
