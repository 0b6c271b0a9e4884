"""Connections that another process has accepted, given through a channel and served here."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pdproxy.observe.refused_connections import uncounted
from pdproxy.server.server import Server, http_config
from pdproxy.settings.model import Settings
from pdproxy.workers.channel import READY, Connection, Inbox, hand_over
from tests.fakes.certificates import Identity, identity
from tests.fakes.quick_server import QuickServer

SOON = 20.0
REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@contextlib.asynccontextmanager
async def serving(**tls: object) -> AsyncIterator[Server]:
    server = QuickServer(http_config(Settings(), app, 1.0, uncounted, **tls), None)
    task = asyncio.create_task(server.run_port())
    try:
        yield server
    finally:
        server.should_exit = server.force_exit = True
        await asyncio.wait_for(task, SOON)


async def connected() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection: the client's, and the one that was accepted."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    client.setblocking(False)
    accepted.setblocking(False)
    return client, accepted


def trusting(who: Identity) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=who.certificate.decode())


async def test_an_adopted_connection_is_served_like_an_accepted_one() -> None:
    async with serving() as server:
        client, accepted = await connected()
        await server.adopt(accepted)
        reader, writer = await asyncio.open_connection(sock=client)
        for _ in range(2):
            writer.write(REQUEST)
            assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SOON)).startswith(b"HTTP/1.1 204")
        writer.close()


async def test_tls_is_spoken_on_it(tmp_path: Path) -> None:
    who = identity("proxy")
    certificate, key = who.write(tmp_path)
    async with serving(ssl_certfile=certificate, ssl_keyfile=key) as server:
        client, accepted = await connected()
        adopting = asyncio.create_task(server.adopt(accepted))
        reader, writer = await asyncio.open_connection(sock=client, ssl=trusting(who), server_hostname="127.0.0.1")
        writer.write(REQUEST)
        assert (await asyncio.wait_for(reader.readline(), SOON)).startswith(b"HTTP/1.1 204")
        writer.close()
        await adopting


async def test_a_handshake_that_fails_ends_that_connection_alone(tmp_path: Path) -> None:
    certificate, key = identity("proxy").write(tmp_path)
    async with serving(ssl_certfile=certificate, ssl_keyfile=key) as server:
        client, accepted = await connected()
        client.send(REQUEST)  # no TLS
        await asyncio.wait_for(server.adopt(accepted), SOON)
        reader, writer = await asyncio.open_connection(sock=client)
        with contextlib.suppress(ConnectionError):
            assert b"204" not in await asyncio.wait_for(reader.read(), SOON)
        writer.close()


async def test_a_server_that_ends_closes_what_still_comes() -> None:
    async with serving() as server:
        server.should_exit = True
        client, accepted = await connected()
        await server.adopt(accepted)
        assert accepted.fileno() == -1
        client.close()


async def test_a_channel_brings_connections_and_its_end() -> None:
    ours, theirs = socket.socketpair()
    came: list[tuple[Connection, socket.socket]] = []
    closed = asyncio.Event()
    with theirs:
        Inbox(theirs, lambda kind, connection: came.append((kind, connection)), closed.set).open()
        assert ours.recv(10) == READY
        for kind in (Connection.CLIENT, Connection.OPERATOR, Connection.CLIENT):
            client, accepted = await connected()
            with accepted:
                assert hand_over(ours, kind, accepted)
            client.close()
        ours.close()
        await asyncio.wait_for(closed.wait(), SOON)
    assert [kind for kind, _ in came] == [Connection.CLIENT, Connection.OPERATOR, Connection.CLIENT]
    for _, connection in came:
        assert connection.recv(1) == b""  # the very connections: their clients have left
        connection.close()


@pytest.mark.parametrize("gone", [True, False])
async def test_a_worker_that_is_gone_or_does_not_read_takes_nothing(gone: bool) -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    client, accepted = await connected()
    if gone:
        theirs.close()
    with ours, theirs, client, accepted:
        taken = 0
        while hand_over(ours, Connection.CLIENT, accepted):
            taken += 1
            assert taken < 100_000
        assert (taken == 0) is gone
