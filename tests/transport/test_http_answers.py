"""Requests to a scripted peer on loopback, and its responses."""

import asyncio

import pytest

from pdproxy.transport.h1_client import H1Transport
from pdproxy.transport.port import HttpRequest, read_to_end
from tests.transport.asking import CHUNKED, PATIENT, ask, post
from tests.transport.peer import Visit, always, answer, hanging_up_after, peer, saying


async def test_sends_what_it_was_given(transport: H1Transport) -> None:
    async with peer(always(b"yes")) as there:
        assert await ask(transport, post(there, b'{"a": 1}')) == (200, b"yes")
    lines = there.visits[0].heads[0].decode().split("\r\n")
    assert lines[0] == "POST /v1/completions HTTP/1.1"
    assert set(lines[1:-2]) == {
        f"host: 127.0.0.1:{there.port}",
        "accept-encoding: identity",
        "content-type: application/json",
        "content-length: 8",
    }
    assert there.visits[0].bodies == [b'{"a": 1}']


@pytest.mark.parametrize(
    "request_",
    [
        HttpRequest("GET", "http://127.0.0.1:1/", (("x", "a\r\nevil: 1"),)),
        HttpRequest("GET", "http://127.0.0.1:1/", (("x", "a\nb"),)),
        HttpRequest("GET /evil HTTP/1.1\r\nx:", "http://127.0.0.1:1/"),
        HttpRequest("GET", "http://127.0.0.1:1/a b"),
        HttpRequest("GET", "ftp://127.0.0.1/"),
        HttpRequest("GET", "/only/a/path"),
        HttpRequest("GET", "http://user@host/"),
        HttpRequest("GET", "http://127.0.0.1:99999/"),
    ],
)
async def test_what_cannot_be_written_as_http_is_not_sent(transport: H1Transport, request_: HttpRequest) -> None:
    with pytest.raises(ValueError, match=r"."):
        await transport.send(request_, PATIENT)
    assert transport.connections == 0


async def test_headers_come_in_lower_case_and_in_order(transport: H1Transport) -> None:
    async with peer(always(b"", b"X-One:  1 ", b"Set-Thing: a", b"X-ONE: \xe9", status=b"429 Too Many")) as there:
        response = await transport.send(post(there), PATIENT)
        await response.aclose()
    assert response.status == 429
    assert response.headers == (("x-one", "1"), ("set-thing", "a"), ("x-one", "é"), ("content-length", "0"))


async def test_chunks_arrive_as_they_are_sent(transport: H1Transport) -> None:
    heard = asyncio.Event()

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.say(CHUNKED, b"5\r\nfirst\r\n")
        await heard.wait()
        await visit.say(b"6;note=x\r\nsecond\r\n0\r\nTrailer: dropped\r\n\r\n")
        await always(b"again")(visit)

    async with peer(script) as there:
        response = await transport.send(post(there), PATIENT)
        pieces = aiter(response)
        assert await anext(pieces) == b"first"
        heard.set()
        assert await anext(pieces) == b"second"
        with pytest.raises(StopAsyncIteration):
            await anext(pieces)
        await response.aclose()
        assert await ask(transport, post(there)) == (200, b"again")
        assert len(there.visits) == 1
    assert response.headers == (("transfer-encoding", "chunked"),)


async def test_an_answer_cut_into_single_bytes_is_the_same_answer(transport: H1Transport) -> None:
    whole = CHUNKED + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    async with peer(saying(*(whole[i : i + 1] for i in range(len(whole))))) as there:
        assert await ask(transport, post(there)) == (200, b"abcde")


async def test_an_answer_without_length_ends_with_the_connection(transport: H1Transport) -> None:
    async with peer(hanging_up_after(b"HTTP/1.1 200 OK\r\n\r\n", b"until the end")) as there:
        assert await ask(transport, post(there)) == (200, b"until the end")
        await there.all_gone()


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_no_content_has_no_body(transport: H1Transport, method: str) -> None:
    async with peer(always(b"", status=b"204 No Content")) as there:
        for _ in range(2):
            assert await ask(transport, HttpRequest(method, there.url)) == (204, b"")
        assert len(there.visits) == 1


async def test_an_answer_to_head_has_no_body_whatever_its_length_says(transport: H1Transport) -> None:
    async with peer(saying(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")) as there:
        assert await ask(transport, HttpRequest("HEAD", there.url + "/x?y=1")) == (200, b"")
        await there.all_gone()
    assert there.visits[0].heads[0].startswith(b"HEAD /x?y=1 HTTP/1.1\r\n")
    assert b"content-length" not in there.visits[0].heads[0]


async def test_interim_answers_are_passed_over(transport: H1Transport) -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
    async with peer(saying(interim, answer(b"final"))) as there:
        response = await transport.send(post(there), PATIENT)
        assert response.status == 200
        assert response.headers == (("content-length", "5"),)
        assert await read_to_end(response, 5) == b"final"
        await response.aclose()


async def test_a_body_that_is_not_complete_is_read_piece_by_piece(transport: H1Transport) -> None:
    read = asyncio.Event()

    async def in_two(visit: Visit) -> None:
        await visit.request()
        await visit.say(answer(b"yes")[:-2])
        await read.wait()
        await visit.say(b"es")

    async with peer(in_two) as there:
        response = await transport.send(post(there), PATIENT)
        assert response.take_whole() is None
        read.set()
        assert await read_to_end(response, 3) == b"yes"
        await response.aclose()
