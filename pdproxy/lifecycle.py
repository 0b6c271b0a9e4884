"""The life of one prompt's request: its states, and the moves that are allowed.

::

    PLANNING → PREFILLING → HANDING_OVER → STREAMING → ENDED
        └──────────(local)──────┘   ↑          │
                                    └ PLANNING ┘ (migration)

What each failure does next is the table in `failures`; nobody else decides a retry.
"""

import enum

from pdproxy.errors import PdproxyError


class RequestState(enum.StrEnum):
    """Where a request stands."""

    PLANNING = "planning"
    """Nodes are being chosen: no I/O."""
    PREFILLING = "prefilling"
    """The prefill leg is under way."""
    HANDING_OVER = "handing_over"
    """The decode leg is under way; the client has nothing of this leg yet."""
    STREAMING = "streaming"
    """The decode node's events are passing through."""
    ENDED = "ended"
    """Nothing is held any more."""


class Transition(enum.StrEnum):
    """What happened."""

    PREFILL = "prefill"
    """A plan with a prefill node was made."""
    LOCAL = "local"
    """The decode node is to compute the prompt by itself."""
    TICKET = "ticket"
    """The prefill node answered with a ticket."""
    AGAIN = "again"
    """Back to planning, because a leg failed."""
    SAME_TICKET = "same_ticket"
    """Another decode node gets the ticket that is at hand."""
    FIRST_EVENT = "first_event"
    """The decode node's first event is here."""
    MIGRATE = "migrate"
    """The stream moves to another node: plan again from what was produced."""
    END = "end"
    """The answer is complete, failed for good, or the client has gone."""


TRANSITIONS = {
    (RequestState.PLANNING, Transition.PREFILL): RequestState.PREFILLING,
    (RequestState.PLANNING, Transition.LOCAL): RequestState.HANDING_OVER,
    (RequestState.PREFILLING, Transition.TICKET): RequestState.HANDING_OVER,
    (RequestState.PREFILLING, Transition.AGAIN): RequestState.PLANNING,
    (RequestState.HANDING_OVER, Transition.SAME_TICKET): RequestState.HANDING_OVER,
    (RequestState.HANDING_OVER, Transition.AGAIN): RequestState.PLANNING,
    (RequestState.HANDING_OVER, Transition.FIRST_EVENT): RequestState.STREAMING,
    (RequestState.STREAMING, Transition.MIGRATE): RequestState.PLANNING,
    (RequestState.PLANNING, Transition.END): RequestState.ENDED,
    (RequestState.PREFILLING, Transition.END): RequestState.ENDED,
    (RequestState.HANDING_OVER, Transition.END): RequestState.ENDED,
    (RequestState.STREAMING, Transition.END): RequestState.ENDED,
    (RequestState.ENDED, Transition.END): RequestState.ENDED,
}
"""Every allowed move; any other one raises. Ending is allowed anywhere, and twice."""


class IllegalTransition(PdproxyError):
    """A move that the table does not have: a bug of ours, never of a client or a node."""


class RequestLifecycle:
    """Where one request stands; changes by `move` alone."""

    __slots__ = ("stage",)

    def __init__(self) -> None:
        self.stage = RequestState.PLANNING

    def move(self, move: Transition) -> None:
        """Go on.

        Raises:
            IllegalTransition: the table has no such move from here.
        """
        after = TRANSITIONS.get((self.stage, move))
        if after is None:
            raise IllegalTransition(f"{move} is not a move from {self.stage}")
        self.stage = after
