"""What every part of the drive is handed: its dependencies, in one value."""

import dataclasses

from pdproxy.clock import Clock
from pdproxy.drive.terms import Terms
from pdproxy.nodes.pool import Pool
from pdproxy.observe.metrics import Metrics
from pdproxy.transport.port import Transport


@dataclasses.dataclass(frozen=True, slots=True)
class Means:
    """Dependencies of the drive.

    Attributes:
        transport: the way to nodes.
        pool: membership, load, conduct.
        metrics: what is counted.
        clock: monotonic time.
        terms: deadlines and policy.
    """

    transport: Transport
    pool: Pool
    metrics: Metrics
    clock: Clock
    terms: Terms
