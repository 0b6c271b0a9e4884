"""A hand-over: what a prefill leg left behind for a decode leg."""

import dataclasses

from pdproxy.legs.prefill import PrefillAnswer
from pdproxy.nodes.node import Node
from pdproxy.request import Json

_HINT = "remote_prefill_cached_tokens"
"""vLLM's scheduler adds it to the ticket, and a decode node that gets it reports it as its own ``cached_tokens``
(0.32, v1/engine/output_processor.py). Without it the decode node reports what it did not have to compute, which tells
whether it used the ticket. The connector does not look at it, and no signature covers it."""


@dataclasses.dataclass(frozen=True, slots=True)
class HandOver:
    """A ticket, by whom and when it was given.

    Attributes:
        name: by which it can be released.
        node: the prefill node.
        answer: what its leg brought.
        born: monotonic seconds.
    """

    name: str
    node: Node
    answer: PrefillAnswer
    born: float

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that the prefill node had cached."""
        return self.answer.cached_tokens

    def ticket(self) -> Json:
        """The ticket as the decode node gets it."""
        return {key: value for key, value in self.answer.ticket.items() if key != _HINT}
