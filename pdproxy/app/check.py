"""``pdproxy check``: whether the nodes of the settings, and those that are found as they say, can work together."""

import asyncio
import contextlib
import dataclasses
import os
import sys
from collections.abc import Sequence

from pdproxy.admin.check_table import passed, table
from pdproxy.app.build import nodes_of
from pdproxy.app.host import HostEnvironment, Sources, node_tls, own_credential, own_headers
from pdproxy.clock import SystemClock
from pdproxy.nodes.discovery.source import DiscoveryError, Source
from pdproxy.nodes.node import Node, Role
from pdproxy.nodes.preflight import CheckRow, Preflight, check_nodes
from pdproxy.settings import Settings
from pdproxy.transport.httpx_transport import HttpxTransport

LOOK_SECONDS = 30.0
"""For one look into one source."""


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What was found out.

    Attributes:
        rows: of each node.
        unseen: a sentence for each source that showed no node.
    """

    rows: Sequence[CheckRow]
    unseen: Sequence[str]

    def good(self) -> bool:
        """Whether every node would be admitted and has a partner, and every source shows some."""
        return not self.unseen and passed(self.rows)


def check(settings: Settings) -> int:
    """Print the table; 0 when every node would be admitted and can hand over, else 1.

    Raises:
        SettingsError: a file that the settings name cannot be used, or there is no cluster to ask.
    """
    report = asyncio.run(inspect(settings, HostEnvironment(os.environ)))
    lines = [table(report.rows)] if report.rows else []
    sys.stdout.write("\n".join([*lines, *report.unseen]) + "\n")
    return 0 if report.good() else 1


async def inspect(settings: Settings, around: HostEnvironment) -> Report:
    """Look into each source once, and ask every node.

    Raises:
        SettingsError: as `check`.
    """
    clock = SystemClock()
    headers = own_headers(own_credential(settings.upstream))
    async with (
        contextlib.aclosing(HttpxTransport(node_tls(settings.upstream))) as transport,
        contextlib.aclosing(Sources(settings.discovery, clock, around)) as sources,
    ):
        looks = await asyncio.gather(*map(_look, sources.all))
        nodes = _distinct([*nodes_of(settings.nodes), *(node for found, _ in looks for node in found)])
        rows = await check_nodes(Preflight(transport, headers), nodes)
    return Report(rows, [why for _, why in looks if why])


async def _look(source: Source) -> tuple[tuple[Node, ...], str]:
    """The nodes that a source shows, or why it shows none."""
    try:
        async with asyncio.timeout(LOOK_SECONDS):
            found = await source.list()
    except TimeoutError:
        return (), f"{source.place} could not be looked at: no answer within {LOOK_SECONDS:g} s"
    except DiscoveryError as error:
        return (), f"{source.place} could not be looked at: {error}"
    return found, "" if found else f"{source.place}: there are no nodes now"


def _distinct(nodes: Sequence[Node]) -> list[Node]:
    """Without those that were named before: the proxy too takes an address once for each role."""
    first: dict[tuple[str, Role], Node] = {}
    for node in nodes:
        first.setdefault((node.url, node.role), node)
    return list(first.values())
