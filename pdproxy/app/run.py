"""``pdproxy serve``: the proxy on its two ports, until a signal."""

import asyncio
import functools
import logging
import os
import socket

import uvicorn
from uvicorn.loops.auto import auto_loop_factory

from pdproxy.admin.guard import open_port_warning
from pdproxy.app.build import Proxy, proxy
from pdproxy.app.host import HostEnvironment, check_pair, renew_pair
from pdproxy.errors import SettingsError
from pdproxy.observe.labels import WatchedSetting
from pdproxy.observe.logs import DroppedLines, LineHandler, configure_process
from pdproxy.server.server import OPERATORS_GRACE, Server, bind, http_config, raise_file_limit, tune_collector
from pdproxy.server.server import serve as serve_ports
from pdproxy.settings.model import Listen, Settings
from pdproxy.settings.types import ReusePort

_LOG = logging.getLogger("pdproxy")
NO_NODES = (
    "there are no nodes, so every request gets 503: name them with --node URL, or --prefill URL and --decode URL, let "
    "`discovery` find them, or add them with POST /nodes at %s"
)


def serve(settings: Settings) -> int:
    """Run until SIGTERM or SIGINT; the process's exit status.

    Raises:
        SettingsError: an address or a file of the settings cannot be used.
    """
    log = configure_process(settings.log)
    raise_file_limit()
    with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
        runner.run(_serve(settings, log))
    return 0


async def _serve(settings: Settings, log: LineHandler) -> None:
    async with proxy(settings, HostEnvironment(os.environ)) as running:
        running.registry.register(DroppedLines(lambda: log.dropped))
        clients, operators = _ports(settings, running)
        tune_collector()
        _LOG.info("clients: %s, operators: %s", clients.address, operators.address)
        if alone := one_node(settings):
            _LOG.info(alone)
        if warning := open_port_warning(settings.listen):
            _LOG.warning(warning)
        if not settings.nodes and not settings.discovery.wanted:
            _LOG.warning(NO_NODES, operators.address)
        await serve_ports(clients, operators, running.leaving)
        _LOG.info("ended")


def one_node(settings: Settings) -> str:
    """The limits of a proxy with one node of both roles, in a line; "" for any other."""
    if settings.discovery.wanted or len(settings.nodes) != 1 or len(settings.nodes[0].roles) == 1:
        return ""
    return (
        "one node: it computes every prompt and generates every answer, so nothing is handed over. The proxy gives it a"
        " queue, fair shares and limits of keys, metrics, and streams that go on after its restart; another --node adds"
        " hand-overs, and streams that go on at once where a node dies"
    )


def _ports(settings: Settings, running: Proxy) -> tuple[Server, Server]:
    listen = settings.listen
    check_pair(listen.tls_certificate, listen.tls_key)
    # The clients' port comes last: where it is shared, the kernel gives it connections at once, which would be lost if
    # the process could not start.
    operators = _operators_port(listen)
    try:
        clients = bind(listen.host, listen.port, "listen.port", listen.reuse_port)
    except SettingsError:
        operators.close()
        raise
    return Server(clients_config(settings, running), clients), Server(operators_config(settings, running), operators)


def _operators_port(listen: Listen) -> socket.socket:
    try:
        return bind(listen.admin_host, listen.admin_port, "listen.admin_port")
    except SettingsError as error:
        if listen.reuse_port is ReusePort.OFF:
            raise
        raise SettingsError(f"{error} Proxies that share listen.port need a listen.admin_port each.") from error


def clients_config(settings: Settings, running: Proxy) -> uvicorn.Config:
    """The clients' port. It follows the files of its certificate and key: new connections get what they hold then.

    Raises:
        SettingsError: they are no certificate and its key.
    """
    certificate, key = settings.listen.tls_certificate, settings.listen.tls_key
    grace = settings.deadlines.shutdown
    config = http_config(
        settings, running.clients, grace, running.refused.count, ssl_certfile=certificate, ssl_keyfile=key
    )
    config.load()
    if config.ssl is not None and certificate is not None and key is not None:
        renew = functools.partial(renew_pair, config.ssl, certificate, key)
        running.files.add(WatchedSetting.CERTIFICATE, (certificate, key), renew)
    return config


def operators_config(settings: Settings, running: Proxy) -> uvicorn.Config:
    """The operators' port, which ends after the clients' one."""
    return http_config(settings, running.operators, OPERATORS_GRACE, running.refused.count)
