"""Nodes listed in a YAML file, which is read again and again."""

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path

import yaml

from pdproxy.clock import Clock
from pdproxy.errors import SettingsError
from pdproxy.nodes.discovery.source import DiscoveryError, Nodes, poll
from pdproxy.nodes.node import Node, Role

_FIELDS = frozenset({"url", "role", "name", "model", "aliases", "weight"})
_URL = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?/?")


class FileSource:
    """Reads the whole file each time: it is small, and times of change are wrong on network mounts and links.

    Args:
        interval: seconds between two reads.
        roles: nodes of other roles in the file are left out.
    """

    def __init__(
        self, path: Path, clock: Clock, interval: float = 5.0, roles: frozenset[Role] = frozenset(Role)
    ) -> None:
        self._path = path
        self._clock = clock
        self._interval = interval
        self._roles = roles

    @property
    def place(self) -> str:
        """See `NodeSource`."""
        return f"the file {self._path}"

    def watch(self) -> AsyncGenerator[Nodes, None]:
        """See `NodeSource`. A file that cannot be used, perhaps half written, changes nothing."""
        return poll(self.place, self.list, self._clock, self._interval, logging.ERROR)

    async def list(self) -> Nodes:
        """See `NodeSource`."""
        try:
            nodes = read_entries(await asyncio.to_thread(self._path.read_bytes))
        except (OSError, SettingsError) as error:
            raise DiscoveryError(str(error)) from error
        return tuple(node for node in nodes if node.role in self._roles)


def read_entries(text: bytes) -> Nodes:
    """Nodes of a YAML (or JSON) list of ``{url, role, name?, model?, aliases?, weight?}``.

    Raises:
        SettingsError: names the entry and the field that cannot be used.
    """
    try:
        entries = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SettingsError(f"the list of nodes is not YAML: {error}") from error
    if not isinstance(entries, list):
        raise SettingsError("the list of nodes must be a list of {url, role}")
    nodes = tuple(_node(index, entry) for index, entry in enumerate(entries))
    names = [node.name for node in nodes]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SettingsError(f"two nodes are called {twice!r}")
    return nodes


def _node(index: int, entry: object) -> Node:
    if not isinstance(entry, dict):
        raise SettingsError(f"node {index}: must be {{url, role}}")
    unknown = sorted(str(key) for key in entry.keys() - _FIELDS)
    if unknown:
        raise SettingsError(f"node {index}: unknown field {unknown[0]!r}; there are {', '.join(sorted(_FIELDS))}")
    url, role = _url(index, entry), _role(index, entry)
    name = _text(index, entry, "name") or f"{role}-{url.partition('://')[2]}"
    return Node(name, url, role, _text(index, entry, "model"), _aliases(index, entry), _weight(index, entry))


def _url(index: int, entry: Mapping[str, object]) -> str:
    url = _text(index, entry, "url")
    if _URL.fullmatch(url) is None:
        raise SettingsError(f"node {index}: url must be a base address such as http://10.0.0.1:8000, not {url!r}")
    return url.rstrip("/")


def _role(index: int, entry: Mapping[str, object]) -> Role:
    try:
        return Role(_text(index, entry, "role"))
    except ValueError as error:
        raise SettingsError(f"node {index}: role must be prefill or decode, not {entry.get('role')!r}") from error


def _text(index: int, entry: Mapping[str, object], field: str) -> str:
    value = entry.get(field, "")
    if not isinstance(value, str):
        raise SettingsError(f"node {index}: {field} must be text, not {value!r}")
    return value


def _aliases(index: int, entry: Mapping[str, object]) -> tuple[str, ...]:
    value = entry.get("aliases", [])
    if not isinstance(value, list) or not all(isinstance(alias, str) for alias in value):
        raise SettingsError(f"node {index}: aliases must be a list of names, not {value!r}")
    return tuple(value)


def _weight(index: int, entry: Mapping[str, object]) -> float:
    value = entry.get("weight", 1.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1000:
        raise SettingsError(f"node {index}: weight must be above 0 and at most 1000, not {value!r}")
    return float(value)
