"""The life of one prompt's request: its states, and the moves that are allowed.

::

    PLANNING → PREFILLING → HANDING_OVER → STREAMING → ENDED
      ↑ └─────────(local)───────┘             │
      └──────────────(migration)──────────────┘

What follows each failure is the table in `failures`; no other file decides a retry.
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
    """The decode node's events go to the client."""
    ENDED = "ended"
    """Nothing is held any more."""


class Transition(enum.StrEnum):
    """Events that move a request from one state to the next."""

    PREFILL = "prefill"
    LOCAL = "local"
    """The decode node is to compute the prompt by itself."""
    TICKET = "ticket"
    """The decode node gets it with its request."""
    AGAIN = "again"
    """Back to planning, because a leg failed."""
    SAME_TICKET = "same_ticket"
    """Another decode node gets the same ticket."""
    FIRST_EVENT = "first_event"
    MIGRATE = "migrate"
    """The stream moves to another node: plan again from what was produced."""
    END = "end"
    """The answer is complete, failed for good, or the client has gone."""


class IllegalTransition(PdproxyError):
    """A move that the table does not have: always a bug of ours."""


class _Table(dict[tuple[RequestState, Transition], RequestState]):
    """The state that follows, by the one before and by what happened; raises `IllegalTransition` for any other move."""

    def __missing__(self, key: tuple[RequestState, Transition]) -> RequestState:
        state, move = key
        raise IllegalTransition(f"{move} is not a move from {state}")


TRANSITIONS = _Table(
    {
        (RequestState.PLANNING, Transition.PREFILL): RequestState.PREFILLING,
        (RequestState.PLANNING, Transition.LOCAL): RequestState.HANDING_OVER,
        (RequestState.PREFILLING, Transition.TICKET): RequestState.HANDING_OVER,
        (RequestState.PREFILLING, Transition.AGAIN): RequestState.PLANNING,
        (RequestState.HANDING_OVER, Transition.SAME_TICKET): RequestState.HANDING_OVER,
        (RequestState.HANDING_OVER, Transition.AGAIN): RequestState.PLANNING,
        (RequestState.HANDING_OVER, Transition.FIRST_EVENT): RequestState.STREAMING,
        (RequestState.STREAMING, Transition.MIGRATE): RequestState.PLANNING,
        **{(state, Transition.END): RequestState.ENDED for state in RequestState},
    }
)
"""Every allowed move; any other one raises. Ending is allowed anywhere, and twice."""
