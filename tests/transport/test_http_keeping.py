"""Which connections are kept for the next request, and what becomes of one that meets a closing connection."""

import asyncio

from pdproxy.errors import Fault
from pdproxy.transport.h1_client import KEEP, STALE, H1Transport
from tests.transport.asking import HandClock, ask, fault_of, post
from tests.transport.peer import Visit, always, answer, hanging_up_after, peer, saying


async def test_one_connection_serves_many_requests(transport: H1Transport) -> None:
    async with peer(always(b"yes")) as there:
        for _ in range(20):
            assert await ask(transport, post(there)) == (200, b"yes")
        assert len(there.visits) == 1
        assert len(there.visits[0].heads) == 20


async def test_concurrent_requests_get_connections_of_their_own(transport: H1Transport) -> None:
    async with peer(always(b"yes")) as there:
        answers = await asyncio.gather(*(ask(transport, post(there)) for _ in range(8)))
        assert answers == [(200, b"yes")] * 8
        assert len(there.visits) == 8
        assert transport.connections == 8


async def test_a_connection_that_the_peer_wants_closed_is_not_used_again(transport: H1Transport) -> None:
    async with peer(always(b"yes", b"Connection: close")) as there:
        await ask(transport, post(there))
        await there.all_gone()
        await ask(transport, post(there))
        assert len(there.visits) == 2


async def test_a_connection_with_bytes_beyond_its_response_is_not_used_again(transport: H1Transport) -> None:
    async with peer(saying(answer(b"yes") + answer(b"nobody asked")), always(b"right")) as there:
        assert await ask(transport, post(there)) == (200, b"yes")
        assert await ask(transport, post(there)) == (200, b"right")


async def test_a_connection_closed_while_idle_is_not_a_fault(transport: H1Transport) -> None:
    async with peer(hanging_up_after(answer(b"first")), always(b"second")) as there:
        assert await ask(transport, post(there)) == (200, b"first")
        await there.all_gone()
        assert await ask(transport, post(there)) == (200, b"second")


async def after_one(visit: Visit) -> None:
    """Answer once; hang up on the next request, as a keep-alive timer does that goes off as it arrives."""
    await visit.request()
    await visit.say(answer(b"first"))
    await visit.request()


async def test_a_request_on_a_closing_connection_is_sent_again(transport: H1Transport, clock: HandClock) -> None:
    async with peer(after_one, always(b"second")) as there:
        await ask(transport, post(there))
        await clock.sleep(STALE)
        assert await ask(transport, post(there, b"once more")) == (200, b"second")
        assert there.visits[1].bodies == [b"once more"]


async def test_a_request_lost_on_a_busy_connection_is_a_reset(transport: H1Transport) -> None:
    async with peer(after_one, always(b"second")) as there:
        await ask(transport, post(there))
        assert await fault_of(transport, post(there)) is Fault.RESET
        assert len(there.visits) == 1


async def test_a_request_whose_response_has_begun_is_never_sent_again(transport: H1Transport, clock: HandClock) -> None:
    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.say(answer(b"first"))
        await visit.request()
        await visit.say(b"HTTP/1.1 2")

    async with peer(script, always(b"second")) as there:
        await ask(transport, post(there))
        await clock.sleep(STALE)
        assert await fault_of(transport, post(there)) is Fault.RESET
        assert len(there.visits) == 1


async def test_a_connection_that_idled_too_long_is_dropped(transport: H1Transport, clock: HandClock) -> None:
    async with peer(always(b"yes")) as there:
        await ask(transport, post(there))
        await clock.sleep(KEEP)
        await ask(transport, post(there))
        assert len(there.visits) == 2
        assert transport.connections == 1
