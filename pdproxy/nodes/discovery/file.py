"""Nodes listed in a file, which is read again and again."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from pathlib import Path

from pdproxy.clock import Clock
from pdproxy.errors import SettingsError
from pdproxy.nodes.discovery.entries import read_entries
from pdproxy.nodes.discovery.source import Known, Unseen
from pdproxy.nodes.node import Node, Role

_LOG = logging.getLogger(__name__)


class FileSource:
    """Reads the whole file each time: it is small, and times of change lie on network mounts and links.

    Args:
        interval: seconds between two looks.
        roles: whose nodes are taken; others in the file are not looked at.
    """

    def __init__(
        self, path: Path, clock: Clock, interval: float = 5.0, roles: frozenset[Role] = frozenset(Role)
    ) -> None:
        self._path = path
        self._clock = clock
        self._interval = interval
        self._roles = roles
        self._complaint = ""

    @property
    def place(self) -> str:
        """See `Source`."""
        return f"the file {self._path}"

    async def sightings(self) -> AsyncGenerator[tuple[Node, ...], None]:
        """See `Source`. A file that cannot be used, perhaps half written, changes nothing."""
        known = Known()
        while True:
            nodes = await self._again()
            if nodes is not None and known.news(nodes):
                yield nodes
            await self._clock.sleep(self._interval)

    async def look(self) -> tuple[Node, ...]:
        """See `Source`."""
        try:
            nodes = read_entries(await asyncio.to_thread(self._path.read_bytes))
        except (OSError, SettingsError) as error:
            raise Unseen(str(error)) from error
        return tuple(node for node in nodes if node.role in self._roles)

    async def _again(self) -> tuple[Node, ...] | None:
        try:
            nodes = await self.look()
        except Unseen as unseen:
            self._complain(str(unseen))
            return None
        self._complaint = ""
        return nodes

    def _complain(self, complaint: str) -> None:
        """Say it once, not at every look."""
        if complaint != self._complaint:
            _LOG.error("the nodes in %s stay as they were: %s", self.place, complaint)
        self._complaint = complaint
