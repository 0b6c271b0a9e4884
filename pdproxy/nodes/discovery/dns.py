"""Nodes behind a DNS name: every address of a headless service, or every service that SRV records list."""

import dataclasses
import logging
from collections.abc import AsyncGenerator

from pdproxy.clock import Clock
from pdproxy.nodes.discovery.dns_wire import BadAnswer
from pdproxy.nodes.discovery.resolver import Resolver
from pdproxy.nodes.discovery.source import Known, Template, Unseen
from pdproxy.nodes.node import Node

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Name:
    """What to look up: with a port its addresses, without one its SRV records, which name ports themselves."""

    name: str
    port: int | None = None


class DnsSource:
    """Looks a name up again and again.

    Args:
        interval: seconds between two look-ups; the records' own times to live are not looked at.
    """

    def __init__(
        self, resolver: Resolver, name: Name, template: Template, clock: Clock, interval: float = 10.0
    ) -> None:
        self._resolver = resolver
        self._name = name
        self._template = template
        self._clock = clock
        self._interval = interval
        self._complaint = ""

    @property
    def place(self) -> str:
        """See `Source`."""
        return f"the name {self._name.name}"

    async def sightings(self) -> AsyncGenerator[tuple[Node, ...], None]:
        """See `Source`. A name that has nothing now keeps its last nodes: a name server that lost its data looks the
        same as a service with no ready node, and active health tells the two apart."""
        known = Known()
        while True:
            nodes = await self._again()
            if nodes and known.news(nodes):
                yield nodes
            await self._clock.sleep(self._interval)

    async def look(self) -> tuple[Node, ...]:
        """See `Source`."""
        try:
            return await self._find()
        except (OSError, BadAnswer, ValueError) as error:  # ValueError: it is no name at all
            raise Unseen(str(error) or type(error).__name__) from error

    async def _again(self) -> tuple[Node, ...]:
        try:
            found = await self.look()
        except Unseen as unseen:
            self._complain(str(unseen))
            return ()
        self._complain("" if found else "it has no records")
        return found

    async def _find(self) -> tuple[Node, ...]:
        name, port = self._name.name, self._name.port
        if port is not None:
            return tuple(self._template.node(host, port) for host in await self._resolver.addresses(name))
        return tuple(self._template.node(found.host, found.port) for found in await self._resolver.services(name))

    def _complain(self, complaint: str) -> None:
        """Say it once, not at every look-up."""
        if complaint and complaint != self._complaint:
            _LOG.warning("the nodes of %s stay as they were: %s", self.place, complaint)
        self._complaint = complaint
