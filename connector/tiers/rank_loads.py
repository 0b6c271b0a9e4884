"""What the two sides of the choosing connector tell each other, beside what each child tells its own.

Loads that failed block by block, told request by request, and loads that take too long; in a worker's process.

A load that is given up is reported as failed, and once more, to our scheduler side alone, when it has ended.

vLLM's scheduler takes numbers of blocks that were not loaded, but with several cache groups raises, which ends the
engine; failed requests it takes always. So what a child reports is looked up among the loads that it is doing.


Telling each child what concerns it, out of what vLLM tells the choosing connector as a whole.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
)

from connector.tiers.children import Child
from connector.tiers.pending_loads import Load

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput


@dataclass
class WeightedMetadata(MultiKVConnectorMetadata):
    """vLLM's, with the children's metadata in their order, and ours; pickled between processes.

    `loads`: asynchronous loads that begin with this step, by request id. `preempted`: requests that were preempted in
    this step, whose blocks may be overwritten from now on. `overdue`: requests whose load takes too long. `idle`: the
    step computes nothing.
    """

    loads: dict[str, Load] = field(default_factory=dict)
    preempted: frozenset[str] = frozenset()
    overdue: frozenset[str] = frozenset()
    idle: bool = False


@dataclass
class WeightedReport(KVConnectorWorkerMetadata):
    """What a rank, or after merging all ranks, tells of one step.

    `children`: their own reports, in vLLM's form; None when no child has anything to say. Ours are by request id, in
    ranks. `stalled`: overdue loads that this rank has given up, and that still run: told together with their failure.
    `drained`: such loads that have ended at last.
    """

    children: MultiKVConnectorWorkerMetadata | None = None
    stalled: dict[str, int] = field(default_factory=dict)
    drained: dict[str, int] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WeightedReport":
        """This report with another rank's added."""
        if not isinstance(other, WeightedReport):
            raise TypeError(f"cannot merge a {type(other).__name__} into a WeightedReport")
        one, more = self.children, other.children
        return WeightedReport(
            one.aggregate(more) if one is not None and more is not None else one or more,
            dict(Counter(self.stalled) + Counter(other.stalled)),
            dict(Counter(self.drained) + Counter(other.drained)),
        )


class RankLoads:
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


def notify_output(
    children: Sequence[Child], connector_output: "KVConnectorOutput", owners: Mapping[str, int | None]
) -> None:
    """What the workers did: each child gets its own part of their report, and its own loads.

    `owners`: who loads each request that has ended loading; None where nobody knows, and all are told. The very object
    goes to each in turn, as vLLM does it, since a child may write into it.
    """
    finished, failed = connector_output.finished_recving, connector_output.failed_recving
    report = connector_output.kv_connector_worker_meta
    told = report.children if isinstance(report, WeightedReport) else None
    parts = (None,) * len(children) if told is None else told.metadata
    try:
        for child, part in zip(children, parts, strict=True):
            mine = {request_id for request_id, owner in owners.items() if owner in (None, child.number)}
            connector_output.finished_recving = mine
            connector_output.failed_recving = failed & mine
            connector_output.kv_connector_worker_meta = part
            child.connector.update_connector_output(connector_output)
    finally:
        connector_output.finished_recving, connector_output.failed_recving = finished, failed
        connector_output.kv_connector_worker_meta = report


def notify_preempted(
    children: Sequence[Child], told: KVConnectorMetadata | set[str], bound: KVConnectorMetadata | None
) -> None:
    """Who was preempted: `told` is request ids or metadata, whichever the caller has; `bound`, this step's metadata."""
    ids = told if isinstance(told, set) else told.preempted if isinstance(told, WeightedMetadata) else frozenset()
    whole = bound if isinstance(told, set) else told
    parts = whole.metadata if isinstance(whole, MultiKVConnectorMetadata) else (None,) * len(children)
    for child, part in zip(children, parts, strict=True):
        child.preempted(sorted(ids), part)
