"""How one stream goes on when its decode node fails or leaves: what is kept for that, and what another node is asked.

Two moves are possible, in this order of preference:

- *resumed*: from the journal, where the leg came with one. The node gets the client's own body and the journal, and
  sends what follows. Any shape but those of `Shape.not_resumable`.
- *restarted*: nothing generated has reached the client, so the request is asked anew.
"""

from pdproxy.nodes.node import Node
from pdproxy.observe.labels import Move
from pdproxy.orchestration.node_picker import NodePicker
from pdproxy.reasons import NotContinuableReason
from pdproxy.request import DecodeRoute, LegForm, SubRequest
from pdproxy.stream.journal import Journal
from pdproxy.stream.transcript import Transcript


class Continuity:
    """Follows one stream over all its legs.

    Attributes:
        transcript: what the client has.
        journal: of all legs since the answer was begun, where they come with one.
        moves_left: of those that a stream may make.
        form: of the leg that began last.
    """

    def __init__(self, sub_request: SubRequest, migrations: int, nodes: NodePicker, *, adds_usage: bool) -> None:
        self._sub_request = sub_request
        self._nodes = nodes
        self._adds_usage = adds_usage
        self._move: Move | None = None
        self.transcript = Transcript(sub_request.endpoint, sub_request.shape)
        self.journal: Journal | None = None
        self.moves_left = migrations
        self.form = LegForm()

    def new_form(self, node: Node) -> LegForm:
        """The form of a decode leg that begins on this node now."""
        if self._move is Move.RESUMED:
            records = b"" if self.journal is None else self.journal.records()
            self.form = LegForm(DecodeRoute.JOURNALED, self._adds_usage, records)
        else:
            self.form = LegForm(self._first_route(node), self._adds_usage)
            self.journal = Journal() if self.form.route is DecodeRoute.JOURNALED else None
        return self.form

    def _first_route(self, node: Node) -> DecodeRoute:
        """Where the leg is sent that begins the answer: a journal is kept where the stream may move, and its node can
        write one. Whether another node could resume it now does not count: one may join."""
        may_move = self.moves_left > 0 and self._sub_request.shape.not_resumable is None
        return DecodeRoute.JOURNALED if may_move and self._nodes.resumes(node) else DecodeRoute.ENDPOINT

    @property
    def obstacle(self) -> NotContinuableReason | None:
        """Why the stream could not go on elsewhere, as far as its shape and its leg decide that."""
        if self.form.route is DecodeRoute.JOURNALED:
            return None
        return self._sub_request.shape.not_resumable or NotContinuableReason.NO_JOURNAL

    def possible_move(self, node: str) -> Move | None:
        """How the stream would go on if this node, which it is on, failed now; None where it cannot."""
        if self.moves_left <= 0:
            return None
        started = self.transcript.started
        if self._resumable and (started or self._nodes.resumes_elsewhere(node)):
            return Move.RESUMED
        return None if started else Move.RESTARTED

    @property
    def may_move(self) -> bool:
        """Whether the stream can ever move again, if there are nodes for it: else its body is of no more use."""
        return self.moves_left > 0 and (self._resumable or not self.transcript.started)

    @property
    def _resumable(self) -> bool:
        return self.journal is not None and self.journal.reason is None

    @property
    def complete(self) -> bool:
        """Whether nothing is missing but an ending that is known."""
        return self.transcript.finished and self.transcript.ending_known

    def start_move(self, move: Move) -> None:
        """The stream moves now: that is one move less. Restarted, it begins with an empty transcript."""
        self.moves_left -= 1
        self._move = move
        if move is Move.RESTARTED:
            self.transcript.restart()
