"""What finds nodes, as the rest sees it."""

import dataclasses
from collections.abc import AsyncGenerator
from typing import Protocol

from pdproxy.errors import PdproxyError
from pdproxy.nodes.node import Node, Role


class Unseen(PdproxyError):
    """A source could not be looked at; the message says why."""


class Followed(Protocol):
    """Nodes that come and go."""

    def sightings(self) -> AsyncGenerator[tuple[Node, ...], None]:
        """All nodes that there should be, first as soon as known, then after each change; never ends.

        Trouble is logged and tried again; what was seen last holds meanwhile: that a list cannot be read says nothing
        about the nodes on it, and active health looks after those.
        """
        ...


class Source(Followed, Protocol):
    """Somewhere that nodes are listed."""

    @property
    def place(self) -> str:
        """Where, in words for an operator: "the file nodes.yaml"."""
        ...

    async def look(self) -> tuple[Node, ...]:
        """All nodes that there should be, as of now; once, for `pdproxy check`.

        Raises:
            Unseen: it could not be found out.
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


class Known:
    """The last sighting, so that only changes are passed on."""

    def __init__(self) -> None:
        self._last: tuple[Node, ...] | None = None

    def news(self, nodes: tuple[Node, ...]) -> bool:
        """Whether this differs from what was seen last; it is what was seen last from now on."""
        new, self._last = nodes != self._last, nodes
        return new
