"""Keeps nodes that hand prompts to each other from waiting for each other. In the scheduler's process; pure.

A node that both prefills and decodes for others has one cache for both. Blocks of a prefill leg stay allocated until
the other node has read them, and that node reads only once it has room, in a cache that may be full of blocks that wait
for this node. Two rules keep such a circle from closing, and one opens those that close all the same:

- A prefill leg waits while what is computed and leased for other nodes would exceed `SHARE` of the blocks. Other
  requests pass it. One leg alone may always run, however long its prompt is.
- A ticket that this node has issued itself is not read: the prompt's blocks are in its own prefix cache.
- A node that holds leases gives the tickets back that it could not begin to read within one lease duration, and
  computes these prompts. Else the readers' heartbeats would extend the leases on the other node for as long as the
  circle lasts.

A node that only prefills, or only decodes, is in no circle: none of this applies to it.
"""

from __future__ import annotations

SHARE = 0.5
"""The share of a cache's blocks for other nodes' reads. The rest is for requests that this node answers."""


class SharedCache:
    """Blocks of one engine that are computed or leased for other nodes, by request.

    `blocks`: of the whole cache. Without `decodes` the node only prefills, and no leg waits.
    """

    def __init__(self, blocks: int, *, decodes: bool) -> None:
        self._room = SHARE * blocks if decodes else float("inf")
        self._held: dict[str, int] = {}

    def __len__(self) -> int:
        """How many prefill legs hold blocks."""
        return len(self._held)

    def admits(self, request_id: str, blocks: int) -> bool:
        """Whether a prefill leg that takes so many blocks may begin now, or go on after it was preempted."""
        held = sum(self._held.values())
        return not held or request_id in self._held or held + blocks <= self._room

    def on_admitted(self, request_id: str, blocks: int) -> None:
        """vLLM has admitted this prefill leg."""
        self._held[request_id] = blocks

    def on_freed(self, request_id: str) -> None:
        """Its blocks are free again: the leg ended without a ticket, or its lease has ended."""
        self._held.pop(request_id, None)
