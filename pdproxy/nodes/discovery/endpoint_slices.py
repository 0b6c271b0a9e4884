"""A service's endpoints, ready or terminating, by a list of EndpointSlices and the watch that continues it. No I/O."""

from collections.abc import Iterable
from typing import NamedTuple

from lightkube.models.discovery_v1 import Endpoint, EndpointSlice


class Lost(Exception):
    """The known slices may be wrong, or are too old to continue from: list again."""


Address = tuple[str, int]
"""Host and port."""


class _Addresses(NamedTuple):
    """Addresses of one slice. ``terminating``: those that still serve, and are not ready."""

    ready: frozenset[Address] = frozenset()
    terminating: frozenset[Address] = frozenset()


class EndpointSlices:
    """Every slice in its last version.

    Args:
        port: the name of the port to take; "" takes a slice's first one.

    Attributes:
        version: from which to watch; "" when everything must be listed.
    """

    def __init__(self, port: str) -> None:
        self._port = port
        self._addresses: dict[str, _Addresses] = {}
        self._versions: dict[str, int] = {}
        self.version = ""

    def replace(self, slices: Iterable[EndpointSlice], version: str) -> None:
        """Take a whole list."""
        self._addresses, self._versions = {}, {}
        for each in slices:
            self._put(each)
        self.version = version

    def apply(self, event: str, changed: EndpointSlice) -> None:
        """Take one event of a watch; one that is older than the known version of its slice changes nothing.

        Raises `Lost` for an event of another kind.
        """
        if event not in ("ADDED", "MODIFIED", "DELETED", "BOOKMARK"):
            raise Lost(f"unknown event {event!r}")
        name, version = _identity(changed)
        number, watched = _number(version), _number(self.version)
        if event != "BOOKMARK" and (number is None or number >= self._versions.get(name, 0)):
            self._put(changed)
            if event == "DELETED":
                del self._addresses[name]
        if version and (number is None or watched is None or number > watched):
            self.version = version

    def addresses(self) -> tuple[Address, ...]:
        """Host and port of every endpoint that is ready in any slice, sorted."""
        return tuple(sorted(self._ready()))

    def terminating(self) -> tuple[Address, ...]:
        """Addresses of every endpoint that terminates, still serves, and is ready in no slice, sorted."""
        going = {address for addresses in self._addresses.values() for address in addresses.terminating}
        return tuple(sorted(going - self._ready()))

    def _ready(self) -> set[Address]:
        return {address for addresses in self._addresses.values() for address in addresses.ready}

    def _put(self, changed: EndpointSlice) -> None:
        name, version = _identity(changed)
        ports = (each.port for each in changed.ports or () if not self._port or each.name == self._port)
        port = next((number for number in ports if number is not None), None)
        endpoints = [] if port is None else [each for each in changed.endpoints or () if each.addresses]
        ready, terminating = (
            frozenset((each.addresses[0], port) for each in endpoints if port is not None and chosen(each))
            for chosen in (_is_ready, _still_serves)
        )
        self._addresses[name] = _Addresses(ready, terminating)
        self._versions[name] = _number(version) or 0


def _is_ready(endpoint: Endpoint) -> bool:
    """A missing condition is unknown, which the API says to read as ready and not terminating."""
    conditions = endpoint.conditions
    return conditions is None or (conditions.ready is not False and conditions.terminating is not True)


def _still_serves(endpoint: Endpoint) -> bool:
    """Whether a terminating endpoint passes its readiness probe; where that is unknown, ready is to be asked."""
    conditions = endpoint.conditions
    if conditions is None or conditions.terminating is not True:
        return False
    return conditions.ready is True if conditions.serving is None else conditions.serving


def _identity(of: EndpointSlice) -> tuple[str, str]:
    """Name and version."""
    return (of.metadata.name or "", of.metadata.resourceVersion or "") if of.metadata else ("", "")


def _number(version: str) -> int | None:
    """Since Kubernetes 1.35 versions of one kind are promised to compare as numbers; None for any other."""
    return int(version) if version.isascii() and version.isdecimal() else None
