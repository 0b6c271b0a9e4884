"""Asks nodes about themselves before they get requests; also what `pdproxy check` prints."""

import asyncio
import dataclasses
from collections.abc import Sequence

from pdproxy.credential import OwnHeaders, no_headers
from pdproxy.errors import Fault, NodeFault
from pdproxy.nodes.compatibility import Compatibility, Incompatibility, check_compatibility, differences_from_partners
from pdproxy.nodes.node import Node
from pdproxy.nodes.node_info import PROMPTS_PATH, NodeInfo, read_node_info
from pdproxy.transport.port import HttpRequest, Timeouts, Transport, read_to_end

ANSWER_LIMIT = 8 * 1024 * 1024
"""Bytes: a node's /metrics has some hundred kilobytes."""
_TIMEOUTS = Timeouts(connect=5.0, headers=10.0, stall=10.0, whole=20.0)
_UNREACHABLE = frozenset({Fault.REFUSED, Fault.RESET, Fault.HEADERS_TIMEOUT})


async def exchange(transport: Transport, request: HttpRequest, timeouts: Timeouts) -> tuple[int, bytes]:
    """Status and whole body of the answer to a small request.

    Raises:
        NodeFault: as `Transport.send` and `HttpResponse.read`.
    """
    response = await transport.send(request, timeouts)
    try:
        return response.status, await read_to_end(response, ANSWER_LIMIT)
    finally:
        await response.aclose()


class Preflight:
    """Reads what a node publishes. ``headers``: of each request, such as a credential."""

    def __init__(self, transport: Transport, headers: OwnHeaders = no_headers) -> None:
        self._transport = transport
        self._headers = headers

    async def inspect(self, node: Node) -> NodeInfo:
        """Ask a node what it publishes. Only /v1/models must be there; whatever else is missing is left empty.

        Raises:
            NodeFault: it cannot be reached, or /v1/models answers with an error.
        """
        status, body = await self._get(node, "/v1/models")
        if status != 200:
            asked = ": is this the address of a vLLM server?" if status == 404 else ""
            raise NodeFault(Fault.SERVER_ERROR, f"/v1/models answers {status}{asked}", status=status)
        version, metrics = await self._optional(node, "/version"), await self._optional(node, "/metrics")
        return read_node_info(node, body, version, metrics, await self._optional(node, PROMPTS_PATH))

    async def _optional(self, node: Node, path: str) -> bytes:
        """The body of an answer that may be missing: b"" then."""
        try:
            status, body = await self._get(node, path)
        except NodeFault as fault:
            if fault.fault is Fault.INVALID_BODY:
                return b""
            raise
        return body if status == 200 else b""

    async def _get(self, node: Node, path: str) -> tuple[int, bytes]:
        return await exchange(self._transport, HttpRequest("GET", node.url + path, self._headers()), _TIMEOUTS)


def is_unreachable(fault: NodeFault) -> bool:
    """Whether the node gave no answer at all."""
    return fault.fault in _UNREACHABLE


def symptom(fault: NodeFault) -> str:
    """For operators, how a preflight or a health probe failed; the sentence goes on with its `cause`."""
    return "cannot be reached" if is_unreachable(fault) else "cannot be used"


def cause(fault: NodeFault) -> str:
    """For operators, why a preflight or a health probe failed, with the setting to look at where there is one."""
    if fault.status in (401, 403):
        return (
            f"{fault.detail}: the proxy's own requests need a credential that the node accepts: name the "
            "file with it in upstream.credential_file (upstream.credential says what clients' requests carry)"
        )
    return fault.detail


@dataclasses.dataclass(frozen=True, slots=True)
class CheckRow:
    """One row of `pdproxy check`.

    Attributes:
        node: as it was configured.
        info: a NodeFault when the node could not be asked.
        compatibility: with the nodes named before it.
        unpaired: why it would exchange no tickets with any of the others; empty where it does.
    """

    node: Node
    info: NodeInfo | NodeFault
    compatibility: Compatibility = dataclasses.field(default_factory=Compatibility)
    unpaired: tuple[Incompatibility, ...] = ()

    def good(self) -> bool:
        """Whether the node would be admitted."""
        return isinstance(self.info, NodeInfo) and not self.compatibility.refusals


async def check_nodes(preflight: Preflight, nodes: Sequence[Node]) -> list[CheckRow]:
    """Ask every node at once, then check each against the ones named before it, as if they joined in this order.

    Whether it has a partner depends on all that would be admitted.
    """
    answers = await asyncio.gather(*(_inspect(preflight, node) for node in nodes))
    rows: list[CheckRow] = []
    accepted: list[NodeInfo] = []
    for node, info in zip(nodes, answers, strict=True):
        if isinstance(info, NodeFault):
            rows.append(CheckRow(node, info))
            continue
        rows.append(CheckRow(node, info, check_compatibility(info, accepted, nodes)))
        if rows[-1].good():
            accepted.append(info)
    return [_with_partners(row, accepted) for row in rows]


def _with_partners(row: CheckRow, accepted: Sequence[NodeInfo]) -> CheckRow:
    if isinstance(row.info, NodeFault) or not row.good():
        return row
    return dataclasses.replace(row, unpaired=differences_from_partners(row.info, accepted))


async def _inspect(preflight: Preflight, node: Node) -> NodeInfo | NodeFault:
    try:
        return await preflight.inspect(node)
    except NodeFault as fault:
        return fault
