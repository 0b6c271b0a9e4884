"""One small question to a node: a request whose whole answer is wanted."""

from pdproxy.request import Headers
from pdproxy.transport.port import Outgoing, Patience, Transport

ANSWER_LIMIT = 8 * 1024 * 1024
"""Bytes: a node's /metrics has some hundred kilobytes."""

_JSON = ("content-type", "application/json")


async def get(transport: Transport, url: str, headers: Headers, patience: Patience) -> tuple[int, bytes]:
    """Status and body of a GET.

    Raises:
        NodeFault: as `Transport.send` and `Incoming.read`.
    """
    return await _exchange(transport, Outgoing("GET", url, headers), patience)


async def post(transport: Transport, url: str, headers: Headers, body: bytes, patience: Patience) -> tuple[int, bytes]:
    """Status and body of a POST of JSON.

    Raises:
        NodeFault: as `Transport.send` and `Incoming.read`.
    """
    return await _exchange(transport, Outgoing("POST", url, (*headers, _JSON), body), patience)


async def _exchange(transport: Transport, request: Outgoing, patience: Patience) -> tuple[int, bytes]:
    incoming = await transport.send(request, patience)
    try:
        return incoming.status, await incoming.read(ANSWER_LIMIT)
    finally:
        await incoming.aclose()
