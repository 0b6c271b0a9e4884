"""`HttpxTransport`: the cases of `H1Transport`, and its own errors."""

import asyncio
import contextlib
import inspect
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import pytest

from pdproxy.errors import Fault, NodeFault
from pdproxy.transport.httpx_transport import ERRORS, HttpxTransport, before_the_head, in_the_body
from pdproxy.transport.port import HttpRequest, Timeouts, read_to_end
from tests.transport import test_http_answers, test_http_faults, test_http_leaving, test_http_size, test_tls
from tests.transport.asking import CHUNKED, PATIENT, ask, fault_of, post
from tests.transport.peer import GENEROUS, always, peer, saying

Case = Callable[[HttpxTransport], Awaitable[None]]
OTHERWISE = frozenset(
    {
        # One connection for each question.
        "test_a_big_body_goes_out_whole",
        "test_closing_a_response_twice_does_not_touch_the_next_one_on_its_connection",
        "test_a_slow_reader_makes_the_peer_wait",
        "test_chunks_arrive_as_they_are_sent",
    }
)


def cases() -> dict[str, Case]:
    """Tests of the other transport that want nothing but a transport: neither an argument nor, by a mark, a fixture."""
    files = (test_http_answers, test_http_faults, test_http_leaving, test_http_size)
    found = (pair for file in files for pair in inspect.getmembers(file, inspect.iscoroutinefunction))
    return {
        name: case
        for name, case in found
        if name.startswith("test_")
        and inspect.signature(case).parameters.keys() == {"transport"}
        and not hasattr(case, "pytestmark")
    }


@pytest.fixture
async def httpx_transport() -> AsyncIterator[HttpxTransport]:
    made = HttpxTransport(ssl.create_default_context(cafile=test_tls.HERE / "certificate.pem"))
    yield made
    await made.aclose()
    assert made.connections == 0


def test_there_are_cases() -> None:
    assert cases().keys() > OTHERWISE
    assert len(cases()) >= 20


@pytest.mark.parametrize("name", sorted(cases().keys() - OTHERWISE))
async def test_the_port_is_kept(httpx_transport: HttpxTransport, name: str) -> None:
    await cases()[name](httpx_transport)


async def test_a_trusted_node_answers_and_an_untrusted_one_is_refused(httpx_transport: HttpxTransport) -> None:
    async with peer(always(b"yes"), tls=test_tls.serving()) as there:
        assert await ask(httpx_transport, post(there)) == (200, b"yes")
        wary = HttpxTransport(ssl.create_default_context())
        with pytest.raises(NodeFault, match=r"certificate is not trusted.*upstream\.ca_file") as caught:
            await wary.send(post(there), PATIENT)
        assert caught.value.fault is Fault.REFUSED
        assert len(there.visits) == 1
        await wary.aclose()


async def test_a_tls_handshake_without_answer_is_refused(httpx_transport: HttpxTransport) -> None:
    async with peer(saying()) as there:
        request = HttpRequest("GET", f"https://127.0.0.1:{there.port}/")
        assert await fault_of(httpx_transport, request, Timeouts(0.1, GENEROUS, GENEROUS)) is Fault.REFUSED


async def test_a_read_that_was_cancelled_is_no_end_of_the_body(httpx_transport: HttpxTransport) -> None:
    async with peer(saying(CHUNKED)) as there:
        response = await httpx_transport.send(post(there), PATIENT)
        reading = asyncio.ensure_future(anext(aiter(response), b"over"))
        await asyncio.sleep(0.01)
        reading.cancel()
        with pytest.raises(NodeFault) as caught:
            await read_to_end(response, 10)
        assert caught.value.fault is Fault.RESET
        await response.aclose()
        await there.all_gone()


async def test_what_is_open_is_closed_with_the_transport(httpx_transport: HttpxTransport) -> None:
    async with peer(saying(CHUNKED)) as there:
        response = await httpx_transport.send(post(there), PATIENT)
        assert httpx_transport.connections == 1
        await httpx_transport.aclose()
        with pytest.raises(NodeFault):
            await read_to_end(response, 10)
        await response.aclose()
        await there.all_gone()


async def test_no_socket_left_is_no_fault_of_the_node(httpx_transport: HttpxTransport) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[socket.socket] = []
    highest = socket.socket()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest.fileno() + 1, limits[1]))
        with contextlib.suppress(OSError):
            while len(held) < 1000:
                held.append(socket.socket())
        assert await fault_of(httpx_transport, HttpRequest("GET", "http://127.0.0.1:1/")) is Fault.BUSY
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for each in (highest, *held):
            each.close()


def raised() -> list[type[Exception]]:
    """Every exception that httpx knows."""
    found = [each for name, each in vars(httpx).items() if inspect.isclass(each) and issubclass(each, Exception)]
    return sorted(found, key=lambda each: each.__name__)


REFUSED = {"ConnectError", "ConnectTimeout", "ProxyError", "UnsupportedProtocol"}
TIMED_OUT = {"ReadTimeout", "WriteTimeout", "TimeoutException"}


@pytest.mark.parametrize("kind", raised())
def test_whatever_httpx_raises_has_a_fault(kind: type[Exception]) -> None:
    assert issubclass(kind, ERRORS)
    error = kind.__new__(kind)  # some want a request to be made with
    name = kind.__name__
    early, late = before_the_head(error, "node:1"), in_the_body(error, "node:1")
    timed_out = name in TIMED_OUT | {"ConnectTimeout", "PoolTimeout"}
    assert late.fault is (Fault.STALL if timed_out else Fault.RESET)
    special = {Fault.REFUSED: REFUSED, Fault.BUSY: {"PoolTimeout"}, Fault.HEADERS_TIMEOUT: TIMED_OUT}
    assert early.fault is next((fault for fault, names in special.items() if name in names), Fault.RESET)
    assert "node:1" in early.detail


def test_the_list_is_not_empty() -> None:
    assert {each.__name__ for each in raised()} >= REFUSED | TIMED_OUT | {"InvalidURL", "StreamClosed", "ReadError"}
    assert len(raised()) >= 25
