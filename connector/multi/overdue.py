"""Loads from a tier that take too long; in the scheduler's process. Pure: times are passed in, seconds, monotonic.

    begun ──► overdue: the workers are told ──► ended in time after all
                                            └── given up: its request computes; its blocks stay out of the pool
                                                └── drained: the load has ended on every rank, the blocks go back

A tier cannot be made to stop, so it may write into the blocks for as long as its load runs, whatever became of the
request. Nothing else is loaded for a request whose load was given up: two loads under one id could not be told apart.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from connector.quarantine import Quarantine


@dataclass(slots=True)
class _Load:
    blocks: Sequence[Any]
    since: float
    told: bool = False


class Overdue:
    """`within`: seconds that a load may take. The quarantine's names are request ids here."""

    def __init__(self, within: float, quarantine: Quarantine) -> None:
        self._within = within
        self._quarantine = quarantine
        self._loads: dict[str, _Load] = {}

    def __len__(self) -> int:
        """How many loads run, in time or given up."""
        return len(self._loads) + len(self._quarantine)

    def begin(self, request_id: str, blocks: Sequence[Any], now: float) -> None:
        """A tier begins to load into these blocks."""
        self._loads[request_id] = _Load(blocks, now)

    def take(self, now: float) -> frozenset[str]:
        """Requests whose load is overdue, each told once; a rank on which it still runs gives it up."""
        late = [name for name, load in self._loads.items() if not load.told and now - load.since >= self._within]
        for request_id in late:
            self._loads[request_id].told = True
        return frozenset(late)

    def give_up(self, stalled: Mapping[str, int]) -> set[str]:
        """Loads that still run on so many ranks; before vLLM frees a block. Which requests they were for."""
        given_up = stalled.keys() & self._loads.keys()
        for request_id in given_up:
            self._quarantine.stall(request_id, self._loads.pop(request_id).blocks, stalled[request_id])
        return set(given_up)

    def ended(self, request_ids: Iterable[str]) -> None:
        """These loads are over, however they went."""
        for request_id in request_ids:
            self._loads.pop(request_id, None)

    def drain(self, drained: Mapping[str, int]) -> list[str]:
        """Loads that were given up and have ended now, in ranks. Those that have ended on all of them."""
        return self._quarantine.drain(drained)
