"""What the scheduler side of the choosing connector tells its worker side, beside what each child tells its own."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorMetadata

from connector.multi.desk import Load


@dataclass
class WeightedMetadata(MultiKVConnectorMetadata):
    """vLLM's, with the children's metadata in their order, and ours; pickled between processes.

    `loads`: asynchronous loads that begin with this step, by request id. `preempted`: requests that were preempted in
    this step, whose blocks may be overwritten from now on.
    """

    loads: dict[str, Load] = field(default_factory=dict)
    preempted: frozenset[str] = frozenset()
