"""How one stream goes on when its decode node fails or leaves: what is kept for that, and what another node is asked.

Three moves are possible, in this order of preference:

- *resumed*: from the journal, where the leg came with one. The node gets the client's own body and the journal, and
  sends what follows. Any shape but those of `Shape.not_resumable`.
- *restarted*: nothing generated has reached the client, so the request is asked anew.
- *continued*: by token ids, where they were followed: the prompt is what was produced so far. `Shape.not_continuable`
  names the shapes that cannot.
"""

import functools
from collections.abc import Callable

from pdproxy.legs.rewrite import continuation_body
from pdproxy.nodes.node import Node
from pdproxy.observe.labels import Move
from pdproxy.orchestration.node_picker import NodePicker
from pdproxy.request import NO_ADDITIONS, Addition, Json, LegForm, NotContinuableReason, Shape, StreamRoute, SubRequest
from pdproxy.stream.choice_state import NotContinuable
from pdproxy.stream.journal import Journal
from pdproxy.stream.transcript import Transcript


def choose_route(shape: Shape, node: Node, migrations: int, resumes_elsewhere: Callable[[], bool]) -> StreamRoute:
    """Where a stream's leg is sent that begins the answer.

    A journal is kept where a stream may move, its node can write one, and either another node could resume it now, or
    nothing but a journal could ever continue its shape.

    Args:
        node: that the leg is sent to.
        migrations: moves that are left to the stream.
        resumes_elsewhere: whether another node that takes requests can.
    """
    if not node.can_resume or migrations <= 0 or shape.not_resumable is not None:
        return StreamRoute.ENDPOINT
    return StreamRoute.JOURNALED if not shape.continuable or resumes_elsewhere() else StreamRoute.ENDPOINT


class Continuity:
    """Follows one stream over all its legs.

    Attributes:
        transcript: what the client has.
        journal: of all legs since the answer was begun, where they come with one.
        left: moves that are left.
        form: of the leg that began last.
    """

    def __init__(self, sub_request: SubRequest, migrations: int, nodes: NodePicker, usage: frozenset[Addition]) -> None:
        self._sub_request = sub_request
        self._nodes = nodes
        self._usage = usage
        self._move: Move | None = None
        self.transcript = Transcript(sub_request.endpoint, sub_request.shape)
        self.journal: Journal | None = None
        self.left = migrations
        self.form = LegForm()

    def new_form(self, node: Node) -> LegForm:
        """The form of a decode leg that begins on this node now."""
        match self._move:
            case Move.RESUMED:
                records = b"" if self.journal is None else self.journal.records()
                self.form = LegForm(StreamRoute.JOURNALED, self._usage, records)
            case Move.CONTINUED:
                self.form = LegForm(additions=self._sub_request.shape.additions | self._usage)
            case _:
                self.form = self._first_form(node)
                self.journal = Journal() if self.form.route is StreamRoute.JOURNALED else None
        self.transcript.begin_leg(self.form, may_move=self.left > 0 or self._move is Move.CONTINUED)
        return self.form

    def _first_form(self, node: Node) -> LegForm:
        nodes, shape = self._nodes, self._sub_request.shape
        elsewhere = functools.partial(nodes.resumes_elsewhere, node.name)
        if nodes.resumes(node) and choose_route(shape, node, self.left, elsewhere) is StreamRoute.JOURNALED:
            return LegForm(StreamRoute.JOURNALED, self._usage)
        additions = shape.additions if self.left else NO_ADDITIONS
        return LegForm(additions=additions | self._usage if additions else self._usage)

    def obstacle(self, node: Node) -> NotContinuableReason | None:
        """Why the stream could not go on elsewhere, as far as its shape and the node of its leg decide that."""
        shape = self._sub_request.shape
        if self.form.route is StreamRoute.JOURNALED:
            return None
        return (shape.not_resumable if self._nodes.resumes(node) else None) or shape.not_continuable

    def possible_move(self, node: str) -> Move | None:
        """How the stream would go on if this node, which it is on, failed now; None where it cannot."""
        if self.left <= 0:
            return None
        started = self.transcript.started
        if self._resumable and (started or self._nodes.resumes_elsewhere(node)):
            return Move.RESUMED
        if not started:
            return Move.RESTARTED
        return Move.CONTINUED if self._continuable else None

    @property
    def may_move(self) -> bool:
        """Whether the stream can ever move again, if there are nodes for it: else its body is of no more use."""
        if self.left <= 0:
            return False
        if not self.transcript.started:
            return True
        return self.transcript.may_be_continued if self.journal is None else self._resumable

    @property
    def _resumable(self) -> bool:
        return self.journal is not None and self.journal.reason is None

    @property
    def _continuable(self) -> bool:
        if self.journal is not None:
            return False
        try:
            self.transcript.continuation()
        except NotContinuable:
            return False
        return True

    @property
    def complete(self) -> bool:
        """Whether nothing is missing but an ending that is known."""
        return self.transcript.finished and self.transcript.ending_known

    def begin(self, move: Move) -> Json:
        """The stream moves: the body of what is still to be generated.

        Raises:
            NotContinuable: what was produced cannot be continued.
        """
        self.left -= 1
        self._move = move
        body = self._sub_request.body
        match move:
            case Move.RESTARTED:
                self.transcript.restart()
            case Move.CONTINUED:
                continuation = self.transcript.continuation()
                self.transcript.resume()
                return continuation_body(self._sub_request.endpoint, body, continuation)
        return body
