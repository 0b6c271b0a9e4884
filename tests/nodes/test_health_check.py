"""Active health, visit by visit: nodes that are given up, and nodes that come back."""

import logging

import pytest

from pdproxy.errors import Fault
from pdproxy.nodes.health_check import HealthCheck
from pdproxy.nodes.node import BOTH, DECODE, Outage, State
from pdproxy.nodes.pool import Pool
from tests.fakes.clock import FakeClock
from tests.fakes.refused import refuse
from tests.nodes.fake_pool import FakePoolTransport
from tests.nodes.health import FakeProof, health_check, state, visit_all


async def test_a_first_visit_brings_nodes_in(pool: Pool, health: HealthCheck) -> None:
    await visit_all(health, pool)
    assert [view.state for view in pool.state().nodes] == [State.UP, State.UP]


async def test_a_visit_that_finds_nothing_new_leaves_the_node_as_it_is(
    pool: Pool, transport: FakePoolTransport, health: HealthCheck
) -> None:
    """The list of models is dated anew in each answer; whatever follows a node, as its KV events, would begin anew."""
    await visit_all(health, pool)
    before = [view.node for view in pool.state().nodes]
    await visit_all(health, pool)
    after = [view.node for view in pool.state().nodes]
    assert all(now is then for now, then in zip(after, before, strict=True))
    transport.nodes["d1"].names = ("tiny", "adapter")
    await visit_all(health, pool)
    assert pool.view("d1").node.aliases == ("adapter",)


@pytest.mark.parametrize("fault", [Fault.HEADERS_TIMEOUT, Fault.REFUSED, Fault.RESET, Fault.STALL])
async def test_three_misses_in_a_row_give_a_node_up(
    pool: Pool, transport: FakePoolTransport, health: HealthCheck, fault: Fault
) -> None:
    await visit_all(health, pool)
    transport.nodes["d1"].fault = fault
    await visit_all(health, pool)
    await visit_all(health, pool)
    assert state(pool, "d1") is State.UP
    await visit_all(health, pool)
    assert state(pool, "d1") is State.DOWN
    assert state(pool, "p1") is State.UP
    assert pool.leaving("d1").is_set()


