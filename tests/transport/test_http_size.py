"""Big bodies and slow readers: memory stays bounded, and nothing times out."""

import asyncio

import pytest

from pdproxy.errors import Fault, NodeFault
from pdproxy.transport.h1_client import H1Transport
from pdproxy.transport.port import Timeouts, read_to_end
from tests.transport.asking import CHUNKED, PATIENT, ask, post
from tests.transport.peer import GENEROUS, Visit, always, answer, peer, saying


async def test_a_body_longer_than_allowed_is_invalid(transport: H1Transport) -> None:
    async with peer(saying(answer(b"x" * 11))) as there:
        response = await transport.send(post(there), PATIENT)
        with pytest.raises(NodeFault) as caught:
            await read_to_end(response, 10)
        await response.aclose()
    assert caught.value.fault is Fault.INVALID_BODY


async def test_a_big_body_goes_out_whole(transport: H1Transport) -> None:
    big = bytes(range(256)) * 65536
    async with peer(always(b"got it")) as there:
        assert await ask(transport, post(there, big)) == (200, b"got it")
        assert there.visits[0].bodies == [big]
        assert await ask(transport, post(there)) == (200, b"got it")
        assert len(there.visits) == 1


async def test_a_slow_reader_is_not_a_stall(transport: H1Transport) -> None:
    async with peer(saying(CHUNKED + b"5\r\nhello\r\n0\r\n\r\n")) as there:  # all in one packet
        response = await transport.send(post(there), Timeouts(GENEROUS, GENEROUS, stall=0.01))
        await asyncio.sleep(0.1)
        assert await read_to_end(response, 5) == b"hello"
        await response.aclose()


async def test_a_slow_reader_makes_the_peer_wait(transport: H1Transport) -> None:
    total = 64 * 2**20
    block = b"x" * 2**16
    sent = 0

    async def script(visit: Visit) -> None:
        nonlocal sent
        await visit.request()
        await visit.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
        while sent < total:
            visit.writer.write(block)
            sent += len(block)
            await visit.writer.drain()
        await visit.until_gone()

    async with peer(script) as there:
        response = await transport.send(post(there), PATIENT)
        before = -1
        while before < sent:  # until the peer is stuck
            before = sent
            await asyncio.sleep(0.2)
        assert sent < total // 2
        size = 0
        async for piece in response:
            size += len(piece)
        await response.aclose()
        assert size == total
        assert transport.connections == 1


async def test_an_early_answer_to_a_body_that_is_not_read(transport: H1Transport) -> None:
    async def script(visit: Visit) -> None:
        await visit.reader.readuntil(b"\r\n\r\n")
        await visit.say(answer(b"too large", status=b"413 Too Large"))
        await visit.until_gone()

    async with peer(script) as there:
        response = await transport.send(post(there, b"x" * 2**26), PATIENT)
        assert response.status == 413
        assert await read_to_end(response, 100) == b"too large"
        await response.aclose()
        await there.all_gone()
        assert transport.connections == 0
