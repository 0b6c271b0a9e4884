"""Watching EndpointSlices on a small API server, through the proxy's own transport."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from pdproxy.clock import SystemClock
from pdproxy.nodes.discovery.kubernetes import KubernetesSource, Query, WatchRules
from pdproxy.nodes.discovery.source import Template
from pdproxy.nodes.node import Node, Role
from pdproxy.transport.http import HttpTransport
from tests.nodes.discovery.apiserver import GONE, ApiServer, a_slice

Sightings = AsyncGenerator[tuple[Node, ...], None]


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


@contextlib.asynccontextmanager
async def watching(server: ApiServer, clock: Hasty, rules: WatchRules) -> AsyncIterator[Sightings]:
    """What a source sees, which leaves no connection behind."""
    transport = HttpTransport(SystemClock())
    query = Query(server.url, "ai", "kubernetes.io/service-name=decode", "http")
    source = KubernetesSource(transport, query, Template(Role.DECODE), lambda: "token", clock, rules)
    async with contextlib.aclosing(source.watch()) as made:
        yield made
    await transport.aclose()
    assert transport.connections == 0


@pytest.fixture
async def sightings(server: ApiServer, clock: Hasty) -> AsyncIterator[Sightings]:
    async with watching(server, clock, WatchRules()) as made:
        yield made


async def hosts(sightings: Sightings) -> list[str]:
    """The next sighting's addresses; the limit only ends a hang."""
    async with asyncio.timeout(60):
        return [node.url.removeprefix("http://") for node in await anext(sightings)]


async def test_it_lists_then_watches(server: ApiServer, sightings: Sightings) -> None:
    await server.put("a", "10.0.0.1", "10.0.0.2")
    assert await hosts(sightings) == ["10.0.0.1:8000", "10.0.0.2:8000"]
    await server.put("b", "10.0.0.3")
    assert await hosts(sightings) == ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]
    await server.put("a", "10.0.0.2")
    assert await hosts(sightings) == ["10.0.0.2:8000", "10.0.0.3:8000"]
    await server.delete("b")
    assert await hosts(sightings) == ["10.0.0.2:8000"]
    assert server.lists() == 1


async def test_it_asks_as_the_api_wants_to_be_asked(server: ApiServer, sightings: Sightings) -> None:
    await hosts(sightings)
    await server.put("a", "10.0.0.1")
    await hosts(sightings)
    listed, watched = server.asked
    assert listed["path"] == "/apis/discovery.k8s.io/v1/namespaces/ai/endpointslices"
    assert listed["labelSelector"] == "kubernetes.io/service-name=decode"
    assert listed["authorization"] == watched["authorization"] == "Bearer token"
    assert (watched["watch"], watched["resourceVersion"], watched["allowWatchBookmarks"]) == ("1", "100", "true")
    assert int(watched["timeoutSeconds"]) > 0


async def test_a_watch_that_ends_is_resumed_where_it_was(server: ApiServer, sightings: Sightings) -> None:
    assert await hosts(sightings) == []
    await server.put("a", "10.0.0.1")
    assert await hosts(sightings) == ["10.0.0.1:8000"]
    await server.end_watches()
    await server.put("b", "10.0.0.2")
    assert await hosts(sightings) == ["10.0.0.1:8000", "10.0.0.2:8000"]
    assert server.lists() == 1
    assert server.asked[-1]["resourceVersion"] == "101"


async def test_a_cut_connection_loses_no_event(server: ApiServer, sightings: Sightings) -> None:
    assert await hosts(sightings) == []
    await server.put("a", "10.0.0.1")
    assert await hosts(sightings) == ["10.0.0.1:8000"]
    await server.cut()
    await server.put("a", "10.0.0.1", "10.0.0.2")
    assert await hosts(sightings) == ["10.0.0.1:8000", "10.0.0.2:8000"]
    assert server.lists() == 1


async def test_a_watch_that_is_silent_beyond_its_time_is_dead_and_loses_no_event(
    server: ApiServer, clock: Hasty
) -> None:
    async with watching(server, clock, WatchRules(lasts=1, slack=0.2)) as sightings:
        assert await hosts(sightings) == []
        await server.put("a", "10.0.0.1")
        assert await hosts(sightings) == ["10.0.0.1:8000"]
        server.fall_silent()
        await server.put("b", "10.0.0.2")
        assert await hosts(sightings) == ["10.0.0.1:8000", "10.0.0.2:8000"]
        assert server.lists() == 1


