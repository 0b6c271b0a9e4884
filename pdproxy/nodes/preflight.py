"""Asks nodes about themselves before they get requests; also what `pdproxy check` prints."""

import asyncio
import dataclasses
from collections.abc import Sequence

from pdproxy.errors import Fault, NodeFault
from pdproxy.nodes.ask import get
from pdproxy.nodes.facts import (
    Facts,
    read_card,
    read_fingerprint,
    read_labels,
    read_node_capacity,
    read_ranks,
    read_version,
)
from pdproxy.nodes.fingerprints import unpaired
from pdproxy.nodes.judge import Finding, Verdict, judge
from pdproxy.nodes.node import Node
from pdproxy.request import Headers
from pdproxy.transport.port import Patience, Transport

PATIENCE = Patience(connect=5.0, headers=10.0, stall=10.0, whole=20.0)


class Preflight:
    """Reads what a node publishes.

    Args:
        transport: the way to the nodes.
        headers: sent with each question (a credential that nodes ask for).
        patience: for each question.
    """

    def __init__(self, transport: Transport, headers: Headers = (), patience: Patience = PATIENCE) -> None:
        self._transport = transport
        self._headers = headers
        self._patience = patience

    async def inspect(self, node: Node) -> Facts:
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
        return Facts(node, read_card(body), version, read_labels(metrics), capacity, ranks, read_fingerprint(metrics))

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
        return await get(self._transport, node.url + path, self._headers, self._patience)


@dataclasses.dataclass(frozen=True, slots=True)
class Checked:
    """One row of `pdproxy check`.

    Attributes:
        node: as it was configured.
        facts: a NodeFault when the node could not be asked.
        verdict: against the nodes named before it.
        unpaired: why it would exchange no tickets with any of the others; empty where it does.
    """

    node: Node
    facts: Facts | NodeFault
    verdict: Verdict = dataclasses.field(default_factory=Verdict)
    unpaired: tuple[Finding, ...] = ()

    def good(self) -> bool:
        """Whether the node would be admitted."""
        return isinstance(self.facts, Facts) and not self.verdict.refusals


async def check(preflight: Preflight, nodes: Sequence[Node]) -> list[Checked]:
    """Ask every node at once, then judge each against the ones named before it, as if they joined in this order.

    Whether it has a partner is judged by all that would be admitted.
    """
    answers = await asyncio.gather(*(_try(preflight, node) for node in nodes))
    rows: list[Checked] = []
    for node, facts in zip(nodes, answers, strict=True):
        accepted = [row.facts for row in rows if row.good() and isinstance(row.facts, Facts)]
        rows.append(Checked(node, facts, judge(facts, accepted) if isinstance(facts, Facts) else Verdict()))
    accepted = [row.facts for row in rows if row.good() and isinstance(row.facts, Facts)]
    return [dataclasses.replace(row, unpaired=_unpaired(row, accepted)) for row in rows]


def _unpaired(row: Checked, accepted: Sequence[Facts]) -> tuple[Finding, ...]:
    return unpaired(row.facts, accepted) if isinstance(row.facts, Facts) and row.good() else ()


async def _try(preflight: Preflight, node: Node) -> Facts | NodeFault:
    try:
        return await preflight.inspect(node)
    except NodeFault as fault:
        return fault
