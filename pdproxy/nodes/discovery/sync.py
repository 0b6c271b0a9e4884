"""Keeps the pool in step with a source: nodes join through the preflight and leave by draining."""

import contextlib
import logging

from pdproxy.nodes.discovery.source import Watched
from pdproxy.nodes.drain import AfterDrain, Drainer
from pdproxy.nodes.node import Node
from pdproxy.nodes.pool import Pool, UnknownNode

_LOG = logging.getLogger(__name__)


class DiscoverySync:
    """Touches only nodes that its source has listed: static ones and the operator's are not its business.

    Args:
        drain_seconds: for running requests on a node that the source does not list any more.
    """

    def __init__(self, pool: Pool, drainer: Drainer, source: Watched, drain_seconds: float) -> None:
        self._pool = pool
        self._drainer = drainer
        self._source = source
        self._drain_seconds = drain_seconds
        self._listed: dict[str, Node] = {}

    async def run(self) -> None:
        """Apply each list of the source, until cancelled."""
        async with contextlib.aclosing(self._source.watch()) as lists:
            async for nodes in lists:
                self.apply(nodes)

    def apply(self, nodes: tuple[Node, ...]) -> None:
        """Make the pool hold these, and no others of this source."""
        wanted = {node.name: node for node in nodes}
        for name in [name for name in self._listed if name not in wanted]:
            del self._listed[name]
            self._drain(name)
        for name, node in wanted.items():
            if name not in self._listed:
                self._add(node)
            elif self._listed[name] != node:
                self._listed[name] = node
                self._amend(node)

    def _add(self, node: Node) -> None:
        views = self._pool.snapshot().nodes
        if any(view.node.url == node.url and view.node.role is node.role and view.node.name != node.name
               for view in views):  # fmt: skip
            _LOG.warning("node %s is there already under another name", node.url)
            return
        self._listed[node.name] = node
        if any(view.node.name == node.name for view in views):
            self._drainer.stop(node.name)
            self._amend(node)
            return
        _LOG.info("node %s was found", node.name)
        self._pool.add(node)

    def _amend(self, node: Node) -> None:
        """An operator may have removed it meanwhile: then it stays removed until the source lists it anew."""
        with contextlib.suppress(UnknownNode):
            self._pool.amend(node)

    def _drain(self, name: str) -> None:
        with contextlib.suppress(UnknownNode):
            self._drainer.start(name, self._drain_seconds, AfterDrain.REMOVE)
            _LOG.info("node %s is not listed any more and drains", name)
