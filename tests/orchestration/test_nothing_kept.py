"""Once a client has its answer, nothing of its body is alive, however the request ended, and without the collector."""

import itertools
import weakref

import msgspec
import pytest

from pdproxy.request import Endpoint
from tests.fakes.faults import QUICK_FAULTS, FaultKind, InjectedFault
from tests.orchestration.cluster import FakeCluster
from tests.orchestration.prompts import body_for
from tests.tables import spread

FAULTS = {
    "none": None,
    "refused": InjectedFault(FaultKind.REFUSE),
    "hang": InjectedFault(FaultKind.HANG),
    "stall": InjectedFault(FaultKind.STALL, at=2),
    **QUICK_FAULTS,
}
pytestmark = pytest.mark.usefixtures("no_collector")


class Traced(msgspec.Struct, weakref=True):
    """A value in a body that tells when it is gone."""

    name: str = "mine"


@pytest.mark.parametrize(
    ("fault", "ill", "how"), spread(FAULTS, ["p0", "p", "d0", "d"], itertools.product(Endpoint, (False, True)))
)
async def test_nothing_of_the_body_is_alive_after_the_answer(fault: str, ill: str, how: tuple[Endpoint, bool]) -> None:
    cluster = FakeCluster()
    for node in cluster.nodes:
        node.fault = FAULTS[fault] if node.name.startswith(ill) else None
    endpoint, stream = how
    alive = await ask(cluster, endpoint, stream=stream)
    await cluster.settle()
    assert alive() is None
    assert cluster.context.in_flight.failures() or fault in ("none", "400", "short") or not ill.startswith("p")


async def ask(cluster: FakeCluster, endpoint: Endpoint, *, stream: bool) -> "weakref.ref[Traced]":
    traced = Traced()
    await cluster.ask(endpoint, {**body_for(endpoint, stream=stream), "metadata": traced})
    return weakref.ref(traced)
