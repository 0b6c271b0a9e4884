"""A request that its node keeps waiting: its deadlines begin when the hold ends."""

import asyncio

import pytest

from pdproxy.errors import Fault, NodeFault
from pdproxy.transport.h1_client import H1Transport
from pdproxy.transport.port import DeadlineHold, Timeouts, read_to_end
from tests.transport.asking import CHUNKED, ask, fault_of, post
from tests.transport.peer import GENEROUS, Visit, answer, peer, saying

SHORT = 0.05


def timeouts(hold: DeadlineHold, whole: float = GENEROUS) -> Timeouts:
    return Timeouts(GENEROUS, headers=SHORT, stall=GENEROUS, first=SHORT, whole=whole, hold=hold)


async def late(visit: Visit) -> None:
    """The head, and the first piece, much later than the deadlines allow."""
    await visit.request()
    await asyncio.sleep(4 * SHORT)
    await visit.say(CHUNKED)
    await asyncio.sleep(4 * SHORT)
    await visit.say(b"5\r\nhello\r\n")
    await visit.until_gone()


async def test_while_it_is_held_no_deadline_runs(transport: H1Transport) -> None:
    async with peer(late) as there:
        response = await transport.send(post(there), timeouts(DeadlineHold()))
        assert await anext(aiter(response)) == b"hello"
        await response.aclose()
        await there.all_gone()


async def test_the_deadline_for_the_head_begins_with_its_end(transport: H1Transport) -> None:
    hold = DeadlineHold()
    async with peer(saying()) as there:
        asking = asyncio.create_task(fault_of(transport, post(there), timeouts(hold)))
        await asyncio.sleep(4 * SHORT)
        assert not asking.done()
        hold.release()
        assert await asking is Fault.HEADERS_TIMEOUT
        await there.all_gone()


async def test_the_deadline_for_the_first_piece_begins_with_its_end(transport: H1Transport) -> None:
    hold = DeadlineHold()
    async with peer(saying(CHUNKED)) as there:
        response = await transport.send(post(there), timeouts(hold))
        reading = asyncio.ensure_future(read_to_end(response, 100))
        await asyncio.sleep(4 * SHORT)
        assert not reading.done()
        hold.release()
        with pytest.raises(NodeFault, match=r"0\.05 s") as caught:
            await reading
        await response.aclose()
        await there.all_gone()
    assert caught.value.fault is Fault.STALL


async def test_a_hold_that_ended_before_the_request_holds_nothing(transport: H1Transport) -> None:
    hold = DeadlineHold()
    hold.release()
    hold.release()
    async with peer(saying()) as there:
        assert await fault_of(transport, post(there), timeouts(hold)) is Fault.HEADERS_TIMEOUT
        await there.all_gone()


async def test_the_whole_is_not_held(transport: H1Transport) -> None:
    async with peer(saying()) as there:
        assert await fault_of(transport, post(there), timeouts(DeadlineHold(), whole=SHORT)) is Fault.HEADERS_TIMEOUT
        await there.all_gone()


async def test_a_hold_that_ends_late_leaves_the_next_request_alone(transport: H1Transport) -> None:
    first, second = DeadlineHold(), DeadlineHold()
    async with peer(answering_then_silent) as there:
        assert await ask(transport, post(there), timeouts(first)) == (200, b"hi")
        asking = asyncio.create_task(fault_of(transport, post(there), timeouts(second)))
        await asyncio.sleep(SHORT)
        assert len(there.visits) == 1, "the connection was kept"
        first.release()
        await asyncio.sleep(4 * SHORT)
        assert not asking.done()
        second.release()
        assert await asking is Fault.HEADERS_TIMEOUT
        await there.all_gone()


async def answering_then_silent(visit: Visit) -> None:
    await visit.request()
    await visit.say(answer(b"hi"))
    await visit.request()
    await visit.until_gone()
