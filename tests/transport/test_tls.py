"""https nodes: trusted authorities only."""

import ssl
from pathlib import Path

import pytest

from pdproxy.errors import Fault, NodeFault
from pdproxy.transport.h1_client import H1Transport
from pdproxy.transport.port import HttpRequest, Timeouts
from tests.transport.asking import PATIENT, HandClock, ask, post
from tests.transport.peer import GENEROUS, Visit, always, peer

HERE = Path(__file__).parent / "tls"


def serving() -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(HERE / "certificate.pem", HERE / "key.pem")
    return context


async def test_a_trusted_node_answers_over_one_connection() -> None:
    trusting = ssl.create_default_context(cafile=HERE / "certificate.pem")
    transport = H1Transport(HandClock(), trusting)
    big = b"x" * 2**20
    async with peer(always(big), tls=serving()) as there:
        for _ in range(3):
            assert await ask(transport, post(there, big)) == (200, big)
        assert len(there.visits) == 1
        await transport.aclose()
        await there.all_gone()


async def test_an_untrusted_node_is_refused() -> None:
    transport = H1Transport(HandClock())
    async with peer(always(b"secret"), tls=serving()) as there:
        with pytest.raises(NodeFault) as caught:
            await transport.send(post(there, b"never sent"), PATIENT)
        assert caught.value.fault is Fault.REFUSED
        assert not there.visits
    await transport.aclose()


async def test_plain_http_to_an_https_node_is_a_fault() -> None:
    transport = H1Transport(HandClock())
    async with peer(always(b""), tls=serving()) as there:
        with pytest.raises(NodeFault) as caught:
            await transport.send(HttpRequest("GET", f"http://127.0.0.1:{there.port}/"), PATIENT)
        assert caught.value.fault is Fault.RESET
    await transport.aclose()


async def test_a_tls_handshake_without_answer_is_refused() -> None:
    async def mute(visit: Visit) -> None:
        await visit.until_gone()

    transport = H1Transport(HandClock())
    async with peer(mute) as there:
        timeouts = Timeouts(connect=0.1, headers=GENEROUS, stall=GENEROUS)
        with pytest.raises(NodeFault) as caught:
            await transport.send(HttpRequest("GET", f"https://127.0.0.1:{there.port}/"), timeouts)
        assert caught.value.fault is Fault.REFUSED
        assert "no connection in time" in caught.value.detail
        await there.all_gone()
    await transport.aclose()
