"""Where nodes are listed: the interface of a source, what the kinds of sources share, and how the pool follows one."""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from pdproxy.clock import Clock
from pdproxy.errors import PdproxyError
from pdproxy.nodes.drain import AfterDrain, Drainer
from pdproxy.nodes.node import Node, Roles
from pdproxy.nodes.pool import Pool, UnknownNode
from pdproxy.settings.types import in_order, kind_of_node

_LOG = logging.getLogger(__name__)

Nodes = tuple[Node, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class TerminatingNode(Node):
    """A node that is going away and still serves, as a source lists it; the pool has it as an ordinary one."""


class DiscoveryError(PdproxyError):
    """A source could not be listed; the message says why."""


class NodeSource(Protocol):
    """A list of nodes that come and go."""

    @property
    def where(self) -> str:
        """Where the list is, in words for an operator: "the file nodes.yaml"."""
        ...

    async def list(self) -> Nodes:
        """All nodes that there should be, as of now; for `pdproxy check`. Raises `DiscoveryError`."""
        ...

    def watch(self) -> AsyncGenerator[Nodes, None]:
        """All nodes that there should be, first as soon as known, then after each change; never ends.

        With them those that should not, and still serve: as `TerminatingNode`.

        Errors are logged and tried again; the last list holds meanwhile: that it cannot be read says nothing about the
        nodes on it, and active health looks after those.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Template:
    """The facts that all nodes of a source that lists addresses have in common."""

    roles: Roles
    scheme: str = "http"

    def node_at(self, host: str, port: int) -> Node:
        """The node at this address, named after its roles and address."""
        return Node(*self._fields(host, port))

    def terminating(self, host: str, port: int) -> TerminatingNode:
        """The same, where it is going away."""
        return TerminatingNode(*self._fields(host, port))

    def _fields(self, host: str, port: int) -> tuple[str, str, Roles]:
        netloc = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return f"{kind_of_node(self.roles)}-{netloc}", f"{self.scheme}://{netloc}", self.roles


def one_for_each_url(nodes: Iterable[Node]) -> Nodes:
    """Those of one address as one node, with the roles of all. Where one list has it as terminating and another one
    does not, it stays."""
    found: dict[str, Node] = {}
    for node in nodes:
        first = found.setdefault(node.url, node)
        if first is not node:
            stays = node if isinstance(first, TerminatingNode) else first
            found[node.url] = dataclasses.replace(stays, name=first.name, roles=in_order((*first.roles, *node.roles)))
    return tuple(found.values())


async def poll(
    where: str,
    list_nodes: Callable[[], Awaitable[Nodes]],
    clock: Clock,
    interval: float,
    level: int = logging.WARNING,
) -> AsyncGenerator[Nodes, None]:
    """`NodeSource.watch` for what can only be listed again and again.

    Args:
        where: see `NodeSource.where`.
        list_nodes: raises `DiscoveryError` where the last list shall hold; logged once as long as the reason stays.
        interval: seconds between two lists.
        level: that errors are logged with.
    """
    last: Nodes | None = None
    logged = ""
    while True:
        try:
            nodes = await list_nodes()
        except DiscoveryError as error:
            if str(error) != logged:
                _LOG.log(level, "the nodes of %s stay as they were: %s", where, error)
            logged = str(error)
        else:
            logged = ""
            if nodes != last:
                last = nodes
                yield nodes
        await clock.sleep(interval)


class DiscoverySync:
    """Keeps the pool in step with all sources: nodes join through the preflight and leave by draining.

    Only nodes that a source has listed are touched: static ones and those that operators added stay as they are. What
    several sources list at one address is one node, with the roles of all, under the name that came first.
    ``drain_seconds``: for running requests on a node that is not listed any more.
    """

    def __init__(self, pool: Pool, drainer: Drainer, sources: Sequence[NodeSource], drain_seconds: float) -> None:
        self._pool = pool
        self._drainer = drainer
        self._sources = sources
        self._drain_seconds = drain_seconds
        self._lists: dict[int, Nodes] = {}
        self._listed: dict[str, Node] = {}

    async def run(self) -> None:
        """Apply each list of each source, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for number, source in enumerate(self._sources):
                group.create_task(self._follow(number, source))

    async def _follow(self, number: int, source: NodeSource) -> None:
        async with contextlib.aclosing(source.watch()) as lists:
            async for nodes in lists:
                self._lists[number] = nodes
                self.apply(one_for_each_url(node for number in sorted(self._lists) for node in self._lists[number]))

    def apply(self, nodes: Nodes) -> None:
        """Make the pool hold these, and no others of these sources."""
        names = {node.url: name for name, node in self._listed.items()}
        wanted = {
            name: dataclasses.replace(node, name=name) for node in nodes if (name := names.get(node.url, node.name))
        }
        for name in [name for name in self._listed if name not in wanted]:
            del self._listed[name]
            self._drain(name)
        for node in wanted.values():
            self._take(node, self._listed.get(node.name))

    def _take(self, node: Node, before: Node | None) -> None:
        if isinstance(node, TerminatingNode):
            if before is not None and before != node:
                self._listed[node.name] = node
                self._terminate(node.name)
        elif before is None:
            self._add(node)
        elif before != node:
            self._listed[node.name] = node
            self._drainer.stop(node.name)
            self._amend(node)

    def _add(self, node: Node) -> None:
        others = (view.node for view in self._pool.state().nodes if view.node.name != node.name)
        if any(other.url == node.url for other in others):
            _LOG.warning("node %s is there already under another name", node.url)
            return
        self._listed[node.name] = node
        if node.name in self._pool:
            self._drainer.stop(node.name)
            self._amend(node)
            return
        self._pool.add(node)

    def _amend(self, node: Node) -> None:
        """An operator may have removed it meanwhile: then it stays removed until the source lists it anew."""
        with contextlib.suppress(UnknownNode):
            self._pool.amend(node)

    def _terminate(self, name: str) -> None:
        """One that was never listed as anything else is left alone: it would leave before it has joined."""
        with contextlib.suppress(UnknownNode):
            self._drainer.terminate(name, self._drain_seconds)

    def _drain(self, name: str) -> None:
        with contextlib.suppress(UnknownNode):
            self._drainer.start(name, self._drain_seconds, AfterDrain.REMOVE, "it is not listed any more")
