"""Requests to the API server: what they carry, how they are paced, and how they fail."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from pdproxy.nodes.discovery.kubernetes import Api, KubernetesSource, Query
from pdproxy.nodes.discovery.source import DiscoveryError, Template
from pdproxy.nodes.node import Role
from tests.nodes.discovery.apiserver import ApiServer
from tests.nodes.discovery.watching import Lists, NoWaitClock, a_source, hosts
from tests.transport.test_tls import HERE, serving

CERTIFICATE = HERE / "certificate.pem"


async def test_it_asks_as_the_api_wants_to_be_asked(server: ApiServer, lists: Lists) -> None:
    await hosts(lists)
    await server.put("a", "10.0.0.1")
    await hosts(lists)
    listed, watched = server.asked
    assert listed["path"] == "/apis/discovery.k8s.io/v1/namespaces/ai/endpointslices"
    assert listed["labelSelector"] == "kubernetes.io/service-name=decode"
    assert listed["authorization"] == watched["authorization"] == "Bearer token"
    assert (watched["watch"], watched["resourceVersion"], watched["allowWatchBookmarks"]) == ("true", "100", "true")
    assert int(watched["timeoutSeconds"]) > 0


@pytest.mark.parametrize("status", [401, 403, 429, 500, 503])
async def test_a_server_that_refuses_is_asked_again_ever_more_slowly(
    server: ApiServer, lists: Lists, clock: NoWaitClock, status: int
) -> None:
    server.refusals = [status] * (14 if status == 401 else 7)  # 401: its token may be old, it is read and sent again
    await server.put("a", "10.0.0.1")
    assert await hosts(lists) == ["10.0.0.1:8000"]
    assert clock.slept == [1, 2, 4, 8, 16, 30, 30]


async def test_a_large_list_comes_in_pages(server: ApiServer, lists: Lists) -> None:
    server.page = 2
    for number in range(5):
        await server.put(f"slice-{number}", f"10.0.0.{number}")
    assert await hosts(lists) == [f"10.0.0.{number}:8000" for number in range(5)]
    assert [query.get("continue") for query in server.asked] == [None, "2", "4"]
    assert server.asked[0]["limit"] == "500"
    await server.put("slice-5", "10.0.0.5")
    assert len(await hosts(lists)) == 6


async def test_a_token_that_was_replaced_is_read_again(server: ApiServer, lists: Lists, token: Path) -> None:
    server.token = "token"
    assert await hosts(lists) == []
    await server.put("a", "10.0.0.1")
    assert await hosts(lists) == ["10.0.0.1:8000"]
    server.token = "rotated"
    await asyncio.to_thread(token.write_text, "rotated")
    await server.end_watches()
    await server.put("a", "10.0.0.2")
    assert await hosts(lists) == ["10.0.0.2:8000"]
    assert server.lists() == 1


async def test_a_server_that_ends_every_watch_at_once_is_not_hammered(
    server: ApiServer, lists: Lists, clock: NoWaitClock
) -> None:
    assert await hosts(lists) == []
    await server.put("a", "10.0.0.1")
    assert await hosts(lists) == ["10.0.0.1:8000"]
    for _ in range(3):
        await server.end_watches()
        await server.put("a", "10.0.0.1", "10.0.0.2")
        await server.put("a", "10.0.0.1")
        assert await hosts(lists) == ["10.0.0.1:8000", "10.0.0.2:8000"]
        assert await hosts(lists) == ["10.0.0.1:8000"]
    assert clock.slept == [1, 1, 1]
    assert server.lists() == 1


async def test_why_a_list_or_a_watch_is_refused_is_said(
    server: ApiServer, clock: NoWaitClock, token: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with a_source(server, clock, token) as source:
        server.refusals = [403]
        with pytest.raises(DiscoveryError, match=r"^the API server answers 403: .*not now"):
            await source.list()
        async with contextlib.aclosing(source.watch()) as lists:
            assert await hosts(lists) == []
            server.refusals = [403]
            await server.put("a", "10.0.0.1")
            assert await hosts(lists) == ["10.0.0.1:8000"]
    [logged] = caplog.messages
    assert logged.startswith(
        "watching EndpointSlices kubernetes.io/service-name=decode in ai: the API server answers 403"
    )
    assert "not now" in logged


async def test_a_refusal_in_no_shape_at_all_is_said_too(clock: NoWaitClock, token: Path) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 502 X\r\ncontent-length: 4\r\n\r\noops")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        api = Api(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", token)
        source = KubernetesSource(api, Query("ai", "a=b"), Template((Role.DECODE,)), clock)
        with pytest.raises(DiscoveryError, match=r"^the API server answers 502: oops$"):
            await source.list()
        await source.aclose()


async def test_without_a_server_or_a_token_the_error_names_what_is_missing(clock: NoWaitClock, tmp_path: Path) -> None:
    for token, reason in ((None, "ConnectError"), (tmp_path / "absent", "absent")):
        source = KubernetesSource(Api("http://127.0.0.1:1", token), Query("ai", "a=b"), Template((Role.DECODE,)), clock)
        with pytest.raises(DiscoveryError, match=reason):
            await source.list()
        await source.aclose()


async def test_a_whole_selector_is_sent_as_it_is(server: ApiServer, clock: NoWaitClock) -> None:
    selector = "app in (a,b),!canary,tier!=gold"
    source = KubernetesSource(Api(server.url), Query("ai", selector), Template((Role.DECODE,)), clock)
    await source.list()
    await source.aclose()
    assert server.asked[0]["labelSelector"] == selector
    assert server.asked[0]["authorization"] == ""


async def test_an_https_server_is_trusted_by_the_clusters_authorities_alone(clock: NoWaitClock, token: Path) -> None:
    async with ApiServer(tls=serving()) as server:
        await server.put("a", "127.0.0.9")
        query, template = Query("ai", "a=b"), Template((Role.DECODE,))
        trusting = KubernetesSource(Api(server.url, token, CERTIFICATE), query, template, clock)
        assert [node.url for node in await trusting.list()] == ["http://127.0.0.9:8000"]
        await trusting.aclose()
        assert server.asked[0]["authorization"] == "Bearer token"
        distrusting = KubernetesSource(Api(server.url, token), query, template, clock)
        with pytest.raises(DiscoveryError, match="CERTIFICATE_VERIFY_FAILED"):
            await distrusting.list()
        await distrusting.aclose()
        assert len(server.asked) == 1
