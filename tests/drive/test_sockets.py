"""A few cells of the matrix over real sockets: the fakes in memory must not be all that works."""

import asyncio

import pytest

from pdproxy.drive.reply import Reply
from pdproxy.request import ClientRequest, Endpoint
from tests.drive.answers import story
from tests.drive.prompts import body_for, right
from tests.drive.town import PATIENT, Town, town
from tests.drive.world import MODEL, read
from tests.fakes.faults import Ill, Trouble


def _request(endpoint: Endpoint, *, stream: bool, tokens: int = 8) -> ClientRequest:
    now = asyncio.get_running_loop().time()
    body = {"model": MODEL, **body_for(endpoint, stream=stream, tokens=tokens)}
    return ClientRequest("r-1", endpoint, body, (), MODEL, stream, 0, now, now + PATIENT)


async def _ask(place: Town, endpoint: Endpoint, *, stream: bool) -> tuple[Reply, bytes]:
    reply = await place.orchestrator.answer(_request(endpoint, stream=stream))
    return reply, await read(reply)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("endpoint", Endpoint)
async def test_healthy(endpoint: Endpoint, stream: bool) -> None:
    async with town() as place:
        for _ in range(3):
            reply, body = await _ask(place, endpoint, stream=stream)
            assert reply.status == 200
        if stream:
            assert story(endpoint, body).texts[0] == right(endpoint)
        await place.close()


@pytest.mark.parametrize(
    ("role", "trouble"),
    [
        ("p", Trouble(Ill.RESET, times=1)),
        ("p", Trouble(Ill.STATUS, status=500, times=1)),
        ("d", Trouble(Ill.RESET, times=1)),
        ("d", Trouble(Ill.RESET, at=0, times=1)),
        ("d", Trouble(Ill.RESET, at=3, times=1)),
        ("d", Trouble(Ill.SHORT, at=3, times=1)),
        ("d", Trouble(Ill.ERROR_EVENT, at=3, times=1)),
    ],
    ids=str,
)
async def test_one_node_fails(role: str, trouble: Trouble) -> None:
    async with town() as place:
        for node in place.nodes:
            if node.node.name == f"{role}0":
                node.node.trouble = trouble
        _, body = await _ask(place, Endpoint.CHAT, stream=True)
        told = story(Endpoint.CHAT, body)
        assert (told.texts[0], told.error, told.ended) == (right(Endpoint.CHAT), None, True)
        await place.close()


@pytest.mark.parametrize("victim", ["p0", "d0"])
async def test_a_node_is_gone(victim: str) -> None:
    async with town() as place:
        for node in place.nodes:
            if node.node.name == victim:
                await node.kill()
        for _ in range(4):
            _, body = await _ask(place, Endpoint.COMPLETIONS, stream=True)
            assert story(Endpoint.COMPLETIONS, body).texts[0] == right(Endpoint.COMPLETIONS)
        await place.close()


async def test_everything_is_gone() -> None:
    async with town() as place:
        for node in place.nodes:
            await node.kill()
        with pytest.raises(Exception, match="could be reached"):
            await _ask(place, Endpoint.CHAT, stream=False)
        await place.close()


async def test_the_client_leaves() -> None:
    async with town() as place:
        reply = await place.orchestrator.answer(_request(Endpoint.CHAT, stream=True, tokens=5000))
        assert not isinstance(reply.body, bytes)
        await anext(reply.body)
        await reply.body.aclose()
        await place.close()
