"""Watching EndpointSlices: events, resuming, listing again."""

from pathlib import Path

from pdproxy.nodes.discovery.source import TerminatingNode
from tests.nodes.discovery.apiserver import GONE, ApiServer, a_bookmark, a_slice
from tests.nodes.discovery.watching import Lists, NoWaitClock, hosts, watching


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
    server: ApiServer, clock: NoWaitClock, token: Path
) -> None:
    async with watching(server, clock, token, watch_seconds=1, slack=0.2) as lists:
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
    await server.send_event("ERROR", GONE)
    server.slices = {"b": a_slice("b", "10.0.0.2", version=102)}
    assert await hosts(lists) == ["10.0.0.2:8000"]
    assert server.lists() == 2


async def test_bookmarks_move_the_place_to_resume_from(server: ApiServer, lists: Lists) -> None:
    assert await hosts(lists) == []
    server.version = 500
    await server.send_event("BOOKMARK", a_bookmark(500))
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
    await server.send_event("MODIFIED", a_slice("a", "10.0.0.9", version=101))
    await server.send_event("DELETED", a_slice("b", version=50))
    await server.put("b", "10.0.0.3")
    assert await hosts(lists) == ["10.0.0.3:8000"]


async def test_endpoints_that_end_or_are_not_ready_are_left_out(server: ApiServer, lists: Lists) -> None:
    await server.put("a", "10.0.0.1", ready=False)
    await server.put("b", "10.0.0.2", ready=False, serving=False, terminating=True)
    await server.put("c", "10.0.0.3", serving=True)
    await server.put("d", "fd00::1")
    assert await hosts(lists) == ["10.0.0.3:8000", "[fd00::1]:8000"]


async def test_an_endpoint_that_ends_is_listed_as_such_while_it_serves(server: ApiServer, lists: Lists) -> None:
    await server.put("a", "10.0.0.1")
    assert await hosts(lists) == ["10.0.0.1:8000"]
    await server.put("a", "10.0.0.1", ready=False, serving=True, terminating=True)
    [node] = await anext(lists)
    assert (type(node), node.url) == (TerminatingNode, "http://10.0.0.1:8000")
    await server.put("a", "10.0.0.1", ready=False, serving=False, terminating=True)
    assert await hosts(lists) == []


async def test_an_endpoint_in_two_slices_is_one_node(server: ApiServer, lists: Lists) -> None:
    await server.put("a", "10.0.0.1")
    await server.put("b", "10.0.0.1", "10.0.0.2")
    assert await hosts(lists) == ["10.0.0.1:8000", "10.0.0.2:8000"]
    await server.put("a")
    await server.put("c", "10.0.0.3")
    assert await hosts(lists) == ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]


async def test_garbage_in_a_watch_means_listing_again(server: ApiServer, lists: Lists) -> None:
    assert await hosts(lists) == []
    server.version += 1
    await server.send(b'{"type": "LAUGHED"}\n')
    await server.put("a", "10.0.0.1")
    assert await hosts(lists) == ["10.0.0.1:8000"]
    assert server.lists() == 2


async def test_an_empty_list_is_listed(server: ApiServer, lists: Lists) -> None:
    assert await hosts(lists) == []
