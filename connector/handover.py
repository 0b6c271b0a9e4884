"""Which requests a hand-over id names, and which ids were released: before, during or after the prefill.

Pure: time is passed in, in seconds. What is not held by a living request is remembered for `memory` seconds, and at
most `capacity` ids, the oldest forgotten first.
"""

from collections import OrderedDict
from dataclasses import dataclass, field


@dataclass(slots=True)
class _HandOver:
    """One id: the requests that carry it, and whether it was released."""

    requests: set[str] = field(default_factory=set)
    released_at: float | None = None


class HandOvers:
    """The hand-overs that one prefill node knows."""

    def __init__(self, *, memory: float, capacity: int) -> None:
        self._memory = memory
        self._capacity = capacity
        self._by_id: OrderedDict[str, _HandOver] = OrderedDict()
        self._of_request: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def arrive(self, hand_over: str, request_id: str) -> bool:
        """A prefill with this id has come. True when it was released already: then it need not be held."""
        entry = self._by_id.setdefault(hand_over, _HandOver())
        if entry.released_at is not None:
            return True
        entry.requests.add(request_id)
        self._of_request[request_id] = hand_over
        return False

    def release(self, hand_over: str, now: float) -> frozenset[str]:
        """Release the id. Returns the requests that carry it and have not left; a later one will be told."""
        entry = self._by_id.setdefault(hand_over, _HandOver())
        if entry.released_at is None:
            entry.released_at = now
        self._by_id.move_to_end(hand_over)
        self._forget(now)
        return frozenset(entry.requests)

    def released(self, request_id: str) -> bool:
        """Whether this request's id was released while it ran."""
        entry = self._by_id.get(self._of_request.get(request_id, ""))
        return entry is not None and entry.released_at is not None

    def leave(self, request_id: str) -> None:
        """Nothing of this request is held any more."""
        hand_over = self._of_request.pop(request_id, None)
        entry = self._by_id.get(hand_over) if hand_over is not None else None
        if entry is None or hand_over is None:
            return
        entry.requests.discard(request_id)
        if not entry.requests and entry.released_at is None:
            del self._by_id[hand_over]

    def _forget(self, now: float) -> None:
        """Drop released ids that are too old or too many, oldest first; ids that living requests carry stay."""
        excess = len(self._by_id) - self._capacity
        dead: list[str] = []
        for hand_over, entry in self._by_id.items():
            if entry.requests:
                continue
            old = entry.released_at is not None and now - entry.released_at > self._memory
            if not old and len(dead) >= excess:
                break
            dead.append(hand_over)
        for hand_over in dead:
            del self._by_id[hand_over]
