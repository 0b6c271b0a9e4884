"""The part of ``pdproxy check`` about prefix caches: what each node's can do, and what in its settings makes hits rare.

For this the node is also asked where it publishes KV events, and a connection is made to each of those ports.
"""

import asyncio
from collections.abc import Mapping, Sequence

from pdproxy.errors import NodeFault
from pdproxy.events.sources import EventSource, read_sources
from pdproxy.nodes.cache_advice import EventsSeen, cache_report, first_of_cohorts
from pdproxy.nodes.node import Node
from pdproxy.nodes.preflight import exchange
from pdproxy.request import Headers
from pdproxy.transport.port import HttpRequest, Timeouts, Transport

CONNECT_SECONDS = 3.0
"""For one port of a node's KV events."""
_TIMEOUTS = Timeouts(connect=5.0, headers=10.0, stall=10.0, whole=20.0)


async def look_for_events(transport: Transport, headers: Headers, nodes: Sequence[Node]) -> Mapping[str, EventsSeen]:
    """Whether KV events can be read from here, by the node's name. ``headers``: of the requests to nodes."""
    seen = await asyncio.gather(*(_look(transport, headers, node) for node in nodes))
    return {node.name: found for node, found in zip(nodes, seen, strict=True)}


async def _look(transport: Transport, headers: Headers, node: Node) -> EventsSeen:
    request = HttpRequest("GET", f"{node.url}/kv_event_sources", headers)
    try:
        status, body = await exchange(transport, request, _TIMEOUTS)
    except NodeFault:
        return EventsSeen.UNKNOWN
    found = read_sources(body if status == 200 else b"", node.url)
    if not found.usable and not found.unusable:
        return EventsSeen.OFF
    reached = await asyncio.gather(*map(_reached, found.usable))
    return EventsSeen.READ if reached and all(reached) and not found.unusable else EventsSeen.UNREACHABLE


async def _reached(source: EventSource) -> bool:
    """Whether somebody listens at the publisher's port."""
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(source.host, source.port)
    except OSError:  # TimeoutError is one
        return False
    writer.close()
    return True


def cache_lines(nodes: Sequence[Node], seen: Mapping[str, EventsSeen]) -> list[str]:
    """Two lines for each node at most, ``cache`` and ``advice``; equal ones stand once, behind all the nodes' names."""
    named: dict[str, list[str]] = {}
    first = first_of_cohorts(nodes)
    for node in nodes:
        report = cache_report(node, first, seen.get(node.name, EventsSeen.UNKNOWN))
        facts = [f"cache: {'; '.join(report.facts)}"] if report.facts else []
        for line in (*facts, *(f"advice: {sentence}" for sentence in report.advice)):
            named.setdefault(line, []).append(node.name)
    return [f"{', '.join(names)}: {line}" for line, names in named.items()]
