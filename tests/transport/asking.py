"""How the tests of the transport ask a peer."""

import pytest

from pdproxy.errors import Fault, NodeFault
from pdproxy.transport.port import Incoming, Outgoing, Patience, Transport
from tests.transport.peer import GENEROUS, Peer

PATIENT = Patience(connect=GENEROUS, headers=GENEROUS, stall=GENEROUS)
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class HandClock:
    """Moves when told."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += seconds


def post(there: Peer, body: bytes = b"{}") -> Outgoing:
    return Outgoing("POST", there.url + "/v1/completions", (("content-type", "application/json"),), body)


async def ask(transport: Transport, request: Outgoing, patience: Patience = PATIENT) -> tuple[int, bytes]:
    """One exchange, read to its end."""
    incoming = await transport.send(request, patience)
    try:
        return incoming.status, await incoming.read(2**30)
    finally:
        await incoming.aclose()


async def collect(incoming: Incoming, heard: list[bytes]) -> None:
    """Keeps what came before the fault."""
    async for piece in incoming.chunks():
        heard += [piece]


async def fault_of(transport: Transport, request: Outgoing, patience: Patience = PATIENT) -> Fault:
    with pytest.raises(NodeFault) as caught:
        await ask(transport, request, patience)
    return caught.value.fault
