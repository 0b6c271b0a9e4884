"""``pdproxy serve``: the proxy on its two ports, until a signal."""

import asyncio
import contextlib
import functools
import gc
import logging
import math
import os
import resource
import sys

import uvicorn
from uvicorn.loops.auto import auto_loop_factory

from pdproxy.app.build import Proxy, proxy
from pdproxy.app.host import HostEnvironment, check_pair, renew_pair
from pdproxy.errors import SettingsError
from pdproxy.intake.api_app import AsgiApp
from pdproxy.observe.labels import WatchedSetting
from pdproxy.observe.logs import configure
from pdproxy.server.protocol import ConnectionLimits, guarded
from pdproxy.server.server import Server, bind
from pdproxy.server.server import serve as serve_ports
from pdproxy.settings.model import Settings

_LOG = logging.getLogger("pdproxy")

GC_THRESHOLD = 10_000
"""New objects between two collections: a request makes hundreds, and nearly all are freed without the collector."""
HEAD_SECONDS = 30.0
"""For a request's head: what a slow mobile client may need, and no more."""
MAX_OPEN_FILES = 1 << 20
OPERATORS_GRACE = 2.0
"""Seconds for an operator's request to end, once those of clients have."""


def serve(settings: Settings) -> int:
    """Run until SIGTERM or SIGINT; the process's exit status.

    Raises:
        SettingsError: an address or a file of the settings cannot be used.
    """
    configure(settings.log, sys.stderr)
    raise_file_limit()
    with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
        runner.run(_serve(settings))
    return 0


async def _serve(settings: Settings) -> None:
    async with proxy(settings, HostEnvironment(os.environ)) as running:
        clients, operators = _ports(settings, running)
        _tune_collector()
        _LOG.info("clients: %s, operators: %s", clients.address, operators.address)
        await serve_ports(clients, operators, running.leaving)
        _LOG.info("ended")


def _tune_collector() -> None:
    """What was built by now lives as long as the process: the collector need not scan it again (`make bench`)."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


def _ports(settings: Settings, running: Proxy) -> tuple[Server, Server]:
    listen = settings.listen
    check_pair(listen.tls_certificate, listen.tls_key)
    clients = bind(listen.host, listen.port, "listen.port")
    try:
        operators = bind(listen.admin_host, listen.admin_port, "listen.admin_port")
    except SettingsError:
        clients.close()
        raise
    return Server(clients_config(settings, running), clients), Server(operators_config(settings, running), operators)


def clients_config(settings: Settings, running: Proxy) -> uvicorn.Config:
    """Of the clients' port. It follows the files of its certificate and key: new connections get what they hold then.

    Raises:
        SettingsError: they are no certificate and its key.
    """
    certificate, key = settings.listen.tls_certificate, settings.listen.tls_key
    grace = settings.deadlines.shutdown
    config = _config(settings, running.clients, grace, ssl_certfile=certificate, ssl_keyfile=key)
    config.load()
    if config.ssl is not None and certificate is not None and key is not None:
        renew = functools.partial(renew_pair, config.ssl, certificate, key)
        running.files.add(WatchedSetting.CERTIFICATE, (certificate, key), renew)
    return config


def operators_config(settings: Settings, running: Proxy) -> uvicorn.Config:
    """Of the operators' port, which ends after the clients' one."""
    return _config(settings, running.operators, OPERATORS_GRACE)


def _config(settings: Settings, app: AsgiApp, grace: float, **tls: object) -> uvicorn.Config:
    """``grace``: seconds for running requests to end."""
    limits = ConnectionLimits(settings.limits.header_bytes, HEAD_SECONDS, settings.deadlines.stall)
    return uvicorn.Config(
        app,
        http=guarded(limits),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # the client's address is not used
        timeout_keep_alive=75,
        timeout_graceful_shutdown=math.ceil(grace),
        **tls,  # type: ignore[arg-type]
    )


def raise_file_limit() -> None:
    """Raise the limit of open files: a stream takes up to three sockets, and 1,024 is the usual limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return
    with contextlib.suppress(OSError, ValueError):  # a kernel with a lower limit of its own: then it stays
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
