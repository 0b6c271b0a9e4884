"""Asynchronous loads on one worker rank, what scheduler and workers send each other about them, and passing vLLM's
calls on to the children.

    WeightedMetadata   scheduler → workers   loads that begin, requests that were preempted, loads that are overdue
    WeightedReport     workers → scheduler   loads that were given up on a rank, and such loads that ended
    RankLoads          worker                the running loads; failed blocks become failed requests

vLLM's scheduler accepts numbers of blocks that were not loaded, but with several cache groups raises an error, which
ends the engine; failed requests it always accepts. So the blocks that a child reports are looked up among its loads. A
load that is given up is reported as failed, and again, to our scheduler side alone, when it has ended.
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

from .children import Child
from .pending_loads import ChildLoad

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput


@dataclass
class WeightedMetadata(MultiKVConnectorMetadata):
    """vLLM's, with the children's metadata in their order, and ours; pickled between processes.

    `loads`: asynchronous loads that begin with this step, by request id. `preempted`: requests that were preempted in
    this step, whose blocks may be overwritten from now on. `overdue`: requests whose load takes too long. `idle`: the
    step computes nothing.
    """

    loads: dict[str, ChildLoad] = field(default_factory=dict)
    preempted: frozenset[str] = frozenset()
    overdue: frozenset[str] = frozenset()
    idle: bool = False


@dataclass
class WeightedReport(KVConnectorWorkerMetadata):
    """Reports of one rank, or of all ranks after merging, of one step.

    `children`: their own reports, in vLLM's form; None when no child has one. Ours are request id → number of ranks.
    `stalled`: overdue loads that this rank has given up, and that still run; reported together with their failure.
    `drained`: such loads that have ended.
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
    """The asynchronous loads on this rank, until they have finished."""

    def __init__(self) -> None:
        self._loads: dict[str, ChildLoad] = {}
        self._failed: set[str] = set()
        self._given_up: dict[str, ChildLoad] = {}
        self._stalled: set[str] = set()
        self._drained: set[str] = set()

    def __len__(self) -> int:
        return len(self._loads)

    def start(self, loads: Mapping[str, ChildLoad]) -> None:
        """These loads begin."""
        self._loads.update(loads)

    def on_load_errors(self, child: int, blocks: Collection[int]) -> None:
        """A child reports that these blocks were not loaded."""
        if blocks:
            self._failed |= {
                request_id for request_id, load in self._loads.items() if load.child == child and load.touches(blocks)
            }

    def has_only_given_up(self) -> bool:
        """Whether every load that still runs here was given up."""
        return bool(self._given_up) and not self._loads

    def give_up(self, overdue: Iterable[str]) -> set[str]:
        """Give up these loads. Returns the requests whose load still runs here: from now on they have failed."""
        late = {request_id: self._loads.pop(request_id) for request_id in set(overdue) & self._loads.keys()}
        self._given_up |= late
        self._stalled |= late.keys()
        self._failed -= late.keys()
        return set(late)

    def pop_given_up(self, finished: Iterable[str]) -> set[str]:
        """Forget the loads among these that were given up, and return them: vLLM has their failure already."""
        late = self._given_up.keys() & set(finished)
        for request_id in late:
            del self._given_up[request_id]
        self._drained |= late
        return late

    def pop_report(self) -> tuple[dict[str, int], dict[str, int]]:
        """Loads given up since the last call, and such loads that ended: each with a 1 for this rank."""
        stalled, self._stalled = dict.fromkeys(sorted(self._stalled), 1), set()
        drained, self._drained = dict.fromkeys(sorted(self._drained), 1), set()
        return stalled, drained

    def blocks_of_given_up(self, blocks: Collection[int]) -> set[int]:
        """The blocks among these into which a given-up load writes."""
        return {block for block in blocks if any(load.touches({block}) for load in self._given_up.values())}

    def finish(self, finished: Iterable[str]) -> set[str]:
        """These loads have ended. Those of them that failed."""
        ended = set(finished)
        failed = self._failed & ended
        self._failed -= ended
        for request_id in ended:
            self._loads.pop(request_id, None)
        return failed


def notify_output(
    children: Sequence[Child], connector_output: "KVConnectorOutput", owners: Mapping[str, int | None]
) -> None:
    """Pass vLLM's output on: each child gets its own part of the workers' report, and its own loads.

    `owners`: the child of each load that has ended; None where it is unknown, and every child gets it. The same object
    is passed to each in turn, as vLLM does it, since a child may write into it.
    """
    finished, failed = connector_output.finished_recving, connector_output.failed_recving
    report = connector_output.kv_connector_worker_meta
    reports = report.children if isinstance(report, WeightedReport) else None
    parts = (None,) * len(children) if reports is None else reports.metadata
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
    children: Sequence[Child], given: KVConnectorMetadata | set[str], bound: KVConnectorMetadata | None
) -> None:
    """Pass preemptions on. `given`: vLLM's argument, request ids or metadata. `bound`: this step's metadata."""
    ids = given if isinstance(given, set) else given.preempted if isinstance(given, WeightedMetadata) else frozenset()
    whole = bound if isinstance(given, set) else given
    parts = whole.metadata if isinstance(whole, MultiKVConnectorMetadata) else (None,) * len(children)
    for child, part in zip(children, parts, strict=True):
        child.preempted(sorted(ids), part)
