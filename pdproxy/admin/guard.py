"""Which requests the operators' port takes at all: those that name this proxy, and no changes from web pages of others.

A page can point its own name at this proxy's address after the browser has loaded it (DNS rebinding). The browser then
takes the proxy for the page's own server: the page may read and send anything, and ``Origin`` and ``Sec-Fetch-Site``
say that it is at home. ``Host`` alone still holds the page's name. An address cannot be rebound, so any address passes:
probes of the kubelet and scrapes of Prometheus ask by a pod's address.
"""

import ipaddress
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from pdproxy.errors import ClientError
from pdproxy.observe.labels import OperatorRefusal
from pdproxy.observe.rare_lines import RareLine
from pdproxy.settings.model import Listen

_LOG = logging.getLogger("pdproxy.admin")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

JSON = "application/json"
READS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing."""
_SHOWN = 100
"""Characters of a client's header that are logged and answered."""
_HOST = re.compile(r"(?:\[(?P<v6>[^\[\]]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::[0-9]{0,5})?")
_ALLOWED_SITES = frozenset({"same-origin", "none"})
"""Values of ``Sec-Fetch-Site`` for requests of the port's own page and of the person at the browser. Not ``same-site``,
which another port of the same machine is."""


_SET_A_TOKEN = (
    "Only GET is answered here: other machines can reach the operators' port, so changing nodes needs a token. Name a"
    " file that holds one in listen.admin_token_file, or set listen.admin_host to 127.0.0.1."
)


class KnownHosts:
    """Hosts that ``Host`` may name: any address, localhost, and the names of the settings.

    Ports are not compared: port-forwards and published ports change them, and they make no other name.
    """

    def __init__(self, listen: Listen) -> None:
        self._names = frozenset(_normal(name) for name in ("localhost", listen.admin_host, *listen.admin_names))

    def __contains__(self, host: str) -> bool:
        """Whether the value of a ``Host`` header is known."""
        parts = _HOST.fullmatch(host)
        if parts is None:
            return False
        if parts["v6"] is not None:
            return _is_address(parts["v6"], ipaddress.IPv6Address)
        name = _normal(parts["name"])
        return name in self._names or _is_address(name, ipaddress.IPv4Address)


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is reached from this machine alone."""
    if _normal(host) == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def open_port_warning(listen: Listen) -> str:
    """For the log at the start: that nodes cannot be changed over the operators' port; "" where they can."""
    if not _lacks_token(listen):
        return ""
    return (
        f"listen.admin_host is {listen.admin_host}, which other machines may reach, and listen.admin_token_file is not"
        " set: the operators' port shows everything to all who reach it, and refuses to change nodes (403). Name a file"
        " that holds a token, or set listen.admin_host to 127.0.0.1"
    )


class RefusalLog:
    """Counts refused requests, and logs the first of each reason and then one line a minute at most.

    ``refused``: counts one.
    """

    def __init__(self, refused: Callable[[OperatorRefusal], None]) -> None:
        self._refused = refused
        self._lines = {
            reason: RareLine(_LOG, f"the operators' port refused requests: {reason}") for reason in OperatorRefusal
        }

    def record(self, reason: OperatorRefusal, method: str, error: ClientError) -> None:
        """A request was refused."""
        self._refused(reason)
        self._lines[reason].happened(f"{method[:20]}: {error.message}")


class GuardedPort:
    """An ASGI application: the operators' application ``app`` behind these checks."""

    def __init__(self, app: App, listen: Listen, refusals: RefusalLog) -> None:
        self._app = app
        self._hosts = KnownHosts(listen)
        self._lacks_token = _lacks_token(listen)
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
            return
        reason, error = refusal
        self._refusals.record(reason, scope["method"], error)
        await send_answer(send, error.status, JSON, error.body())

    def _refusal(self, scope: Scope) -> tuple[OperatorRefusal, ClientError] | None:
        hosts = _values(scope, b"host")
        if len(hosts) != 1 or hosts[0] not in self._hosts:
            return OperatorRefusal.UNKNOWN_HOST, _unknown_host(hosts)
        if scope["method"] in READS:
            return None
        if _is_foreign(scope, hosts[0]):
            text = "A web page of another origin may not change anything here."
            return OperatorRefusal.FOREIGN_ORIGIN, ClientError(403, text, code="foreign_origin")
        if self._lacks_token:
            return OperatorRefusal.NO_TOKEN_SET, ClientError(403, _SET_A_TOKEN, code="admin_token_not_set")
        return None


async def send_answer(
    send: Send, status: int, content_type: str, body: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()
) -> None:
    """Send a whole answer."""
    length = (b"content-length", str(len(body)).encode())
    fields = [(b"content-type", content_type.encode()), length, *headers]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})


def _lacks_token(listen: Listen) -> bool:
    return listen.admin_token_file is None and not is_loopback(listen.admin_host)


def _normal(name: str) -> str:
    """A name without case and without the dot that may end it."""
    return name.lower().removesuffix(".")


def _is_address(text: str, kind: type[ipaddress.IPv4Address] | type[ipaddress.IPv6Address]) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for field, value in scope["headers"] if field == name]


def _unknown_host(hosts: Iterable[str]) -> ClientError:
    said = ", ".join(repr(host[:_SHOWN]) for host in hosts) or "nothing"
    return ClientError(
        403,
        f"The Host header names {said}, by which this port is not known: ask for it by its address, or add the name to"
        " listen.admin_names.",
        code="unknown_host",
    )


def _is_foreign(scope: Scope, host: str) -> bool:
    """Whether a web page of another origin sent the request.

    Browsers say so in ``Sec-Fetch-Site``, but only to addresses that they trust (HTTPS, loopback); to others ``Origin``
    must do. Other clients send neither.
    """
    if sites := _values(scope, b"sec-fetch-site"):
        return not _ALLOWED_SITES.issuperset(sites)
    return any(origin.partition("://")[2] != host for origin in _values(scope, b"origin"))
