"""What the two sides of the choosing connector tell each other, beside what each child tells its own."""

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
)

from connector.multi.desk import Load


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
