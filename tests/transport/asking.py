"""Requests of the transport's tests to a peer."""

import pytest

from pdproxy.errors import Fault, NodeFault
from pdproxy.transport.port import HttpRequest, HttpResponse, Timeouts, Transport, read_to_end
from tests.transport.peer import GENEROUS, Peer

PATIENT = Timeouts(connect=GENEROUS, headers=GENEROUS, stall=GENEROUS)
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class HandClock:
    """Moves when told."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += seconds


def post(there: Peer, body: bytes = b"{}") -> HttpRequest:
    return HttpRequest("POST", there.url + "/v1/completions", (("content-type", "application/json"),), body)


async def ask(transport: Transport, request: HttpRequest, timeouts: Timeouts = PATIENT) -> tuple[int, bytes]:
    """One exchange, read to its end."""
    response = await transport.send(request, timeouts)
    try:
        return response.status, await read_to_end(response, 2**30)
    finally:
        await response.aclose()


async def collect(response: HttpResponse, heard: list[bytes]) -> None:
    """Keeps what came before the fault."""
    async for piece in response:
        heard += [piece]


async def fault_of(transport: Transport, request: HttpRequest, timeouts: Timeouts = PATIENT) -> Fault:
    with pytest.raises(NodeFault) as caught:
        await ask(transport, request, timeouts)
    return caught.value.fault
