"""Takes a node of a pool out of rotation as requests do."""

import itertools

from pdproxy.errors import Fault
from pdproxy.nodes.outlier import FailureEvidence, LegOrigin
from pdproxy.nodes.pool import Pool
from pdproxy.observe.labels import Leg

_NUMBERS = itertools.count()


def refuse(pool: Pool, name: str, requests: int = 3, leg: Leg = Leg.DECODE) -> None:
    """The node refuses the connections of so many requests, each another one."""
    for _ in range(requests):
        pool.leg_failed(name, leg, Fault.REFUSED, LegOrigin(f"refused-{next(_NUMBERS)}"), FailureEvidence.NODE)


def serve(pool: Pool, name: str, leg: Leg = Leg.DECODE, client: str = "") -> None:
    """A leg on the node goes well, to its end."""
    pool.leg_began(name, leg)
    pool.leg_ended(name, leg, client)
