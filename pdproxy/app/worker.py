"""One worker of several: ``python -m pdproxy.app.worker CHANNEL NUMBER``, started by the supervisor alone.

It is a proxy as `run.serve` starts it, but for its ports: its settings, and the clients' and operators' connections,
come from the supervisor. When that is gone, it ends as at a SIGTERM.
"""

import gc

if __name__ == "__main__":
    gc.disable()  # for the imports, as in `pdproxy.__main__`

import asyncio
import functools
import logging
import os
import socket
import sys

from uvicorn.loops.auto import auto_loop_factory

from pdproxy.app.build import proxy
from pdproxy.app.host import HostEnvironment, check_pair
from pdproxy.app.run import clients_config, operators_config
from pdproxy.errors import SettingsError
from pdproxy.observe.logs import DroppedLines, LineHandler, configure_process
from pdproxy.request import read_json
from pdproxy.server.server import Server, leave, raise_file_limit, tune_collector
from pdproxy.server.server import serve as serve_ports
from pdproxy.settings.model import Settings
from pdproxy.workers.channel import Connection, Inbox

_LOG = logging.getLogger("pdproxy")

FAILED = 2


def main(channel: socket.socket, number: int) -> int:
    """Serve until a signal or the supervisor's end; the exit status."""
    settings = Settings(**read_json(sys.stdin.buffer.read()))
    log = configure_process(settings.log, {"worker": number})
    raise_file_limit()
    try:
        with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
            runner.run(_serve(settings, channel, log))
    except SettingsError as error:
        channel.setblocking(True)
        channel.sendall(str(error).encode())
        return FAILED
    return 0


async def _serve(settings: Settings, channel: socket.socket, log: LineHandler) -> None:
    async with proxy(settings, HostEnvironment(os.environ)) as running:
        running.registry.register(DroppedLines(lambda: log.dropped))
        check_pair(settings.listen.tls_certificate, settings.listen.tls_key)
        clients = Server(clients_config(settings, running), None)
        operators = Server(operators_config(settings, running), None)
        tune_collector()

        def adopt(kind: Connection, connection: socket.socket) -> None:
            (clients if kind is Connection.CLIENT else operators).take(connection)

        inbox = Inbox(channel, adopt, functools.partial(_on_supervisor_gone, clients, operators, running.leaving))
        inbox.open()
        try:
            await serve_ports(clients, operators, running.leaving)
        finally:
            inbox.close()


def _on_supervisor_gone(clients: Server, operators: Server, leaving: asyncio.Event) -> None:
    if not leaving.is_set():
        _LOG.error("the supervisor is gone: ending")
        leave(clients, operators, leaving)


if __name__ == "__main__":
    sys.exit(main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])))
