"""What one request has seen of nodes, and when that counts against them."""

from pdproxy.errors import Fault
from pdproxy.failures import BLAMED, DOUBTED
from pdproxy.nodes.pool import Pool
from pdproxy.observe.labels import Leg


class Conduct:
    """Reports to the pool. What the request itself may have caused waits until another node has served it."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._doubted: list[tuple[Leg, str]] = []
        self.avoided: frozenset[str] = frozenset()
        """Nodes that failed this request: not planned for it again."""

    def failed(self, leg: Leg, name: str, fault: Fault) -> None:
        """A leg failed on a node."""
        self.avoided |= {name}
        if fault in DOUBTED:
            self._doubted.append((leg, name))
        elif fault in BLAMED:
            self._pool.report(name, fault)

    def served(self, leg: Leg, name: str) -> None:
        """A leg went well. A decode leg clears the request of every doubt, a prefill leg of those about prefill."""
        self._pool.report(name, None)
        for doubt in tuple(self._doubted):
            if leg in (Leg.DECODE, doubt[0]):
                self._doubted.remove(doubt)
                self._report_doubted(doubt[1], name)

    def shun(self, name: str) -> None:
        """Do not plan this node again for the request; nothing is held against it."""
        self.avoided |= {name}

    def forgive(self) -> None:
        """The request got an answer since: nodes that failed it before may be tried again."""
        self.avoided = frozenset()

    def _report_doubted(self, doubted: str, witness: str) -> None:
        if doubted != witness:
            self._pool.report(doubted, Fault.SERVER_ERROR)
