"""Failures of a peer, and their faults."""

import asyncio

import pytest

from pdproxy.errors import Fault, NodeFault
from pdproxy.transport.h1_client import H1Transport
from pdproxy.transport.port import HttpRequest, Timeouts
from tests.transport.asking import CHUNKED, PATIENT, collect, fault_of, post
from tests.transport.peer import GENEROUS, Visit, always, answer, hanging_up_after, peer, saying


async def test_a_closed_port_is_refused(transport: H1Transport) -> None:
    async with peer(always(b"")) as there:
        pass
    assert await fault_of(transport, post(there)) is Fault.REFUSED


@pytest.mark.parametrize("host", ["a..b", ".", "x" * 64 + ".invalid"])
async def test_an_unknown_host_name_is_refused(transport: H1Transport, host: str) -> None:
    assert await fault_of(transport, HttpRequest("GET", f"http://{host}:1/")) is Fault.REFUSED


async def test_a_peer_that_closes_without_a_response_is_a_reset(transport: H1Transport) -> None:
    async with peer(hanging_up_after()) as there:
        assert await fault_of(transport, post(there)) is Fault.RESET


@pytest.mark.parametrize(
    "sent",
    [answer(b"0123456789")[:-1], CHUNKED + b"5\r\nhello\r\n", CHUNKED + b"5\r\nhel"],
    ids=["length", "end", "in"],
)
async def test_a_body_that_ends_before_its_end_is_a_reset(transport: H1Transport, sent: bytes) -> None:
    async with peer(hanging_up_after(sent)) as there:
        response = await transport.send(post(there), PATIENT)
        heard: list[bytes] = []
        with pytest.raises(NodeFault) as caught:
            await collect(response, heard)
        await response.aclose()
    assert caught.value.fault is Fault.RESET
    assert b"".join(heard) in (b"012345678", b"hello", b"hel")


@pytest.mark.parametrize(
    "sent",
    [
        b"220 smtp.example ESMTP\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: identity\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 300_000,
        b"HTTP/1.1 102 Processing\r\n\r\n" * 10_000,
        CHUNKED + b"nonsense\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
async def test_what_is_not_http_is_a_reset(transport: H1Transport, sent: bytes) -> None:
    async with peer(saying(sent)) as there:
        assert await fault_of(transport, post(there)) is Fault.RESET
        await there.all_gone()


async def test_a_peer_that_never_answers_times_out(transport: H1Transport) -> None:
    async with peer(saying()) as there:
        timeouts = Timeouts(GENEROUS, headers=0.05, stall=GENEROUS)
        assert await fault_of(transport, post(there), timeouts) is Fault.HEADERS_TIMEOUT
        await there.all_gone()


async def test_a_head_that_drips_times_out(transport: H1Transport) -> None:
    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.say(b"HTTP/1.1 200 OK\r\nX: ")
        while True:
            await visit.say(b"x")
            await asyncio.sleep(0.01)

    async with peer(script) as there:
        timeouts = Timeouts(GENEROUS, headers=0.2, stall=GENEROUS)
        assert await fault_of(transport, post(there), timeouts) is Fault.HEADERS_TIMEOUT
        await there.all_gone()


async def test_a_body_that_stops_is_a_stall(transport: H1Transport) -> None:
    async with peer(saying(CHUNKED + b"5\r\nhello\r\n")) as there:
        response = await transport.send(post(there), Timeouts(GENEROUS, GENEROUS, stall=0.05))
        pieces = aiter(response)
        assert await anext(pieces) == b"hello"
        with pytest.raises(NodeFault) as caught:
            await anext(pieces)
        await response.aclose()
        await there.all_gone()
    assert caught.value.fault is Fault.STALL


async def test_the_pieces_that_follow_have_the_usual_one(transport: H1Transport) -> None:
    async with peer(saying(CHUNKED + b"2\r\nab\r\n")) as there:
        response = await transport.send(post(there), Timeouts(GENEROUS, GENEROUS, stall=0.05, first=GENEROUS))
        pieces = aiter(response)
        assert await anext(pieces) == b"ab"
        with pytest.raises(NodeFault, match=r"0\.05 s"):
            await anext(pieces)
        await response.aclose()
        await there.all_gone()


@pytest.mark.parametrize("step", [0.0, 0.01])
async def test_a_body_that_drips_times_out(transport: H1Transport, step: float) -> None:
    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.say(CHUNKED)
        while True:
            await visit.say(b"1\r\nx\r\n")
            await asyncio.sleep(step)

    async with peer(script) as there:
        timeouts = Timeouts(GENEROUS, headers=GENEROUS, stall=GENEROUS, whole=0.2)
        assert await fault_of(transport, post(there), timeouts) is Fault.STALL
        await there.all_gone()


async def test_the_whole_begins_with_the_head(transport: H1Transport) -> None:
    async with peer(saying()) as there:
        timeouts = Timeouts(GENEROUS, headers=GENEROUS, stall=GENEROUS, whole=0.05)
        assert await fault_of(transport, post(there), timeouts) is Fault.HEADERS_TIMEOUT
        await there.all_gone()


async def test_the_first_piece_has_a_timeout_of_its_own(transport: H1Transport) -> None:
    async with peer(saying(CHUNKED)) as there:
        response = await transport.send(post(there), Timeouts(GENEROUS, GENEROUS, stall=GENEROUS, first=0.05))
        with pytest.raises(NodeFault, match=r"0\.05 s") as caught:
            await anext(aiter(response))
        await response.aclose()
        await there.all_gone()
    assert caught.value.fault is Fault.STALL
