"""HTTP/1.1 to nodes: `HttpTransport`, the one implementation of `port.Transport`."""

import ssl

from pdproxy.clock import Clock
from pdproxy.transport.port import Incoming, Outgoing, Patience


class HttpTransport:
    """Pooled keep-alive connections; no redirects, no proxies, no cookies.

    Args:
        clock: tells how long a pooled connection was idle.
        ssl_context: for https nodes; None uses the system's authorities.
    """

    def __init__(self, clock: Clock, ssl_context: ssl.SSLContext | None = None) -> None:
        self._clock = clock
        self._ssl_context = ssl_context

    async def send(self, request: Outgoing, patience: Patience) -> Incoming:
        """See `port.Transport.send`."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Close every connection."""
