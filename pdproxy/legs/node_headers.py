"""Which headers of a node's answer the client gets. Pure."""

import urllib.parse

from pdproxy.request import HOP_BY_HOP, Headers

_OF_THIS_EXCHANGE = HOP_BY_HOP | {"content-length", "date", "x-request-id"}
"""Headers of the exchange with the node; the exchange with the client has its own."""
_OF_A_SITE = frozenset({"set-cookie", "alt-svc", "strict-transport-security", "server"})
"""Headers that only a site may send to a browser, or about itself: to the client, nodes are no sites."""


def for_client(headers: Headers) -> Headers:
    """All but hop-by-hop headers, what the proxy sets itself, and what only a site may say.

    A ``location`` passes as a path: a node's address is of no use to the client, and not for it to know.
    """
    connection = (value for name, value in headers if name == "connection")
    dropped = _OF_THIS_EXCHANGE | {token.strip().lower() for value in connection for token in value.split(",")}
    return tuple(_without_address(pair) for pair in headers if not _is_dropped(pair[0], dropped))


def _is_dropped(name: str, dropped: frozenset[str]) -> bool:
    return name in dropped or name in _OF_A_SITE or name.startswith(("access-control-", "x-pdproxy-"))


def _without_address(pair: tuple[str, str]) -> tuple[str, str]:
    name, value = pair
    if name not in ("location", "content-location"):
        return pair
    parts = urllib.parse.urlsplit(value)
    return name, urllib.parse.urlunsplit(("", "", parts.path.replace("//", "/") or "/", parts.query, parts.fragment))
