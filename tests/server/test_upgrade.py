"""``Upgrade`` is ignored: HTTP/1.1 goes on, and bodies stay bodies."""

import pytest

from pdproxy.server.protocol import ConnectionLimits
from tests.server.raw import SOON, answers, post, say, serving

LIMITS = ConnectionLimits(2000, SOON, SOON)
WISH = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAARAAAAAAAIAAAAA")
SIZED = post(*WISH, "content-length: 5", body=b"hello")
CHUNKED = post(*WISH, "transfer-encoding: chunked", body=b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n")
LAST = (post("content-length: 3", body=b"end"),)


@pytest.mark.parametrize("asked", [SIZED, CHUNKED, SIZED.replace(b"h2c", b"websocket")], ids=["h2c", "chunked", "ws"])
async def test_the_body_is_read_wherever_the_pieces_end(asked: bytes) -> None:
    async with serving(LIMITS) as port:
        for at in range(len(asked) - 30, len(asked) + 1):
            assert await answers(port, (asked[:at], asked[at:]), LAST) == [b"hello", b"end"], at


async def test_a_body_is_not_read_as_a_request() -> None:
    inner = b"GET /inner HTTP/1.1\r\nhost: x\r\n\r\n"
    wish = post(*WISH, f"content-length: {len(inner)}")
    async with serving(LIMITS) as port:
        for pieces in ((wish, inner), (wish + inner,)):
            assert await answers(port, pieces, LAST) == [inner, b"end"]


async def test_an_upgrade_without_a_body() -> None:
    async with serving(LIMITS) as port:
        wish = (b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",)
        assert await answers(port, wish, wish, LAST) == [b"", b"", b"end"]


async def test_an_upgrade_does_not_loosen_framing() -> None:
    async with serving(LIMITS) as port:
        for framing in (("content-length: 5",), ("transfer-encoding: chunked",)):
            assert (await say(port, post(*WISH, *framing, "content-length: 6", body=b"hello")))[0] == 400


@pytest.mark.parametrize("target", [b"x:1", b"http://x/"])
async def test_connect_is_refused(target: bytes) -> None:
    async with serving(LIMITS) as port:
        head = b"CONNECT " + target + b" HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nab"
        assert (await say(port, head))[0] == 400
