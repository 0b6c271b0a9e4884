"""Cancelled or closed at any moment: no connection is left behind, and no other request is disturbed."""

import asyncio
import contextlib
import gc

import pytest
from opentelemetry import trace

from pdproxy.errors import Fault, NodeFault
from pdproxy.transport.h1_client import H1Transport
from pdproxy.transport.h1_connection import H1Connection
from pdproxy.transport.port import read_to_end
from pdproxy.transport.traced import TracedTransport
from tests.transport.asking import CHUNKED, PATIENT, ask, post
from tests.transport.peer import Visit, always, peer, saying


async def test_a_cancelled_send_leaves_nothing(transport: H1Transport) -> None:
    asked = asyncio.Event()

    async def script(visit: Visit) -> None:
        await visit.request()
        asked.set()
        await visit.until_gone()

    async with peer(script) as there:
        task = asyncio.create_task(transport.send(post(there), PATIENT))
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await there.all_gone()
        assert transport.connections == 0


async def test_a_send_cancelled_at_any_turn_of_the_loop_leaves_nothing(transport: H1Transport) -> None:
    async with peer(always(b"yes", b"Connection: close")) as there:
        for turns in range(12):
            task = asyncio.create_task(ask(transport, post(there)))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await there.all_gone()
    await transport.aclose()
    assert transport.connections == 0


@pytest.mark.parametrize("traced", [False, True], ids=["bare", "traced"])
async def test_a_cancelled_read_loses_nothing(transport: H1Transport, traced: bool) -> None:
    go_on = asyncio.Event()

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.say(CHUNKED)
        await go_on.wait()
        await visit.say(b"5\r\nhello\r\n0\r\n\r\n")
        await visit.until_gone()

    async with peer(script) as there:
        with trace.use_span(trace.NonRecordingSpan(trace.SpanContext(1, 1, is_remote=False))):
            through = TracedTransport(transport, trace.NoOpTracer()) if traced else transport
            response = await through.send(post(there), PATIENT)
        pieces = aiter(response)
        reading = asyncio.ensure_future(anext(pieces, b"over"))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        go_on.set()
        assert await anext(pieces, b"over") == b"hello"
        assert await anext(pieces, b"over") == b"over"
        await response.aclose()


async def test_closing_before_the_end_cuts_the_connection(transport: H1Transport) -> None:
    async with peer(saying(CHUNKED, b"5\r\nhello\r\n")) as there:
        response = await transport.send(post(there), PATIENT)
        assert await anext(aiter(response)) == b"hello"
        await response.aclose()
        await response.aclose()
        await there.all_gone()
        with pytest.raises(StopAsyncIteration):
            await anext(aiter(response))


async def test_closing_under_a_reader_wakes_it(transport: H1Transport) -> None:
    async with peer(saying(CHUNKED)) as there:
        response = await transport.send(post(there), PATIENT)
        reading = asyncio.create_task(read_to_end(response, 10))
        await asyncio.sleep(0)
        await response.aclose()
        with pytest.raises(NodeFault) as caught:
            await reading
    assert caught.value.fault is Fault.RESET


async def test_closing_a_response_twice_does_not_touch_the_next_one_on_its_connection(transport: H1Transport) -> None:
    async with peer(always(b"yes")) as there:
        first = await transport.send(post(there), PATIENT)
        await read_to_end(first, 3)
        await first.aclose()
        second = await transport.send(post(there), PATIENT)
        await first.aclose()
        assert await read_to_end(first, 3) == b""
        assert await read_to_end(second, 3) == b"yes"
        await second.aclose()
        assert len(there.visits) == 1


async def test_closing_the_transport_ends_what_is_under_way(transport: H1Transport) -> None:
    async with peer(saying(CHUNKED)) as there:
        response = await transport.send(post(there), PATIENT)
        await transport.aclose()
        with pytest.raises(NodeFault):
            await read_to_end(response, 1)
        await response.aclose()
        await there.all_gone()


@pytest.mark.usefixtures("no_collector")
async def test_a_closed_connection_is_freed_without_the_collector(transport: H1Transport) -> None:
    async with peer(saying(CHUNKED, b"5\r\nhello\r\n")) as there:
        for _ in range(3):
            response = await transport.send(post(there), PATIENT)
            assert await anext(aiter(response)) == b"hello"
            await response.aclose()
        del response
        await there.all_gone()
    await asyncio.sleep(0.01)
    assert [each for each in gc.get_objects() if type(each) is H1Connection] == []
