"""Which faults count against a node, and what is planned on one node."""

import pytest

from pdproxy.errors import Fault
from pdproxy.failures import LEG_BLAME, Blame, Moment
from pdproxy.nodes.outlier import FailureEvidence, LegOrigin
from pdproxy.nodes.pool import Pool
from pdproxy.observe.labels import Leg
from pdproxy.orchestration.failed_legs import FailedLegs
from tests.orchestration.cluster import FakeCluster

IN_DOUBT = [fault for fault in Fault if LEG_BLAME[fault] is Blame.IN_DOUBT]
ASKED = LegOrigin("r-1", "key", 7)


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def failed(cluster: FakeCluster) -> FailedLegs:
    return FailedLegs(cluster.pool, cluster.context.config, cluster.context.metrics, ASKED)


def told(pool: Pool, name: str, leg: Leg = Leg.DECODE) -> list[FailureEvidence]:
    """Evidence that the pool was told of legs that failed on a node."""
    return [failure.evidence for failure in pool._entries[name].records[leg].row.values()]


@pytest.mark.parametrize("fault", IN_DOUBT)
async def test_what_a_request_can_cause_counts_in_full_once_another_node_served_it(
    cluster: FakeCluster, failed: FailedLegs, fault: Fault
) -> None:
    failed.leg_failed(Leg.DECODE, "d0", fault)
    failed.leg_began(Leg.PREFILL, "p0")
    failed.leg_ended(Leg.PREFILL, "p0")
    assert told(cluster.pool, "d0") == [], "a good prefill says nothing about decoding"
    failed.leg_began(Leg.DECODE, "d1")
    assert told(cluster.pool, "d0") == [FailureEvidence.SERVED]
    assert cluster.pool.view("d0").reason == f"last fault: {fault}"
    failed.close()
    assert told(cluster.pool, "d0") == [FailureEvidence.SERVED]


async def test_what_breaks_in_the_middle_counts_in_full_once_another_node_ends_it_well(
    cluster: FakeCluster, failed: FailedLegs
) -> None:
    failed.leg_began(Leg.DECODE, "d0")
    failed.leg_failed(Leg.DECODE, "d0", Fault.RESET, Moment.STREAMING)
    failed.leg_began(Leg.DECODE, "d1")
    assert told(cluster.pool, "d0") == [], "it may break there, too"
    failed.leg_ended(Leg.DECODE, "d1")
    assert told(cluster.pool, "d0") == [FailureEvidence.SERVED]


async def test_what_nobody_served_is_told_at_the_end_and_only_by_half(cluster: FakeCluster, failed: FailedLegs) -> None:
    for name in ("d0", "d1"):
        failed.leg_failed(Leg.DECODE, name, Fault.ABORTED)
        assert told(cluster.pool, name) == []
    failed.close()
    failed.close()
    assert [told(cluster.pool, name) for name in ("d0", "d1")] == [[FailureEvidence.UNSERVED]] * 2
    assert cluster.pool.view("d0").reason == ""


async def test_a_prefill_that_failed_counts_where_a_decode_node_computed_the_prompt(
    cluster: FakeCluster, failed: FailedLegs
) -> None:
    failed.leg_failed(Leg.PREFILL, "p0", Fault.SERVER_ERROR)
    failed.leg_began(Leg.DECODE, "d0")
    assert told(cluster.pool, "p0", Leg.PREFILL) == [FailureEvidence.SERVED]


async def test_a_fault_does_not_count_where_the_same_node_served_it_later(
    cluster: FakeCluster, failed: FailedLegs
) -> None:
    failed.leg_failed(Leg.DECODE, "d0", Fault.SERVER_ERROR)
    failed.leg_began(Leg.DECODE, "d0")
    failed.close()
    assert told(cluster.pool, "d0") == []


async def test_what_a_client_caused_never_counts_and_a_refusal_at_once(
    cluster: FakeCluster, failed: FailedLegs
) -> None:
    for fault in (Fault.CLIENT_ERROR, Fault.BUSY, Fault.NO_TICKET, Fault.NO_ROUTE):
        failed.leg_failed(Leg.DECODE, "d0", fault)
    failed.leg_began(Leg.DECODE, "d1")
    failed.close()
    assert told(cluster.pool, "d0") == []
    assert failed.excluded == {"d0"}
    failed.leg_failed(Leg.DECODE, "d1", Fault.REFUSED)
    assert told(cluster.pool, "d1") == [FailureEvidence.NODE]
