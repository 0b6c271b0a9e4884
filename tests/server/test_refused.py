"""Connections that come to nothing before a request: they are counted, and no flood of them floods the log."""

import asyncio
import contextlib
import logging
import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pdproxy.observe import rare_lines
from pdproxy.observe.labels import ConnectionRefusal
from pdproxy.observe.rare_lines import RareLine
from pdproxy.observe.refused_connections import RefusedConnections
from pdproxy.server.server import bind, http_config
from pdproxy.settings.model import Settings
from tests.fakes.certificates import identity
from tests.fakes.quick_server import QuickServer
from tests.server.raw import SOON, listening

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


class Running:
    """A server whose refusals are counted."""

    def __init__(self, port: int, registry: CollectorRegistry) -> None:
        self.port = port
        self._registry = registry

    def refused(self, reason: ConnectionRefusal) -> float:
        return self._registry.get_sample_value("pdproxy_connections_refused_total", {"reason": reason}) or 0.0

    async def until_refused(self, reason: ConnectionRefusal, times: int) -> None:
        async with asyncio.timeout(SOON):
            while self.refused(reason) < times:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def serving(**tls: object) -> AsyncIterator[Running]:
    registry, bound = CollectorRegistry(), bind("127.0.0.1", 0, "listen.port")
    server = QuickServer(http_config(Settings(), app, 1.0, RefusedConnections(registry).count, **tls), bound)
    task = asyncio.create_task(server.run_port())
    try:
        await asyncio.wait_for(listening(server), SOON)
        yield Running(bound.getsockname()[1], registry)
    finally:
        server.should_exit = server.force_exit = True
        await asyncio.wait_for(task, SOON)


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """This process can open no further file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)  # below it all are taken
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def lines_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(record) for record in caplog.records if record.levelno >= logging.WARNING]


async def test_connections_wait_for_a_descriptor_and_that_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    async with serving() as server:
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(socket.socket()) for _ in range(50)]
            "localhost".encode("idna")  # what connects reads a module for it
            with no_descriptors():
                for client in clients:
                    client.setblocking(False)
                    await loop.sock_connect(client, ("127.0.0.1", server.port))
                await server.until_refused(ConnectionRefusal.NO_DESCRIPTOR, 3)
            for client in clients:
                await loop.sock_sendall(client, REQUEST)
                assert (await asyncio.wait_for(loop.sock_recv(client, 100), SOON)).startswith(b"HTTP/1.1 204")
    (line,) = lines_of(caplog)
    assert line["message"].startswith("connections wait: this process can open no further file")
    assert (line["times"], line["detail"]) == (1, "Too many open files")


async def test_a_failed_handshake_is_counted_and_a_probe_of_the_port_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, key = identity("proxy").write(tmp_path)
    async with serving(ssl_certfile=certificate, ssl_keyfile=key) as server:
        _, probe = await asyncio.open_connection("127.0.0.1", server.port)
        probe.close()
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(REQUEST)
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), SOON)
            writer.close()
        await server.until_refused(ConnectionRefusal.TLS, 3)
        assert server.refused(ConnectionRefusal.TLS) == 3
    (line,) = lines_of(caplog)
    assert line["message"] == "TLS handshakes of clients failed"


async def test_what_is_no_http_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as server:
        for sent in (b"\x16\x03\x01 no TLS here\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"CONNECT x:1 HTTP/1.1\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(sent)
            assert (await asyncio.wait_for(reader.read(), SOON)).startswith(b"HTTP/1.1 400")
            writer.close()
        assert server.refused(ConnectionRefusal.HTTP) == 3
    (line,) = lines_of(caplog)
    assert line["message"] == "clients sent what is no acceptable HTTP request"
    assert line["detail"].startswith("127.0.0.1: 400 invalid_http: ")


async def test_a_flood_is_a_line_at_once_and_one_for_each_period(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rare_lines, "PERIOD", 0.05)
    rare = RareLine(logging.getLogger("pdproxy.test"), "it happened")
    for _ in range(1000):
        rare.happened("detail")
    assert [line["times"] for line in lines_of(caplog)] == [1]
    await asyncio.sleep(0.3)
    assert [line["times"] for line in lines_of(caplog)] == [1, 999], "then it was quiet"
    rare.happened("again")
    assert [line["detail"] for line in lines_of(caplog)] == ["detail", "detail", "again"]
