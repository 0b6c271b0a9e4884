"""Kubernetes EndpointSlices and the watch protocol, without I/O.

A list answers ``{"metadata": {"resourceVersion": v}, "items": […]}``; a watch from ``v`` streams JSON objects, one a
line: ``{"type": "ADDED" | "MODIFIED" | "DELETED" | "BOOKMARK" | "ERROR", "object": …}``. After a break the watch goes
on from the last version seen; when the server has forgotten that one (410 Gone), everything is listed again.
"""

import dataclasses
import enum
import json
from collections.abc import Iterable, Mapping

from pdproxy.errors import Fault, NodeFault

_LONGEST_LINE = 16 * 1024 * 1024
"""Bytes: a slice of 1000 endpoints, the most there can be, has well under one megabyte."""


class Gone(Exception):
    """The server cannot go on from our version: list again."""


class Sort(enum.StrEnum):
    """What an event says."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    BOOKMARK = "BOOKMARK"
    ERROR = "ERROR"


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One line of a watch."""

    sort: Sort
    object: Mapping[str, object]


class Lines:
    """Cuts a watch into events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[Event]:
        """The events that this piece completes.

        Raises:
            NodeFault: INVALID_BODY, a line that is no event, or one that never ends.
        """
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            raise NodeFault(Fault.INVALID_BODY, "a line of the watch never ends")
        return [_event(line) for line in lines if line.strip()]


class Book:
    """The slices as the list and the watch have told them.

    Args:
        port: the name of the port to take; "" takes a slice's first one.
    """

    def __init__(self, port: str) -> None:
        self._port = port
        self._slices: dict[str, frozenset[tuple[str, int]]] = {}
        self._versions: dict[str, int] = {}
        self.version = ""
        """To watch from; "" when everything must be listed."""

    def listed(self, body: bytes) -> None:
        """A list has come: it replaces everything.

        Raises:
            NodeFault: INVALID_BODY, it is no list.
        """
        answer = _object(body)
        version, items = _mapping(answer.get("metadata")).get("resourceVersion"), answer.get("items")
        if not isinstance(version, str) or not isinstance(items, list | None):
            raise NodeFault(Fault.INVALID_BODY, "the list has no resourceVersion")
        self._slices, self._versions = {}, {}
        for item in items or []:
            self._put(_mapping(item))
        self.version = version

    def told(self, event: Event) -> None:
        """An event has come. One that is older than what is known of its slice changes nothing.

        Raises:
            Gone: the server cannot go on.
        """
        if event.sort is Sort.ERROR:
            self.version = ""
            raise Gone(str(event.object.get("message", "")))
        metadata = _mapping(event.object.get("metadata"))
        version = metadata.get("resourceVersion")
        if event.sort is not Sort.BOOKMARK:
            self._change(event)
        if isinstance(version, str) and _is_newer(version, self.version):
            self.version = version

    def addresses(self) -> tuple[tuple[str, int], ...]:
        """Host and port of every endpoint that is ready in any slice, sorted."""
        return tuple(sorted({address for slice_ in self._slices.values() for address in slice_}))

    def _change(self, event: Event) -> None:
        name, version = _identity(event.object)
        if version is not None and version < self._versions.get(name, 0):
            return
        if event.sort is Sort.DELETED:
            self._slices.pop(name, None)
            self._versions[name] = version or 0
        else:
            self._put(event.object)

    def _put(self, item: Mapping[str, object]) -> None:
        name, version = _identity(item)
        self._versions[name] = version or 0
        port = _port(item, self._port)
        hosts = _hosts(item) if port is not None else ()
        self._slices[name] = frozenset((host, port) for host in hosts if port is not None)


def _identity(item: Mapping[str, object]) -> tuple[str, int | None]:
    """Name and version; since Kubernetes 1.35 versions of one kind are promised to compare as numbers."""
    metadata = _mapping(item.get("metadata"))
    version = metadata.get("resourceVersion")
    number = _number(version) if isinstance(version, str) else None
    return f"{metadata.get('namespace', '')}/{metadata.get('name', '')}", number


def _is_newer(version: str, than: str) -> bool:
    ours, theirs = _number(version), _number(than)
    return ours is None or theirs is None or ours > theirs


def _number(version: str) -> int | None:
    return int(version) if version.isascii() and version.isdecimal() else None


def _port(item: Mapping[str, object], name: str) -> int | None:
    ports = [_mapping(port) for port in _list(item.get("ports"))]
    numbers = (port.get("port") for port in ports if not name or port.get("name") == name)
    return next((number for number in numbers if isinstance(number, int)), None)


def _hosts(item: Mapping[str, object]) -> Iterable[str]:
    for endpoint in map(_mapping, _list(item.get("endpoints"))):
        conditions = _mapping(endpoint.get("conditions"))
        # A missing condition is unknown, which the API says to read as ready.
        if conditions.get("ready") is False or conditions.get("terminating") is True:
            continue
        yield from (host for host in _list(endpoint.get("addresses"))[:1] if isinstance(host, str))


def _event(line: bytes) -> Event:
    value = _object(line)
    try:
        return Event(Sort(str(value.get("type"))), _mapping(value.get("object")))
    except ValueError as error:
        raise NodeFault(Fault.INVALID_BODY, f"unknown event {value.get('type')!r}") from error


def _object(body: bytes) -> Mapping[str, object]:
    try:
        value = json.loads(body)
    except ValueError as error:
        raise NodeFault(Fault.INVALID_BODY, "not JSON") from error
    if not isinstance(value, dict):
        raise NodeFault(Fault.INVALID_BODY, "not an object")
    return value


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
