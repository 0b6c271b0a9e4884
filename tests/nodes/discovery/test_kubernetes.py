"""Watching EndpointSlices on a small API server."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import pytest

from pdproxy.nodes.discovery.kubernetes import Api, KubernetesSource, Query, WatchConfig
from pdproxy.nodes.discovery.source import DiscoveryError, Nodes, Template
from pdproxy.nodes.node import Role
from tests.nodes.discovery.apiserver import GONE, ApiServer, a_bookmark, a_slice
from tests.transport.test_tls import HERE, serving

CERTIFICATE = HERE / "certificate.pem"
Lists = AsyncGenerator[Nodes, None]


class Hasty:
    """A clock that never waits, and writes down what it was asked to wait."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def now(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer() as made:
        yield made


@pytest.fixture
def clock() -> Hasty:
    return Hasty()


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("token\n")
    return path


@contextlib.asynccontextmanager
async def a_source(
    server: ApiServer, clock: Hasty, token: Path, config: WatchConfig | None = None
) -> AsyncIterator[KubernetesSource]:
    """A source, which leaves no connection behind."""
    query = Query("ai", "kubernetes.io/service-name=decode", "http")
    source = KubernetesSource(Api(server.url, token), query, Template(Role.DECODE), clock, config)
    yield source
    await source.aclose()
    await server.all_gone()


@contextlib.asynccontextmanager
async def watching(
    server: ApiServer, clock: Hasty, token: Path, config: WatchConfig | None = None
) -> AsyncIterator[Lists]:
    """What a source lists."""
    async with a_source(server, clock, token, config) as source, contextlib.aclosing(source.watch()) as made:
        yield made


@pytest.fixture
async def lists(server: ApiServer, clock: Hasty, token: Path) -> AsyncIterator[Lists]:
    async with watching(server, clock, token) as made:
        yield made


async def hosts(lists: Lists) -> list[str]:
    """The next list's addresses; the limit only ends a hang."""
    async with asyncio.timeout(60):
        return [node.url.removeprefix("http://") for node in await anext(lists)]


async def test_it_lists_then_watches(server: ApiServer, lists: Lists) -> None:
    await server.put("a", "10.0.0.1", "10.0.0.2")
    assert await hosts(lists) == ["10.0.0.1:8000", "10.0.0.2:8000"]
    await server.put("b", "10.0.0.3")
    assert await hosts(lists) == ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]
    await server.put("a", "10.0.0.2")
    assert await hosts(lists) == ["10.0.0.2:8000", "10.0.0.3:8000"]
    await server.delete("b")
    assert await hosts(lists) == ["10.0.0.2:8000"]
    assert server.lists() == 1


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


async def test_a_watch_that_ends_is_resumed_where_it_was(server: ApiServer, lists: Lists) -> None:
    assert await hosts(lists) == []
    await server.put("a", "10.0.0.1")
    assert await hosts(lists) == ["10.0.0.1:8000"]
    await server.end_watches()
    await server.put("b", "10.0.0.2")
    assert await hosts(lists) == ["10.0.0.1:8000", "10.0.0.2:8000"]
    assert server.lists() == 1
    assert server.asked[-1]["resourceVersion"] == "101"


async def test_a_cut_connection_loses_no_event(server: ApiServer, lists: Lists) -> None:
    assert await hosts(lists) == []
    await server.put("a", "10.0.0.1")
    assert await hosts(lists) == ["10.0.0.1:8000"]
    await server.cut()
    await server.put("a", "10.0.0.1", "10.0.0.2")
    assert await hosts(lists) == ["10.0.0.1:8000", "10.0.0.2:8000"]
    assert server.lists() == 1


async def test_a_watch_that_is_silent_beyond_its_time_is_dead_and_loses_no_event(
    server: ApiServer, clock: Hasty, token: Path
) -> None:
    async with watching(server, clock, token, WatchConfig(lasts=1, slack=0.2)) as lists:
        assert await hosts(lists) == []
        await server.put("a", "10.0.0.1")
        assert await hosts(lists) == ["10.0.0.1:8000"]
        server.fall_silent()
        await server.put("b", "10.0.0.2")
        assert await hosts(lists) == ["10.0.0.1:8000", "10.0.0.2:8000"]
        assert server.lists() == 1


async def test_410_on_resuming_means_listing_again(server: ApiServer, lists: Lists) -> None:
    await server.put("a", "10.0.0.1")
    assert await hosts(lists) == ["10.0.0.1:8000"]
    await server.delete("a")
    await server.put("b", "10.0.0.2")
    server.compact()
    assert await hosts(lists) == ["10.0.0.2:8000"]
    assert server.lists() == 2


async def test_410_inside_a_watch_means_listing_again(server: ApiServer, lists: Lists) -> None:
    await server.put("a", "10.0.0.1")
    assert await hosts(lists) == ["10.0.0.1:8000"]
    server.version += 1
    await server.tell("ERROR", GONE)
    server.slices = {"b": a_slice("b", "10.0.0.2", version=102)}
    assert await hosts(lists) == ["10.0.0.2:8000"]
    assert server.lists() == 2


