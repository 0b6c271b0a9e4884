"""What every part of the drive is handed: its dependencies, in one value."""

import dataclasses
import itertools
import secrets
from collections.abc import Callable, Iterator

from pdproxy.clock import Clock
from pdproxy.drive.live import Live
from pdproxy.drive.terms import Terms
from pdproxy.nodes.pool import Pool
from pdproxy.observe.metrics import Metrics
from pdproxy.transport.port import Transport


def unguessable() -> str:
    """A name for a hand-over: 128 bits of the system's randomness, in hex."""
    return secrets.token_hex(16)


@dataclasses.dataclass(frozen=True, slots=True)
class Means:
    """Dependencies of the drive.

    Attributes:
        transport: the way to nodes.
        pool: membership, load, conduct.
        metrics: what is counted.
        clock: monotonic time.
        terms: deadlines and policy.
        live: requests on the way, for the operator to see.
        name: makes hand-over ids; nobody may be able to guess one.
        turns: counts plans, so that equally loaded nodes take turns.
    """

    transport: Transport
    pool: Pool
    metrics: Metrics
    clock: Clock
    terms: Terms
    live: Live = dataclasses.field(default_factory=Live)
    name: Callable[[], str] = unguessable
    turns: Iterator[int] = dataclasses.field(default_factory=itertools.count)
