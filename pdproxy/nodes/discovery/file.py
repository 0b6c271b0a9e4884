"""Nodes listed in a YAML file, which is read again and again."""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Annotated

import pydantic
import yaml

from pdproxy.clock import Clock
from pdproxy.nodes.discovery.source import DiscoveryError, Nodes, poll
from pdproxy.nodes.node import Node, Role
from pdproxy.settings.types import (
    UNSHOWN,
    NodeRoles,
    NodeUrl,
    in_order,
    kind_of_node,
    one_for_each_address,
    with_roles,
)


class FileSource:
    """Reads the whole file each time: it is small, and times of change are wrong on network mounts and links.

    Args:
        interval: seconds between two reads.
        roles: other roles of nodes in the file are left out, and nodes of no role that is left.
    """

    def __init__(
        self, path: Path, clock: Clock, interval: float = 5.0, roles: frozenset[Role] = frozenset(Role)
    ) -> None:
        self._path = path
        self._clock = clock
        self._interval = interval
        self._roles = roles

    @property
    def where(self) -> str:
        """See `Source`."""
        return f"the file {self._path}"

    def watch(self) -> AsyncGenerator[Nodes, None]:
        """See `Source`. A file that cannot be used, perhaps half written, changes nothing."""
        return poll(self.where, self.list, self._clock, self._interval, logging.ERROR)

    async def list(self) -> Nodes:
        """See `Source`."""
        try:
            nodes = read_entries(await asyncio.to_thread(self._path.read_bytes))
        except OSError as error:
            raise DiscoveryError(str(error)) from error
        kept = (dataclasses.replace(node, roles=in_order(self._roles.intersection(node.roles))) for node in nodes)
        return tuple(node for node in kept if node.roles)


class _Entry(pydantic.BaseModel, extra="forbid", strict=True):
    """A node in the file."""

    url: NodeUrl
    roles: NodeRoles = tuple(Role)
    name: str = ""
    model: str = ""
    aliases: list[str] = []
    weight: Annotated[float, pydantic.Field(gt=0, le=1000, allow_inf_nan=False)] = 1.0

    _roles = pydantic.model_validator(mode="before")(with_roles)

    def to_node(self) -> Node:
        name = self.name or f"{kind_of_node(self.roles)}-{self.url.partition('://')[2]}"
        return Node(name, self.url, self.roles, self.model, tuple(self.aliases), self.weight)


def read_entries(text: bytes) -> Nodes:
    """Nodes of a YAML (or JSON) list of ``{url, roles?, name?, model?, aliases?, weight?}``.

    Raises:
        DiscoveryError: names the entry and the field that cannot be used.
    """
    try:
        entries = pydantic.TypeAdapter(list[_Entry]).validate_python(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise DiscoveryError(f"the list of nodes is not YAML: {error}") from error
    except pydantic.ValidationError as error:
        raise DiscoveryError(_sentence(error)) from error
    try:
        nodes = tuple(entry.to_node() for entry in one_for_each_address(entries))
    except ValueError as error:
        raise DiscoveryError(str(error)) from error
    names = [node.name for node in nodes]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DiscoveryError(f"two nodes are called {twice!r}")
    return nodes


def _sentence(error: pydantic.ValidationError) -> str:
    first = error.errors()[0]
    if not first["loc"]:
        return "the list of nodes must be a list of {url, roles}"
    node, *fields = map(str, first["loc"])
    if not fields:
        return f"node {node}: must be {{url, roles}}, not {first['input']!r}"
    if first["type"] == "extra_forbidden":
        return f"node {node}: unknown field {fields[0]!r}; there are {', '.join(sorted(_Entry.model_fields))}"
    if first["type"] == UNSHOWN:
        return f"node {node}: {fields[0]}: must be {first['msg']}"
    given = "" if first["type"] == "missing" else f", not {first['input']!r}"
    return f"node {node}: {'.'.join(fields)}: {first['msg'].removeprefix('Value error, ')}{given}"
