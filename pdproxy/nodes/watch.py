"""What the pool tells whoever counts: a port, so that the pool needs no registry."""

from typing import Protocol

from pdproxy.nodes.circuit import Phase
from pdproxy.nodes.node import Node, Role, State
from pdproxy.observe.metrics import Metrics


class NodeWatch(Protocol):
    """Told of every change; must not block or raise."""

    def active(self, node: Node, count: int) -> None:
        """``count`` legs are in flight on ``node`` now."""
        ...

    def state(self, node: Node, state: State) -> None:
        """``node`` is in ``state`` now."""
        ...

    def circuit_moved(self, node: Node, to: Phase) -> None:
        """The node's circuit changed its phase."""
        ...

    def barred(self, prefill: str, decode: str, *, lifted: bool) -> None:
        """No ticket passes between these two nodes any more, or (``lifted``) tickets may pass again."""
        ...

    def gone(self, node: Node) -> None:
        """``node`` left the pool: forget its series."""
        ...


class Unwatched:
    """Counts nothing."""

    def active(self, node: Node, count: int) -> None: ...

    def state(self, node: Node, state: State) -> None: ...

    def circuit_moved(self, node: Node, to: Phase) -> None: ...

    def barred(self, prefill: str, decode: str, *, lifted: bool) -> None: ...

    def gone(self, node: Node) -> None: ...


class MetricsWatch:
    """Puts it all on the proxy's metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def active(self, node: Node, count: int) -> None:
        self._metrics.node_active(node.name, node.role, count)

    def state(self, node: Node, state: State) -> None:
        self._metrics.node_state(node.name, node.role, state)
        if node.role is Role.PREFILL and node.model:
            self._metrics.prefill_expected(node.model)

    def circuit_moved(self, node: Node, to: Phase) -> None:
        self._metrics.circuit_moved(node.name, to)

    def barred(self, prefill: str, decode: str, *, lifted: bool) -> None:
        if lifted:
            self._metrics.pair_allowed(prefill, decode)
        else:
            self._metrics.pair_barred(prefill, decode)

    def gone(self, node: Node) -> None:
        self._metrics.node_forgotten(node.name, node.role, State, Phase)
