"""Where nodes are listed: what a source offers, and what the kinds of sources have in common."""

import dataclasses
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Protocol

from pdproxy.clock import Clock
from pdproxy.errors import PdproxyError
from pdproxy.nodes.node import Node, Role

_LOG = logging.getLogger(__name__)

Nodes = tuple[Node, ...]


class DiscoveryError(PdproxyError):
    """A source could not be listed; the message says why."""


class Watched(Protocol):
    """Nodes that come and go."""

    def watch(self) -> AsyncGenerator[Nodes, None]:
        """All nodes that there should be, first as soon as known, then after each change; never ends.

        Trouble is logged and tried again; the last list holds meanwhile: that a list cannot be read says nothing about
        the nodes on it, and active health looks after those.
        """
        ...


class Source(Watched, Protocol):
    """Somewhere that nodes are listed."""

    @property
    def place(self) -> str:
        """Where, in words for an operator: "the file nodes.yaml"."""
        ...

    async def list(self) -> Nodes:
        """All nodes that there should be, as of now; once, for `pdproxy check`.

        Raises:
            DiscoveryError: it could not be found out.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Template:
    """What all nodes of a source have in common.

    Attributes:
        role: of each.
        scheme: ``http`` or ``https``.
        model: as clients name it; "" asks each node.
        aliases: further names.
        weight: of each.
    """

    role: Role
    scheme: str = "http"
    model: str = ""
    aliases: tuple[str, ...] = ()
    weight: float = 1.0

    def node(self, host: str, port: int) -> Node:
        """The node at this address, named after its role and address."""
        netloc = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        url = f"{self.scheme}://{netloc}"
        return Node(f"{self.role}-{netloc}", url, self.role, self.model, self.aliases, self.weight)


class Changes:
    """Remembers the last list, so that only changes are passed on."""

    def __init__(self) -> None:
        self._last: Nodes | None = None

    def is_new(self, nodes: Nodes) -> bool:
        """Whether this differs from the last list; it is the last one from now on."""
        new, self._last = nodes != self._last, nodes
        return new


async def poll(
    place: str,
    list_nodes: Callable[[], Awaitable[Nodes]],
    clock: Clock,
    interval: float,
    level: int = logging.WARNING,
) -> AsyncGenerator[Nodes, None]:
    """`Watched.watch` for what can only be listed again and again.

    Args:
        place: see `Source.place`.
        list_nodes: raises `DiscoveryError` where the last list shall hold; logged once as long as the reason stays.
        interval: seconds between two lists.
        level: that trouble is logged with.
    """
    changes, logged = Changes(), ""
    while True:
        try:
            nodes = await list_nodes()
        except DiscoveryError as error:
            if str(error) != logged:
                _LOG.log(level, "the nodes of %s stay as they were: %s", place, error)
            logged = str(error)
        else:
            logged = ""
            if changes.is_new(nodes):
                yield nodes
        await clock.sleep(interval)
