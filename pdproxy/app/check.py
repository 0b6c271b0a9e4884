"""``pdproxy check``: whether the nodes of the settings can work together."""

import asyncio
import sys

from pdproxy.admin.check import passed, table
from pdproxy.app.build import nodes_of
from pdproxy.app.secrets import node_tls, own_credential, own_headers
from pdproxy.clock import SystemClock
from pdproxy.nodes.preflight import Checked, Preflight
from pdproxy.nodes.preflight import check as check_nodes
from pdproxy.settings import Settings
from pdproxy.transport.http import HttpTransport


def check(settings: Settings) -> int:
    """Print the table; 0 when every node would be admitted, else 1.

    Raises:
        SettingsError: a file that the settings name cannot be used.
    """
    rows = asyncio.run(_check(settings))
    sys.stdout.write(table(rows) + "\n")
    return 0 if passed(rows) else 1


async def _check(settings: Settings) -> list[Checked]:
    transport = HttpTransport(SystemClock(), node_tls(settings.upstream))
    headers = own_headers(own_credential(settings.upstream))
    try:
        return await check_nodes(Preflight(transport, headers), nodes_of(settings.nodes))
    finally:
        await transport.aclose()
