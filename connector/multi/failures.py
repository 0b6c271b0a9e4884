"""Loads that failed block by block, told request by request; in a worker's process.

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

    def settle(self, finished: Iterable[str]) -> set[str]:
        """These loads are over; those of them that failed."""
        over = set(finished)
        failed = self._failed & over
        self._failed -= over
        for request_id in over:
            self._loads.pop(request_id, None)
        return failed
