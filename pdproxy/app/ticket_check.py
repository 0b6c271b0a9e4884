"""The part of ``pdproxy check`` about tickets: decode nodes that were given many, and used next to none of them.

A node counts what became of its tickets since it started. Which prefill nodes they came from it does not count: a
running proxy does, and says it in ``GET /nodes`` (`nodes.hand_overs`).
"""

import asyncio
from collections.abc import Sequence

from pdproxy.errors import NodeFault
from pdproxy.nodes.hand_overs import LAST, USELESS
from pdproxy.nodes.node import Node, Role
from pdproxy.nodes.node_info import samples_of
from pdproxy.nodes.preflight import exchange
from pdproxy.request import Headers
from pdproxy.transport.port import HttpRequest, Timeouts, Transport

_REFUSED = "pdproxy_connector_refused_total"
_READS = "pdproxy_connector_reads_total"
_USED = "verified"
_TIMEOUTS = Timeouts(connect=5.0, headers=10.0, stall=10.0, whole=20.0)


async def ticket_lines(transport: Transport, headers: Headers, nodes: Sequence[Node]) -> list[str]:
    """A line for each decode node whose tickets were of no use. ``headers``: of the requests to nodes."""
    decodes = [node for node in nodes if Role.DECODE in node.roles]
    metrics = await asyncio.gather(*(_metrics(transport, headers, node) for node in decodes))
    found = ((node, in_vain(body)) for node, body in zip(decodes, metrics, strict=True))
    return [f"{node.name}: tickets: {sentence}" for node, sentence in found if sentence]


def in_vain(metrics: bytes) -> str:
    """The figures of a node that used less than one in ten of its tickets; "" for any other."""
    used, causes = 0.0, dict[str, float]()
    for sample in samples_of(metrics, (_REFUSED, _READS)):
        cause = sample.labels.get("reason") or sample.labels.get("outcome", "")
        if sample.name == _READS and cause == _USED:
            used += sample.value
        else:
            causes[cause] = causes.get(cause, 0.0) + sample.value
    useless = sum(causes.values())
    if useless + used < LAST or useless < USELESS * (useless + used):
        return ""
    named = ", ".join(
        f"{cause} {times:.0f}" for cause, times in sorted(causes.items(), key=lambda each: -each[1]) if times
    )
    return f"{useless:.0f} of {useless + used:.0f} since the node started were of no use ({named})"


async def _metrics(transport: Transport, headers: Headers, node: Node) -> bytes:
    try:
        status, body = await exchange(transport, HttpRequest("GET", f"{node.url}/metrics", headers), _TIMEOUTS)
    except NodeFault:
        return b""
    return body if status == 200 else b""
