"""``pdproxy check``: whether the configured and the discovered nodes can work together, as a table.

TOKENS is attention capacity, SEQUENCES how many the state groups allow, LONGEST how many of the greatest length run
together, BINDS whether attention or state runs out first with these. A node without partner serves alone; a line below
the table says in what it differs from the nearest node of the other role. Then a tiny prompt is handed over between the
nodes that could exchange tickets; that it was not is a failure, and the line says why. Further lines tell of prefix
caches: what each can do, and advice, which is no failure; and of decode nodes whose tickets were of no use.
"""

import asyncio
import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterable, Sequence

from pdproxy.app.build import nodes_of
from pdproxy.app.cache_check import cache_lines, look_for_events
from pdproxy.app.hand_over_check import hand_over_lines
from pdproxy.app.host import HostEnvironment, Sources, tls
from pdproxy.app.ticket_check import ticket_lines
from pdproxy.clock import SystemClock
from pdproxy.credential import Secret, read_secret
from pdproxy.errors import NodeFault
from pdproxy.nodes.discovery.source import DiscoveryError, NodeSource, one_for_each_url
from pdproxy.nodes.node import Capacity, Node
from pdproxy.nodes.node_info import NodeInfo
from pdproxy.nodes.preflight import CheckRow, Preflight, cause, check_nodes, is_unreachable, symptom
from pdproxy.settings.model import Settings
from pdproxy.transport.httpx_transport import HttpxTransport

LIST_SECONDS = 30.0
"""For a discovery source to list its nodes."""
_COLUMNS = ("NODE", "ROLE", "MODEL", "COHORT", "TOKENS", "SEQUENCES", "LONGEST", "BINDS", "VERDICT")


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """The result of a check: a row for each node, a sentence for each source that listed none, a line for each pair
    that hands nothing over, lines about caches and tickets."""

    rows: Sequence[CheckRow]
    empty_sources: Sequence[str]
    hand_overs: Sequence[str] = ()
    caches: Sequence[str] = ()

    def good(self) -> bool:
        """Whether every node would be admitted and hands over, and every source lists some."""
        return not self.empty_sources and not self.hand_overs and passed(self.rows)


def check(settings: Settings) -> int:
    """Print the table; 0 when every node would be admitted and can hand over, else 1.

    Raises:
        SettingsError: a file that the settings name cannot be used, or there is no cluster to ask.
    """
    report = asyncio.run(inspect(settings, HostEnvironment(os.environ)))
    lines = [table(report.rows)] if report.rows else []
    sys.stdout.write("\n".join([*lines, *report.empty_sources, *report.hand_overs, *report.caches]) + "\n")
    return 0 if report.good() else 1


async def inspect(settings: Settings, host: HostEnvironment) -> Report:
    """List the nodes of each source once, and ask every node.

    Raises:
        SettingsError: as `check`.
    """
    upstream = settings.upstream
    headers = Secret(read_secret(upstream.credential_file, "upstream.credential_file")).headers
    async with (
        contextlib.aclosing(
            HttpxTransport(tls(upstream.ca_file, "upstream.ca_file", upstream.server_name))
        ) as transport,
        contextlib.aclosing(Sources(settings.discovery, SystemClock(), host)) as sources,
    ):
        listed = await asyncio.gather(*map(_list, sources.all))
        nodes = _distinct([*nodes_of(settings.nodes), *(node for found, _ in listed for node in found)])
        rows = await check_nodes(Preflight(transport, headers), nodes)
        answered = [row.info.joined() for row in rows if isinstance(row.info, NodeInfo)]
        caches = cache_lines(answered, await look_for_events(transport, headers(), answered))
        caches += await ticket_lines(transport, headers(), answered)
        good = [row.info.joined() for row in rows if row.good() and isinstance(row.info, NodeInfo)]
        hand_overs = await hand_over_lines(transport, headers, good)
    return Report(rows, [why for _, why in listed if why], hand_overs, caches)


async def _list(source: NodeSource) -> tuple[tuple[Node, ...], str]:
    """The nodes of a source, or why there are none."""
    try:
        async with asyncio.timeout(LIST_SECONDS):
            found = await source.list()
    except TimeoutError:
        return (), f"{source.where} cannot be read: no answer within {LIST_SECONDS:g} s"
    except DiscoveryError as error:
        return (), f"{source.where} cannot be read: {error}"
    return found, "" if found else f"{source.where}: there are no nodes now"


def _distinct(nodes: Sequence[Node]) -> list[Node]:
    """Each address once, as the proxy takes it: under the name that came first, with the roles of all."""
    return list(one_for_each_url(nodes))


def table(rows: Sequence[CheckRow]) -> str:
    """One line per node, then a line for each finding, by the name of the setting."""
    cells = [_COLUMNS, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join([*lines, *(finding for row in rows for finding in _findings(row))])


def passed(rows: Iterable[CheckRow]) -> bool:
    """Whether every node would be admitted, and has a partner if there is any node of the other role."""
    return all(row.good() and not row.unpaired for row in rows)


def _cells(row: CheckRow) -> tuple[str, ...]:
    if isinstance(row.info, NodeFault):
        verdict = "unreachable" if is_unreachable(row.info) else "unusable"
        return row.node.name, ",".join(row.node.roles), row.node.model or "?", "?", *_capacity(None), verdict
    node = row.info.joined()
    roles = ",".join(node.roles)
    return node.name, roles, node.model or "?", node.cohort or "?", *_capacity(node.capacity), _verdict(row)


def _capacity(capacity: Capacity | None) -> tuple[str, str, str, str]:
    if capacity is None:
        return "?", "?", "?", "?"
    sequences = "any" if capacity.sequences is None else f"{capacity.sequences:,}"
    return f"{capacity.tokens:,}", sequences, f"{capacity.longest:,}", capacity.binding


def _verdict(row: CheckRow) -> str:
    if row.compatibility.refusals:
        return "refused"
    if row.unpaired:
        return "no partner"
    return "ok, with warnings" if row.compatibility.warnings else "ok"


def _findings(row: CheckRow) -> list[str]:
    if isinstance(row.info, NodeFault):
        return [f"{row.node.name}: {symptom(row.info)}: {cause(row.info)}"]
    kinds = {
        "refused": row.compatibility.refusals,
        "exchanges no tickets": row.unpaired,
        "warning": row.compatibility.warnings,
    }
    return [f"{row.node.name}: {kind}: {finding}" for kind, findings in kinds.items() for finding in findings]
