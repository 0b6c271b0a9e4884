"""Connections that misbehave, against a real server on loopback."""

import json
from collections.abc import AsyncIterator

import pytest

from pdproxy.server.protocol import ConnectionLimits
from tests.server.raw import SOON, post, say, serving


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """A patient server."""
    async with serving(ConnectionLimits(2000, SOON, SOON)) as number:
        yield number


@pytest.fixture
async def impatient() -> AsyncIterator[int]:
    """A server that waits for heads hardly at all."""
    async with serving(ConnectionLimits(2000, 0.3, SOON)) as number:
        yield number


async def test_a_good_request_in_many_pieces(port: int) -> None:
    whole = post("content-length: 5", "connection: close", body=b"hello")
    assert await say(port, whole[:9], whole[9:40], whole[40:-2], whole[-2:]) == (200, b"hello")


@pytest.mark.parametrize("pieces", [1, 2, 40])
async def test_a_head_is_limited_in_size(port: int, pieces: int) -> None:
    long = post("x-long: " + "a" * 4000)
    step = -(-len(long) // pieces)
    status, body = await say(port, *(long[at : at + step] for at in range(0, 2100, step)))
    assert status == 431
    assert "2000 bytes" in json.loads(body)["error"]["message"]


async def test_a_head_is_limited_in_time(impatient: int) -> None:
    status, body = await say(impatient, b"POST / HTTP/1.1\r\nhost: x\r\n")
    assert status == 408
    assert json.loads(body)["error"]["code"] == "headers_timeout"


async def test_a_silent_connection_is_closed(impatient: int) -> None:
    assert await say(impatient) == (0, b"")


async def test_a_second_head_on_a_kept_connection_is_limited_in_time_too(impatient: int) -> None:
    first = post("content-length: 2", body=b"ok")
    status, rest = await say(impatient, first, b"POST / HTTP/1.1\r\nhost:")
    assert status == 200
    assert rest.startswith(b"ok")
    assert b"headers_timeout" in rest
