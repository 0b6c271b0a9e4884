"""What one prompt's request holds of nodes, written down before anything can interrupt, given back on every exit."""

from pdproxy.drive.errands import Errands
from pdproxy.drive.job import Job
from pdproxy.lifecycle import IllegalMove
from pdproxy.nodes.node import Node
from pdproxy.nodes.pool import Occupied, Pool
from pdproxy.observe.metrics import Metrics
from pdproxy.transport.port import Incoming


class Holdings:
    """A decode node's place, an open response, a hand-over that nobody has read yet."""

    def __init__(self, pool: Pool, metrics: Metrics, errands: Errands, job: Job) -> None:
        self._pool = pool
        self._metrics = metrics
        self._errands = errands
        self._job = job
        self._place: Occupied | None = None
        self._prefilling: tuple[Occupied, str, int] | None = None
        self._incoming: Incoming | None = None
        self._unread: tuple[Node, str] | None = None

    @property
    def place(self) -> Occupied:
        """On the decode node.

        Raises:
            IllegalMove: none was taken.
        """
        if self._place is None:
            raise IllegalMove("a decode leg needs a place on its node")
        return self._place

    def occupy(self, decode: Node) -> None:
        """Take a place on a decode node; the one held before is given back."""
        self.vacate()
        self._place = self._pool.occupy(decode.name)

    def vacate(self) -> None:
        """Give the decode node's place back."""
        if self._place is not None:
            self._place.release()
            self._place = None

    def begin_prefill(self, node: Node, hand_over: str, tokens: int) -> Occupied:
        """A prefill leg is about to be sent: from now on the node may hold blocks by this name. Its place there.

        ``tokens`` are what its prompt has, as far as one can tell.
        """
        place = self._pool.occupy(node.name)
        self._metrics.prefill_began(node.model, tokens)
        self._prefilling = (place, node.model, tokens)
        self._unread = (node, hand_over)
        return place

    def end_prefill(self) -> None:
        """The prefill leg has ended, in whatever way; its blocks may wait for a reader."""
        ended, self._prefilling = self._prefilling, None
        if ended is not None:
            place, model, tokens = ended
            place.release()
            self._metrics.prefill_ended(model, tokens)

    def settled(self) -> None:
        """Nothing is held by the hand-over's name any more: it was read, or never taken up."""
        self._unread = None

    def abandon(self) -> None:
        """Have the hand-over freed, if nobody has read it."""
        unread, self._unread = self._unread, None
        if unread is not None:
            self._errands.release(unread[0], self._job.request.model, unread[1], self._job.headers)

    def keep(self, incoming: Incoming) -> Incoming:
        """A response arrived: it is closed by `hang_up`."""
        self._incoming = incoming
        return incoming

    def progress(self) -> None:
        """The decode node is alive."""
        if self._place is not None:
            self._place.progress()

    def cut(self) -> None:
        """Close the decode leg while it is being read: there the reading ends in RESET."""
        if self._incoming is not None:
            self._errands.close(self._incoming)

    async def hang_up(self) -> None:
        """End the decode leg: its place first, for closing may be interrupted."""
        self.vacate()
        incoming, self._incoming = self._incoming, None
        if incoming is not None:
            await incoming.aclose()

    async def aclose(self) -> None:
        """Give everything back. Idempotent."""
        self.end_prefill()
        self.abandon()
        await self.hang_up()
