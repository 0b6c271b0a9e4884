"""Clients' connections that come to nothing before a request: counted, and told of in lines that are rare."""

import logging
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from pdproxy.observe.families import Counter
from pdproxy.observe.labels import ConnectionRefusal
from pdproxy.observe.rare_lines import RareLine

_LOG = logging.getLogger("pdproxy.server")
_TEXTS = {
    ConnectionRefusal.NO_DESCRIPTOR: (
        "connections wait: this process can open no further file (raise its limit of open files)"
    ),
    ConnectionRefusal.TLS: "TLS handshakes of clients failed",
    ConnectionRefusal.HTTP: "clients sent what is no acceptable HTTP request",
}

OnRefused = Callable[[ConnectionRefusal, str], None]
"""Told of a connection: why, and a sentence."""


class RefusedConnections:
    """The metric, and the lines."""

    def __init__(self, registry: CollectorRegistry) -> None:
        text = "Times that a client's connection came to nothing before a request."
        self._counter = Counter("pdproxy_connections_refused_total", text, ["reason"], registry=registry)
        self._counter.export_zeros(ConnectionRefusal)
        self._lines = {reason: RareLine(_LOG, text) for reason, text in _TEXTS.items()}

    def count(self, reason: ConnectionRefusal, detail: str) -> None:
        """One more."""
        self._counter.labels(reason).inc()
        self._lines[reason].happened(detail)


def uncounted(reason: ConnectionRefusal, detail: str) -> None:
    """An `OnRefused` that tells nobody."""