async def test_a_node_that_is_given_up_is_logged_once_and_again_when_it_is_back(
    pool: Pool, transport: FakePoolTransport, clock: FakeClock, health: HealthCheck, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pdproxy.nodes")

    def logged() -> list[tuple[str, str | None]]:
        lines = [(record.getMessage(), vars(record).get("reason")) for record in caplog.records]
        caplog.clear()
        return lines

    await visit_all(health, pool)
    assert logged() == [("node p1 is up", None), ("node d1 is up", None)]
    transport.nodes["d1"].fault = Fault.HEADERS_TIMEOUT
    await visit_all(health, pool)
    await visit_all(health, pool)
    assert logged() == []
    for _ in range(3):
        await visit_all(health, pool)
    assert logged() == [
        ("node d1 is down", "health: cannot be reached: injected"),
        ("no decode node serves any more: requests are refused with 503", None),
    ]
    transport.nodes["d1"].fault = None
    transport.nodes["d1"].paths["/health"] = (503, b"")
    clock.advance(61)
    await visit_all(health, pool)
    assert logged() == [("node d1 still cannot be used, for 1 min now: /health answers 503", None)]
    transport.nodes["d1"].paths.clear()
    await visit_all(health, pool)
    assert logged() == [("node d1 is up", None), ("decode nodes serve again", None)]


@pytest.mark.parametrize(
    ("fault", "silent"), [(Fault.REFUSED, False), (Fault.REFUSED, True), (Fault.HEADERS_TIMEOUT, True)]
)
async def test_whether_nothing_comes_back_is_kept_of_the_last_probe_and_of_a_try_to_join(
    pool: Pool, transport: FakePoolTransport, health: HealthCheck, fault: Fault, silent: bool
) -> None:
    node = transport.nodes["d1"]
    node.fault, node.silent = fault, silent
    await visit_all(health, pool)
    assert (state(pool, "d1"), pool.view("d1").silent) == (State.JOINING, silent)
    node.fault = None
    await visit_all(health, pool)
    assert (state(pool, "d1"), pool.view("d1").silent) == (State.UP, False)
    node.fault = fault
    await visit_all(health, pool)
    assert (state(pool, "d1"), pool.view("d1").silent) == (State.UP, silent)
    node.fault = None
    await visit_all(health, pool)
    assert not pool.view("d1").silent


async def test_nothing_comes_back_from_a_node_that_is_given_up_for_its_silence(pool: Pool, health: HealthCheck) -> None:
    """Its last probe may have gone well: the next one is some seconds away."""
    await visit_all(health, pool)
    pool.give_up("d1", "health: silent for 2 s")
    assert pool.view("d1").silent


async def test_the_last_outage_is_kept(
    pool: Pool, transport: FakePoolTransport, clock: FakeClock, health: HealthCheck
) -> None:
    await visit_all(health, pool)
    transport.nodes["d1"].fault = Fault.RESET
    for _ in range(3):
        await visit_all(health, pool)
    began = clock.now()
    clock.advance(100)
    assert pool.view("d1").outage is None
    transport.nodes["d1"].fault = None
    await visit_all(health, pool)
    last = Outage(began, began + 100, "health: cannot be reached: injected")
    assert (state(pool, "d1"), pool.view("d1").outage) == (State.UP, last)


async def test_a_lack_of_sockets_in_the_proxy_changes_nothing(
    pool: Pool, transport: FakePoolTransport, health: HealthCheck
) -> None:
    await visit_all(health, pool)
    for fault, then in ((None, State.UP), (Fault.REFUSED, State.DOWN)):
        transport.nodes["d1"].fault = fault
        for _ in range(3):
            await visit_all(health, pool)
        transport.nodes["d1"].fault = Fault.BUSY
        for _ in range(5):
            await visit_all(health, pool)
        assert state(pool, "d1") is then


async def test_a_node_whose_health_page_fails_is_given_up(
    pool: Pool, transport: FakePoolTransport, health: HealthCheck
) -> None:
    await visit_all(health, pool)
    transport.nodes["d1"].paths["/health"] = (503, b"")
    for _ in range(3):
        await visit_all(health, pool)
    assert state(pool, "d1") is State.DOWN


async def test_a_node_without_a_health_page_is_alive(
    pool: Pool, transport: FakePoolTransport, health: HealthCheck
) -> None:
    await visit_all(health, pool)
    transport.nodes["d1"].paths["/health"] = (404, b"")
    for _ in range(5):
        await visit_all(health, pool)
    assert state(pool, "d1") is State.UP


async def test_slow_probes_now_and_then_change_nothing(
    pool: Pool, transport: FakePoolTransport, health: HealthCheck
) -> None:
    await visit_all(health, pool)
    for fault in [Fault.HEADERS_TIMEOUT, Fault.HEADERS_TIMEOUT, None] * 5:
        transport.nodes["d1"].fault = fault
        await visit_all(health, pool)
        assert state(pool, "d1") is State.UP


async def test_a_node_that_comes_back_passes_its_preflight_again(
    pool: Pool, transport: FakePoolTransport, health: HealthCheck
) -> None:
    await visit_all(health, pool)
    transport.nodes["d1"].fault = Fault.HEADERS_TIMEOUT
    for _ in range(3):
        await visit_all(health, pool)
    transport.nodes["d1"].fault = None
    transport.nodes["d1"].labels = None
    transport.nodes["d1"].version = "0.33.0"
    await visit_all(health, pool)
    assert state(pool, "d1") is State.UP
    assert pool.view("d1").node.cohort == "0.33.0"
    assert pool.view("d1").share < 1


async def test_a_quick_restart_behind_the_same_address_is_noticed(
    pool: Pool, transport: FakePoolTransport, health: HealthCheck
) -> None:
    await visit_all(health, pool)
    transport.nodes["d1"].fault = Fault.REFUSED
    await visit_all(health, pool)
    assert state(pool, "d1") is State.UP
    transport.nodes["d1"].fault = None
    transport.nodes["d1"].labels = None
    await visit_all(health, pool)
    assert pool.view("d1").node.cohort == "0.32.0"


@pytest.mark.parametrize("misses", [1, 3])
async def test_a_node_that_comes_back_is_proved_again(
    pool: Pool, transport: FakePoolTransport, clock: FakeClock, misses: int
) -> None:
    proof = FakeProof()
    health = health_check(pool, transport, clock, proof)
    await visit_all(health, pool)
    transport.nodes["d1"].fault = Fault.REFUSED
    for _ in range(misses):
        await visit_all(health, pool)
    transport.nodes["d1"].fault = None
    await visit_all(health, pool)
    await visit_all(health, pool)
    assert proof.joined == ["p1", "d1", "d1"]


async def test_a_circuit_that_requests_opened_is_not_closed_by_a_health_page(
    pool: Pool, clock: FakeClock, health: HealthCheck
) -> None:
    await visit_all(health, pool)
    refuse(pool, "d1")
    await visit_all(health, pool)
    assert state(pool, "d1") is State.DOWN
    clock.advance(10)
    await visit_all(health, pool)
    assert state(pool, "d1") is State.PROBING


async def test_a_draining_node_is_not_taken_back(pool: Pool, transport: FakePoolTransport, health: HealthCheck) -> None:
    await visit_all(health, pool)
    pool.drain("d1")
    transport.nodes["d1"].fault = Fault.REFUSED
    for _ in range(4):
        await visit_all(health, pool)
    transport.nodes["d1"].fault = None
    await visit_all(health, pool)
    assert state(pool, "d1") is State.DRAINING


async def test_a_terminating_node_is_not_taken_back(
    pool: Pool, transport: FakePoolTransport, health: HealthCheck
) -> None:
    await visit_all(health, pool)
    pool.terminate("d1")
    await visit_all(health, pool)
    assert state(pool, "d1") is State.TERMINATING
    transport.nodes["d1"].fault = Fault.REFUSED
    for _ in range(4):
        await visit_all(health, pool)
    transport.nodes["d1"].fault = None
    await visit_all(health, pool)
    assert state(pool, "d1") is State.DOWN


async def test_a_new_role_is_looked_at_while_the_node_serves(
    pool: Pool, transport: FakePoolTransport, clock: FakeClock
) -> None:
    proof = FakeProof()
    health = health_check(pool, transport, clock, proof)
    await visit_all(health, pool)
    proof.joined.clear()
    transport.nodes["d1"].fault = Fault.REFUSED
    pool.change_roles("d1", BOTH)
    await visit_all(health, pool)
    assert (pool.view("d1").state, pool.view("d1").node.roles) == (State.UP, DECODE), "it cannot be asked now"
    transport.nodes["d1"].fault = None
    await visit_all(health, pool)
    assert (pool.view("d1").state, pool.view("d1").node.roles) == (State.UP, BOTH)
    await visit_all(health, pool)
    assert proof.joined == ["d1"]
