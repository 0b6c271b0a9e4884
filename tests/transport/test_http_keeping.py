"""Which connections are kept for the next request."""

import asyncio
import os
import socket

import msgspec

from pdproxy.transport.h1_client import KEEP, H1Transport
from tests.transport.asking import PATIENT, HandClock, ask, post
from tests.transport.peer import Script, Visit, always, answer, hanging_up_after, peer, saying


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


async def test_a_connection_that_idled_too_long_is_dropped(transport: H1Transport, clock: HandClock) -> None:
    async with peer(always(b"yes")) as there:
        await ask(transport, post(there))
        await clock.sleep(KEEP)
        await ask(transport, post(there))
        assert len(there.visits) == 2
        assert transport.connections == 1


def closing_after_error(status: bytes) -> Script:
    """Answer once with an error, and reset the connection on the next request, as uvicorn does after an unhandled
    exception: it does not say `Connection: close`."""

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.say(answer(b"no", status=status))
        visit.bodies.append(await visit.reader.read(1))

    return script


async def test_a_connection_is_not_used_again_after_a_5xx(transport: H1Transport) -> None:
    for status in (b"500 X", b"502 X", b"503 X", b"599 X"):
        async with peer(closing_after_error(status), always(b"second")) as there:
            assert await ask(transport, post(there)) == (int(status[:3]), b"no")
            assert await ask(transport, post(there)) == (200, b"second")
            await there.visits[0].over.wait()
            assert there.visits[0].bodies[1:] == [b""]


async def test_a_connection_is_used_again_after_a_4xx(transport: H1Transport) -> None:
    async with peer(always(b"no", status=b"404 X")) as there:
        for _ in range(3):
            assert await ask(transport, post(there)) == (404, b"no")
        assert len(there.visits) == 1


async def test_a_connection_is_not_used_again_after_http_1_0(transport: H1Transport) -> None:
    async with peer(hanging_up_after(answer(b"old").replace(b"HTTP/1.1", b"HTTP/1.0")), always(b"second")) as there:
        assert await ask(transport, post(there)) == (200, b"old")
        assert await ask(transport, post(there)) == (200, b"second")


async def test_bytes_that_come_while_a_connection_idles_end_it(transport: H1Transport) -> None:
    async def unasked(visit: Visit) -> None:
        await visit.request()
        await visit.say(answer(b"first"))
        await visit.say(answer(b"late", b"Connection: close", status=b"408 Request Timeout"))
        await visit.until_gone()

    async with peer(unasked, always(b"second")) as there:
        assert await ask(transport, post(there)) == (200, b"first")
        await there.all_gone()
        assert await ask(transport, post(there)) == (200, b"second")


def at_far_end(visit: Visit) -> socket.socket:
    """The peer's socket, used beside its event loop: what is done with it comes in this very turn of ours."""
    return socket.socket(fileno=os.dup(visit.writer.get_extra_info("socket").fileno()))


async def test_an_end_of_which_the_loop_has_not_told_yet_is_seen(transport: H1Transport) -> None:
    """Otherwise a POST would be sent twice."""
    async with peer(always(b"first"), always(b"second")) as there:
        sent_again: list[bool] = []
        assert await ask(transport, post(there)) == (200, b"first")
        with at_far_end(there.visits[0]) as far_end:
            far_end.shutdown(socket.SHUT_WR)
        request = msgspec.structs.replace(post(there), on_resend=lambda: sent_again.append(True))
        assert await ask(transport, request) == (200, b"second")
        assert not sent_again


async def test_bytes_of_which_the_loop_has_not_told_yet_are_no_answer_to_the_next_request(
    transport: H1Transport,
) -> None:
    async with peer(always(b"first"), always(b"second")) as there:
        assert await ask(transport, post(there)) == (200, b"first")
        with at_far_end(there.visits[0]) as far_end:
            far_end.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nwrong")
        assert await ask(transport, post(there)) == (200, b"second")


async def test_an_early_answer_is_read_though_the_request_is_still_being_written(transport: H1Transport) -> None:
    """Its connection, which has half a request on it, is not used again."""

    async def refuses(visit: Visit) -> None:
        await visit.reader.readuntil(b"\r\n\r\n")
        await visit.say(answer(b"too much", status=b"413 X"))

    async with peer(refuses, always(b"second")) as there:
        assert await ask(transport, post(there, b"x" * 2**24)) == (413, b"too much")
        assert await ask(transport, post(there)) == (200, b"second")


async def test_a_body_that_is_here_with_its_head_is_taken_as_a_whole(transport: H1Transport) -> None:
    async with peer(always(b"yes")) as there:
        response = await transport.send(post(there), PATIENT)
        assert response.take_whole() == b"yes"
        assert [piece async for piece in response] == []
        await response.aclose()
        assert await ask(transport, post(there)) == (200, b"yes")
        assert len(there.visits) == 1
