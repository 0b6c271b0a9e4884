"""The part of ``pdproxy check`` that hands prompts over: a tiny one between the nodes that could exchange tickets.

Nothing that nodes publish shows whether one reaches the other; a hand-over does, and the decode node tells why it did
not read its ticket.
"""

import asyncio
import itertools
from collections.abc import Iterable, Sequence

from pdproxy.clock import SystemClock
from pdproxy.credential import OwnHeaders
from pdproxy.errors import NodeFault
from pdproxy.legs.calls import release
from pdproxy.nodes.node import Node, Role
from pdproxy.nodes.proof import could_pair
from pdproxy.orchestration.one_hand_over import HandOverCalls, NotHandedOver, Unanswered
from pdproxy.transport.port import Timeouts, Transport

MOST_PAIRS = 64
"""The most pairs that are all tried. If there are more, each node is tried with one partner."""
AT_ONCE = 8
WITHIN = 60.0
"""Seconds for one."""
_RELEASE = Timeouts(connect=5.0, headers=5.0, stall=5.0, whole=5.0)


async def hand_over_lines(transport: Transport, headers: OwnHeaders, nodes: Sequence[Node]) -> list[str]:
    """A line for each pair of nodes between which nothing was handed over; none where all is well."""
    room, releases = asyncio.Semaphore(AT_ONCE), set[asyncio.Task[None]]()

    def let_go(node: Node, hand_over_id: str) -> None:
        work = release(transport, node, node.model, hand_over_id, _RELEASE, headers())
        releases.add(asyncio.get_running_loop().create_task(work))

    calls = HandOverCalls(transport, SystemClock(), headers, let_go)

    async def of(prefill: Node, decode: Node) -> str:
        async with room:
            why = await _why_not(calls, prefill, decode)
        return f"hand-overs fail: {why}" if why else ""

    lines = await asyncio.gather(*(of(*pair) for pair in _pairs(nodes)))
    await asyncio.gather(*releases, return_exceptions=True)  # a lease that is not released ends by itself
    return [line for line in lines if line]


async def _why_not(calls: HandOverCalls, prefill: Node, decode: Node) -> str:
    try:
        await calls.make_tiny(prefill, decode, WITHIN)
    except NotHandedOver as missing:
        return str(missing)
    except Unanswered as unanswered:
        return f"{prefill.name} to {decode.name}: {unanswered}"
    except NodeFault as fault:
        return f"{decode.name} did not answer with a ticket of {prefill.name}: {fault}"
    return ""


def _pairs(nodes: Sequence[Node]) -> list[tuple[Node, Node]]:
    prefills, decodes = ([node for node in nodes if role in node.roles] for role in Role)
    found = [pair for pair in itertools.product(prefills, decodes) if could_pair(*pair)]
    return found if len(found) <= MOST_PAIRS else list(_one_of_each(found))


def _one_of_each(pairs: Iterable[tuple[Node, Node]]) -> Iterable[tuple[Node, Node]]:
    """Fewest pairs first in which each node is."""
    seen = set[str]()
    for prefill, decode in pairs:
        if not {prefill.name, decode.name} <= seen:
            seen |= {prefill.name, decode.name}
            yield prefill, decode
