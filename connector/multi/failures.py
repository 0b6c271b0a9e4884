"""Loads that failed block by block, told request by request, and loads that take too long; in a worker's process.

A load that is given up is reported as failed, and once more, to our scheduler side alone, when it has ended.

vLLM's scheduler takes numbers of blocks that were not loaded, but with several cache groups raises, which ends the
engine; failed requests it takes always. So what a child reports is looked up among the loads that it is doing.
"""

from collections.abc import Collection, Iterable, Mapping

from connector.multi.desk import Load


class Failures:
    """The asynchronous loads on this rank, until they are reported as finished."""

    def __init__(self) -> None:
        self._loads: dict[str, Load] = {}
        self._failed: set[str] = set()
        self._given_up: dict[str, Load] = {}
        self._stalled: set[str] = set()
        self._drained: set[str] = set()

    def __len__(self) -> int:
        return len(self._loads)

    def expect(self, loads: Mapping[str, Load]) -> None:
        """These loads begin."""
        self._loads.update(loads)

    def hear(self, child: int, blocks: Collection[int]) -> None:
        """A child says that these blocks were not loaded."""
        if blocks:
            self._failed |= {
                request_id for request_id, load in self._loads.items() if load.child == child and load.touches(blocks)
            }

    def waits_for_given_up(self) -> bool:
        """Whether all that still runs here was given up."""
        return bool(self._given_up) and not self._loads

    def give_up(self, overdue: Iterable[str]) -> set[str]:
        """Of these requests, those whose load still runs here: from now on they have failed."""
        late = {request_id: self._loads.pop(request_id) for request_id in set(overdue) & self._loads.keys()}
        self._given_up |= late
        self._stalled |= late.keys()
        self._failed -= late.keys()
        return set(late)

    def withhold(self, finished: Iterable[str]) -> set[str]:
        """Of these loads, those that were given up: vLLM was told of their end long ago."""
        late = self._given_up.keys() & set(finished)
        for request_id in late:
            del self._given_up[request_id]
        self._drained |= late
        return late

    def take_report(self) -> tuple[dict[str, int], dict[str, int]]:
        """Loads given up, and such loads ended, since the last call: each with a 1 for this rank."""
        stalled, self._stalled = dict.fromkeys(sorted(self._stalled), 1), set()
        drained, self._drained = dict.fromkeys(sorted(self._drained), 1), set()
        return stalled, drained

    def of_given_up(self, blocks: Collection[int]) -> set[int]:
        """Of these blocks, those that a load which was given up does or did write to."""
        return {block for block in blocks if any(load.touches({block}) for load in self._given_up.values())}

    def settle(self, finished: Iterable[str]) -> set[str]:
        """These loads are over; those of them that failed."""
        over = set(finished)
        failed = self._failed & over
        self._failed -= over
        for request_id in over:
            self._loads.pop(request_id, None)
        return failed