async def test_bookmarks_move_the_place_to_resume_from(server: ApiServer, lists: Lists) -> None:
    assert await hosts(lists) == []
    server.version = 500
    await server.tell("BOOKMARK", a_bookmark(500))
    await server.put("a", "10.0.0.1")
    assert await hosts(lists) == ["10.0.0.1:8000"]
    await server.end_watches()
    await server.put("b", "10.0.0.2")
    await hosts(lists)
    assert server.asked[-1]["resourceVersion"] == "501"


async def test_an_event_from_the_past_changes_nothing(server: ApiServer, lists: Lists) -> None:
    await server.put("a", "10.0.0.1")
    await hosts(lists)
    await server.put("a", "10.0.0.2")
    assert await hosts(lists) == ["10.0.0.2:8000"]
    await server.delete("a")
    assert await hosts(lists) == []
    await server.tell("MODIFIED", a_slice("a", "10.0.0.9", version=101))
    await server.tell("DELETED", a_slice("b", version=50))
    await server.put("b", "10.0.0.3")
    assert await hosts(lists) == ["10.0.0.3:8000"]


async def test_endpoints_that_end_or_are_not_ready_are_left_out(server: ApiServer, lists: Lists) -> None:
    await server.put("a", "10.0.0.1", ready=False)
    await server.put("b", "10.0.0.2", ready=True, terminating=True)
    await server.put("c", "10.0.0.3", serving=True)
    await server.put("d", "fd00::1")
    assert await hosts(lists) == ["10.0.0.3:8000", "[fd00::1]:8000"]


async def test_an_endpoint_in_two_slices_is_one_node(server: ApiServer, lists: Lists) -> None:
    await server.put("a", "10.0.0.1")
    await server.put("b", "10.0.0.1", "10.0.0.2")
    assert await hosts(lists) == ["10.0.0.1:8000", "10.0.0.2:8000"]
    await server.put("a")
    await server.put("c", "10.0.0.3")
    assert await hosts(lists) == ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]


@pytest.mark.parametrize("status", [401, 403, 429, 500, 503])
async def test_a_server_that_refuses_is_asked_again_ever_more_slowly(
    server: ApiServer, lists: Lists, clock: Hasty, status: int
) -> None:
    server.refusals = [status] * (14 if status == 401 else 7)  # 401: its token may be old, it is read and sent again
    await server.put("a", "10.0.0.1")
    assert await hosts(lists) == ["10.0.0.1:8000"]
    assert clock.slept == [1, 2, 4, 8, 16, 30, 30]


async def test_garbage_in_a_watch_means_listing_again(server: ApiServer, lists: Lists) -> None:
    assert await hosts(lists) == []
    server.version += 1
    await server.send(b'{"type": "LAUGHED"}\n')
    await server.put("a", "10.0.0.1")
    assert await hosts(lists) == ["10.0.0.1:8000"]
    assert server.lists() == 2


async def test_an_empty_list_is_listed(server: ApiServer, lists: Lists) -> None:
    assert await hosts(lists) == []


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
    server: ApiServer, lists: Lists, clock: Hasty
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
    server: ApiServer, clock: Hasty, token: Path, caplog: pytest.LogCaptureFixture
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
    [said] = caplog.messages
    assert said.startswith(
        "watching EndpointSlices kubernetes.io/service-name=decode in ai: the API server answers 403"
    )
    assert "not now" in said


async def test_a_refusal_in_no_shape_at_all_is_said_too(clock: Hasty, token: Path) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 502 X\r\ncontent-length: 4\r\n\r\noops")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        api = Api(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", token)
        source = KubernetesSource(api, Query("ai", "a=b"), Template(Role.DECODE), clock)
        with pytest.raises(DiscoveryError, match=r"^the API server answers 502: oops$"):
            await source.list()
        await source.aclose()


async def test_without_a_server_or_a_token_it_says_what_is_missing(clock: Hasty, tmp_path: Path) -> None:
    for token, said in ((None, "ConnectError"), (tmp_path / "absent", "absent")):
        source = KubernetesSource(Api("http://127.0.0.1:1", token), Query("ai", "a=b"), Template(Role.DECODE), clock)
        with pytest.raises(DiscoveryError, match=said):
            await source.list()
        await source.aclose()


async def test_a_whole_selector_is_sent_as_it_is(server: ApiServer, clock: Hasty) -> None:
    selector = "app in (a,b),!canary,tier!=gold"
    source = KubernetesSource(Api(server.url), Query("ai", selector), Template(Role.DECODE), clock)
    await source.list()
    await source.aclose()
    assert server.asked[0]["labelSelector"] == selector
    assert server.asked[0]["authorization"] == ""


async def test_an_https_server_is_trusted_by_the_clusters_authorities_alone(clock: Hasty, token: Path) -> None:
    async with ApiServer(tls=serving()) as server:
        await server.put("a", "127.0.0.9")
        query, template = Query("ai", "a=b"), Template(Role.DECODE)
        trusting = KubernetesSource(Api(server.url, token, CERTIFICATE), query, template, clock)
        assert [node.url for node in await trusting.list()] == ["http://127.0.0.9:8000"]
        await trusting.aclose()
        assert server.asked[0]["authorization"] == "Bearer token"
        wary = KubernetesSource(Api(server.url, token), query, template, clock)
        with pytest.raises(DiscoveryError, match="CERTIFICATE_VERIFY_FAILED"):
            await wary.list()
        await wary.aclose()
        assert len(server.asked) == 1
