"""Answers of nodes to requests that the proxy does not understand: they reach the client as they came."""

import asyncio
import gzip

import httpx
import pytest

from pdproxy.settings.model import Settings
from tests.app.running_proxy import RunningProxy, running_proxy
from tests.fakes.faults import FaultKind
from tests.fakes.node import EVENTS, JSON, Script

PATH = "/v1/audio/transcriptions"
PIECES = tuple(f'data: {{"text":"{number}"}}\n\n'.encode() for number in range(3))


async def asked(proxy: RunningProxy, path: str = PATH) -> httpx.Response:
    """The whole answer."""
    return await proxy.client.post(path, json={"model": "m"}, follow_redirects=False)


async def test_only_a_forwarded_request_brings_the_clients_words_on_body_and_answer() -> None:
    theirs = {"content-type": "application/json; charset=utf-8", "accept": "audio/wav, */*", "x-tenant": "blue"}
    async with running_proxy(Settings()) as proxy:
        for path in (PATH, "/v1/completions"):
            await proxy.client.post(path, content=b'{"model":"m","prompt":"one two three"}', headers=theirs)
        seen = [each for each in (*proxy.prefill.seen, *proxy.decode.seen) if ("x-tenant", "blue") in each.headers]
        told = {each.path: {name: value for name, value in each.headers if name in theirs} for each in seen}
        assert told == {PATH: theirs, "/v1/completions": {"x-tenant": "blue", "content-type": "application/json"}}
        assert len(seen) == 3


async def test_a_streamed_answer_arrives_while_the_node_writes_it() -> None:
    async with running_proxy(Settings()) as proxy:
        proxy.decode.forwarded[PATH] = Script(200, EVENTS, PIECES, FaultKind.STALL)
        async with asyncio.timeout(20), proxy.client.stream("POST", PATH, json={"model": "m"}) as answer:
            read = b""
            async for piece in answer.aiter_raw():
                read += piece
                if read == b"".join(PIECES):
                    break  # the node never ends it
        assert answer.headers["content-type"] == EVENTS[0][1]


async def test_an_answer_that_breaks_off_is_cut_after_what_came_and_counted() -> None:
    async with running_proxy(Settings()) as proxy:
        proxy.decode.forwarded[PATH] = Script(200, EVENTS, PIECES, FaultKind.RESET)
        read = bytearray()

        async def read_on(answer: httpx.Response) -> None:
            async for piece in answer.aiter_raw():
                read.extend(piece)

        async with proxy.client.stream("POST", PATH, json={"model": "m"}) as answer:
            with pytest.raises(httpx.RemoteProtocolError):
                await read_on(answer)
        assert read == b"".join(PIECES)
        await proxy.until('pdproxy_key_requests_total{key="anonymous",outcome="failed"} 1.0')


async def test_a_client_that_leaves_ends_the_nodes_answer() -> None:
    async with running_proxy(Settings()) as proxy:
        proxy.decode.forwarded[PATH] = Script(200, EVENTS, PIECES, FaultKind.STALL)
        async with proxy.client.stream("POST", PATH, json={"model": "m"}) as answer:
            await anext(answer.aiter_raw())
        async with asyncio.timeout(20):
            while proxy.decode.running:  # noqa: ASYNC110 - the fake has no event for it
                await asyncio.sleep(0.01)


PASSED = {
    "metadata": '{"shape":[2]}',
    "content-disposition": 'attachment; filename="a"',
    "x-ratelimit-remaining-requests": "7",
    "content-type": "application/octet-stream",
    "retry-after": "3",
    "cache-control": "no-store",
}
WITHHELD = {
    "set-cookie": "a=b",
    "access-control-allow-origin": "*",
    "alt-svc": "h3",
    "strict-transport-security": "max-age=1",
    "x-pdproxy-route": "mine",
    "keep-alive": "timeout=5",
    "x-of-the-connection": "1",
    "connection": "x-of-the-connection",
}


async def test_headers_of_the_answer_pass_but_those_of_a_site_and_of_the_connection() -> None:
    async with running_proxy(Settings()) as proxy:
        given = tuple({**PASSED, **WITHHELD, "server": "a node"}.items())
        proxy.decode.forwarded[PATH] = Script(200, given, (b"\x00\x01",))
        answer = await asked(proxy)
        assert answer.content == b"\x00\x01"
        assert {name: answer.headers.get(name) for name in PASSED} == PASSED
        assert not WITHHELD.keys() - {"connection"} & answer.headers.keys()
        assert answer.headers.get("server") != "a node"


@pytest.mark.parametrize(
    ("location", "shown"),
    [("http://10.0.0.1:8000/v1/x/?a=1", "/v1/x/?a=1"), ("/v1/x", "/v1/x"), ("//10.0.0.1/y", "/y"), ("http://h", "/")],
)
async def test_a_redirect_passes_without_the_nodes_address(location: str, shown: str) -> None:
    async with running_proxy(Settings()) as proxy:
        proxy.decode.forwarded[PATH] = Script(307, (("location", location),), ())
        answer = await asked(proxy)
        assert (answer.status_code, answer.headers["location"]) == (307, shown)


async def test_a_node_that_compresses_all_the_same_is_understood_by_the_client() -> None:
    async with running_proxy(Settings()) as proxy:
        coded = gzip.compress(b'{"data":[]}')
        proxy.decode.forwarded[PATH] = Script(200, (*JSON, ("content-encoding", "gzip")), (coded,))
        assert (await asked(proxy)).json() == {"data": []}


async def test_a_path_that_no_node_has_is_answered_in_openais_shape() -> None:
    async with running_proxy(Settings()) as proxy:
        missing = b'{"detail":"Not Found"}'
        length = (("content-length", str(len(missing))),)
        proxy.decode.forwarded[PATH] = Script(404, JSON + length, (missing,))
        answer = await asked(proxy)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")


async def test_an_error_of_a_leg_keeps_the_nodes_headers() -> None:
    async with running_proxy(Settings()) as proxy:
        refused = (("www-authenticate", "Bearer"), ("x-of-the-node", "1"), ("set-cookie", "a=b"), *JSON)
        for node in (proxy.prefill, proxy.decode):
            node.forwarded["/v1/completions"] = Script(401, refused, (b'{"error":{"message":"who?"}}',))
        answer = await proxy.client.post("/v1/completions", json={"model": "m", "prompt": "a b"})
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert answer.headers["x-of-the-node"] == "1"
        assert "set-cookie" not in answer.headers
