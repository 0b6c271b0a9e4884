"""Asking for names: addresses through the system, services (which the system cannot look up) from its name server."""

import asyncio
import secrets
from pathlib import Path
from typing import Protocol

from pdproxy.nodes.discovery.dns_wire import BadAnswer, Service, Truncated, question, services

_PORT = 53


class Resolver(Protocol):
    """Looks names up."""

    async def addresses(self, name: str) -> tuple[str, ...]:
        """The name's addresses, sorted; empty when it has none.

        Raises:
            OSError: it could not be found out.
        """
        ...

    async def services(self, name: str) -> tuple[Service, ...]:
        """The name's SRV records of the best priority, sorted; empty when it has none.

        Raises:
            OSError: no answer came (in time).
            BadAnswer: the answer cannot be used.
        """
        ...


class SystemResolver:
    """What this machine is configured to use.

    Args:
        server: host and port of the name server for services; None takes the first of ``/etc/resolv.conf``.
        timeout: seconds for one answer; each question is asked twice.
    """

    def __init__(self, server: tuple[str, int] | None = None, timeout: float = 5.0) -> None:
        self._server = server
        self._timeout = timeout

    async def addresses(self, name: str) -> tuple[str, ...]:
        """See `Resolver`."""
        found = await asyncio.get_running_loop().getaddrinfo(name, None)
        return tuple(sorted({str(entry[4][0]) for entry in found}))

    async def services(self, name: str) -> tuple[Service, ...]:
        """See `Resolver`."""
        server = await asyncio.to_thread(_name_server) if self._server is None else self._server
        number = secrets.randbelow(65536)
        asked = question(name, number)
        try:
            return services(await self._twice(server, asked), number)
        except Truncated:
            async with asyncio.timeout(self._timeout):
                return services(await _over_tcp(server, asked), number)

    async def _twice(self, server: tuple[str, int], asked: bytes) -> bytes:
        """A datagram may be lost."""
        try:
            return await self._over_udp(server, asked)
        except TimeoutError:
            return await self._over_udp(server, asked)

    async def _over_udp(self, server: tuple[str, int], asked: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bytes] = loop.create_future()
        transport, _ = await loop.create_datagram_endpoint(lambda: _OneAnswer(answer), remote_addr=server)
        try:
            transport.sendto(asked)
            async with asyncio.timeout(self._timeout):
                return await answer
        finally:
            transport.close()


class _OneAnswer(asyncio.DatagramProtocol):
    def __init__(self, answer: asyncio.Future[bytes]) -> None:
        self._answer = answer

    def datagram_received(self, data: bytes, addr: object) -> None:  # noqa: ARG002 - the protocol names it
        if not self._answer.done():
            self._answer.set_result(data)

    def error_received(self, exc: Exception) -> None:
        if not self._answer.done():
            self._answer.set_exception(exc)


async def _over_tcp(server: tuple[str, int], asked: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*server)
    try:
        writer.write(len(asked).to_bytes(2) + asked)
        return await reader.readexactly(int.from_bytes(await reader.readexactly(2)))
    except asyncio.IncompleteReadError as error:
        raise BadAnswer("the DNS server hung up") from error
    finally:
        writer.close()


def _name_server() -> tuple[str, int]:
    """The first one that the system is configured with."""
    for line in Path("/etc/resolv.conf").read_text(encoding="ascii", errors="replace").splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == "nameserver":
            return words[1], _PORT
    raise FileNotFoundError("/etc/resolv.conf names no server")
