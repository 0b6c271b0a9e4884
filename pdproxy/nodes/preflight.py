"""One small question to a node: a request whose whole answer is wanted.

Asks nodes about themselves before they get requests; also what `pdproxy check` prints."""

import asyncio
import dataclasses
from collections.abc import Sequence

from pdproxy.errors import Fault, NodeFault
from pdproxy.nodes.compatibility import Compatibility, Incompatibility, check_compatibility
from pdproxy.nodes.fingerprints import unpaired
from pdproxy.nodes.node import Node
from pdproxy.nodes.node_info import (
    NodeInfo,
    read_fingerprint,
    read_labels,
    read_model_card,
    read_node_capacity,
    read_ranks,
    read_version,
)
from pdproxy.request import Headers
from pdproxy.transport.port import HttpRequest, Timeouts, Transport, read_to_end

ANSWER_LIMIT = 8 * 1024 * 1024
"""Bytes: a node's /metrics has some hundred kilobytes."""

_JSON = ("content-type", "application/json")


async def get(transport: Transport, url: str, headers: Headers, timeouts: Timeouts) -> tuple[int, bytes]:
    """Status and body of a GET.

    Raises:
        NodeFault: as `Transport.send` and `read_to_end`.
    """
    return await _exchange(transport, HttpRequest("GET", url, headers), timeouts)


async def post(transport: Transport, url: str, headers: Headers, body: bytes, timeouts: Timeouts) -> tuple[int, bytes]:
    """Status and body of a POST of JSON.

    Raises:
        NodeFault: as `Transport.send` and `read_to_end`.
    """
    return await _exchange(transport, HttpRequest("POST", url, (*headers, _JSON), body), timeouts)


async def _exchange(transport: Transport, request: HttpRequest, timeouts: Timeouts) -> tuple[int, bytes]:
    response = await transport.send(request, timeouts)
    try:
        return response.status, await read_to_end(response, ANSWER_LIMIT)
    finally:
        await response.aclose()


PATIENCE = Timeouts(connect=5.0, headers=10.0, stall=10.0, whole=20.0)


class Preflight:
    """Reads what a node publishes.

    Args:
        transport: the way to the nodes.
        headers: sent with each question (a credential that nodes ask for).
        timeouts: for each question.
    """

    def __init__(self, transport: Transport, headers: Headers = (), timeouts: Timeouts = PATIENCE) -> None:
        self._transport = transport
        self._headers = headers
        self._timeouts = timeouts

    async def inspect(self, node: Node) -> NodeInfo:
        """What the node says of itself. Only /v1/models must be there; what else is missing is left empty.

        Raises:
            NodeFault: it cannot be reached, or /v1/models answers with an error.
        """
        status, body = await self._get(node, "/v1/models")
        if status != 200:
            raise NodeFault(Fault.SERVER_ERROR, f"/v1/models answers {status}", status=status)
        version = read_version(await self._extra(node, "/version"))
        metrics = await self._extra(node, "/metrics")
        capacity, ranks = read_node_capacity(metrics), read_ranks(metrics)
        return NodeInfo(
            node, read_model_card(body), version, read_labels(metrics), capacity, ranks, read_fingerprint(metrics)
        )

    async def _extra(self, node: Node, path: str) -> bytes:
        """A body that may be missing: b"" then."""
        try:
            status, body = await self._get(node, path)
        except NodeFault as fault:
            if fault.fault is Fault.INVALID_BODY:
                return b""
            raise
        return body if status == 200 else b""

    async def _get(self, node: Node, path: str) -> tuple[int, bytes]:
        return await get(self._transport, node.url + path, self._headers, self._timeouts)


@dataclasses.dataclass(frozen=True, slots=True)
class CheckRow:
    """One row of `pdproxy check`.

    Attributes:
        node: as it was configured.
        info: a NodeFault when the node could not be asked.
        verdict: against the nodes named before it.
        unpaired: why it would exchange no tickets with any of the others; empty where it does.
    """

    node: Node
    info: NodeInfo | NodeFault
    verdict: Compatibility = dataclasses.field(default_factory=Compatibility)
    unpaired: tuple[Incompatibility, ...] = ()

    def good(self) -> bool:
        """Whether the node would be admitted."""
        return isinstance(self.info, NodeInfo) and not self.verdict.refusals


async def check(preflight: Preflight, nodes: Sequence[Node]) -> list[CheckRow]:
    """Ask every node at once, then judge each against the ones named before it, as if they joined in this order.

    Whether it has a partner is judged by all that would be admitted.
    """
    answers = await asyncio.gather(*(_try(preflight, node) for node in nodes))
    rows: list[CheckRow] = []
    for node, info in zip(nodes, answers, strict=True):
        accepted = [row.info for row in rows if row.good() and isinstance(row.info, NodeInfo)]
        rows.append(
            CheckRow(node, info, check_compatibility(info, accepted) if isinstance(info, NodeInfo) else Compatibility())
        )
    accepted = [row.info for row in rows if row.good() and isinstance(row.info, NodeInfo)]
    return [dataclasses.replace(row, unpaired=_unpaired(row, accepted)) for row in rows]


def _unpaired(row: CheckRow, accepted: Sequence[NodeInfo]) -> tuple[Incompatibility, ...]:
    return unpaired(row.info, accepted) if isinstance(row.info, NodeInfo) and row.good() else ()


async def _try(preflight: Preflight, node: Node) -> NodeInfo | NodeFault:
    try:
        return await preflight.inspect(node)
    except NodeFault as fault:
        return fault