async def test_410_on_resuming_means_listing_again(server: ApiServer, sightings: Sightings) -> None:
    await server.put("a", "10.0.0.1")
    assert await hosts(sightings) == ["10.0.0.1:8000"]
    await server.delete("a")
    await server.put("b", "10.0.0.2")
    server.compact()
    assert await hosts(sightings) == ["10.0.0.2:8000"]
    assert server.lists() == 2


async def test_410_inside_a_watch_means_listing_again(server: ApiServer, sightings: Sightings) -> None:
    await server.put("a", "10.0.0.1")
    assert await hosts(sightings) == ["10.0.0.1:8000"]
    server.version += 1
    await server.tell("ERROR", GONE)
    server.slices = {"b": a_slice("b", "10.0.0.2", version=102)}
    assert await hosts(sightings) == ["10.0.0.2:8000"]
    assert server.lists() == 2


async def test_bookmarks_move_the_place_to_resume_from(server: ApiServer, sightings: Sightings) -> None:
    assert await hosts(sightings) == []
    server.version = 500
    await server.tell("BOOKMARK", {"metadata": {"resourceVersion": "500"}})
    await server.put("a", "10.0.0.1")
    assert await hosts(sightings) == ["10.0.0.1:8000"]
    await server.end_watches()
    await server.put("b", "10.0.0.2")
    await hosts(sightings)
    assert server.asked[-1]["resourceVersion"] == "501"


async def test_an_event_from_the_past_changes_nothing(server: ApiServer, sightings: Sightings) -> None:
    await server.put("a", "10.0.0.1")
    await hosts(sightings)
    await server.put("a", "10.0.0.2")
    assert await hosts(sightings) == ["10.0.0.2:8000"]
    await server.delete("a")
    assert await hosts(sightings) == []
    await server.tell("MODIFIED", a_slice("a", "10.0.0.9", version=101))
    await server.tell("DELETED", a_slice("b", version=50))
    await server.put("b", "10.0.0.3")
    assert await hosts(sightings) == ["10.0.0.3:8000"]


async def test_endpoints_that_end_or_are_not_ready_are_left_out(server: ApiServer, sightings: Sightings) -> None:
    await server.put("a", "10.0.0.1", ready=False)
    await server.put("b", "10.0.0.2", ready=True, terminating=True)
    await server.put("c", "10.0.0.3", serving=True)
    await server.put("d", "fd00::1")
    assert await hosts(sightings) == ["10.0.0.3:8000", "[fd00::1]:8000"]


async def test_an_endpoint_in_two_slices_is_one_node(server: ApiServer, sightings: Sightings) -> None:
    await server.put("a", "10.0.0.1")
    await server.put("b", "10.0.0.1", "10.0.0.2")
    assert await hosts(sightings) == ["10.0.0.1:8000", "10.0.0.2:8000"]
    await server.put("a")
    await server.put("c", "10.0.0.3")
    assert await hosts(sightings) == ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]


@pytest.mark.parametrize("status", [401, 403, 429, 500, 503])
async def test_a_server_that_refuses_is_asked_again_ever_more_slowly(
    server: ApiServer, sightings: Sightings, clock: Hasty, status: int
) -> None:
    server.refusals = [status] * 7
    await server.put("a", "10.0.0.1")
    assert await hosts(sightings) == ["10.0.0.1:8000"]
    assert clock.slept == [1, 2, 4, 8, 16, 30, 30]


async def test_garbage_in_a_watch_means_listing_again(server: ApiServer, sightings: Sightings) -> None:
    assert await hosts(sightings) == []
    server.version += 1
    await server.send(b'{"type": "LAUGHED"}\n')
    await server.put("a", "10.0.0.1")
    assert await hosts(sightings) == ["10.0.0.1:8000"]
    assert server.lists() == 2


async def test_an_empty_list_is_a_sighting(server: ApiServer, sightings: Sightings) -> None:
    assert await hosts(sightings) == []
