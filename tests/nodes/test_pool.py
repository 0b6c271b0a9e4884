"""Membership, load, circuits and bars of a pool."""

import dataclasses

import pytest
from prometheus_client import CollectorRegistry

from pdproxy.errors import Fault
from pdproxy.nodes.circuit_breaker import CircuitBreakerConfig
from pdproxy.nodes.node import Bars, Footprint, Node, Role, State
from pdproxy.nodes.outlier import RECENT, FailureEvidence, LegOrigin
from pdproxy.nodes.pool import DuplicateNode, Pool, UnknownNode
from pdproxy.nodes.pool_entry import LegLoad
from pdproxy.observe.labels import Leg
from pdproxy.observe.metrics import Metrics
from tests.fakes.clock import FakeClock
from tests.fakes.refused import refuse, serve

NODE = Node("d1", "http://d1", (Role.DECODE,), "tiny")


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def pool(clock: FakeClock, registry: CollectorRegistry) -> Pool:
    made = Pool(clock, CircuitBreakerConfig(failures=3, cool_down=10, slow_start=20), Metrics(registry))
    made.add(NODE)
    made.bring_up(NODE)
    return made


def break_it(pool: Pool) -> None:
    refuse(pool, "d1")


def test_a_node_joins_before_it_serves(clock: FakeClock) -> None:
    pool = Pool(clock)
    pool.add(NODE)
    assert pool.view("d1").state is State.JOINING
    assert pool.changed.is_set()
    pool.bring_up(NODE)
    assert pool.view("d1").state is State.UP


def test_a_name_is_given_once(pool: Pool) -> None:
    with pytest.raises(DuplicateNode):
        pool.add(NODE)


def test_legs_count_on_the_rank_that_they_name_and_others_where_the_fewest_are(pool: Pool) -> None:
    pool.bring_up(dataclasses.replace(NODE, ranks=3))
    slots = [pool.acquire("d1", LegLoad(1, 700, Footprint(900, 1))), *(pool.acquire("d1") for _ in range(3))]
    view = pool.view("d1")
    assert [(place.legs, place.queued, place.tokens) for place in view.places] == [(2, 0, 0), (1, 700, 900), (1, 0, 0)]
    assert (view.active, view.footprint, view.lightest.rank) == (4, Footprint(900, 1), 2)
    for _ in range(2):
        slots[0].computed()
        assert [place.queued for place in view.places] == [0, 0, 0]
    pool.bring_up(dataclasses.replace(NODE, ranks=1))
    assert [place.legs for place in view.places] == [2]
    for slot in slots:
        slot.release()
    assert [(place.legs, place.tokens) for place in view.places] == [(0, 0)]
    assert view.active == 0


def test_legs_are_counted_and_released_once(pool: Pool) -> None:
    first, second = pool.acquire("d1"), pool.acquire("d1")
    assert pool.view("d1").active == 2
    first.release()
    first.release()
    assert pool.view("d1").active == 1
    assert not pool.idle("d1").is_set()
    with second:
        pass
    assert pool.view("d1").active == 0
    assert pool.idle("d1").is_set()


def test_refused_connections_in_a_row_open_the_circuit(pool: Pool) -> None:
    refuse(pool, "d1", 2)
    serve(pool, "d1")
    refuse(pool, "d1", 2)
    assert pool.view("d1").state is State.UP
    refuse(pool, "d1", 1)
    assert pool.view("d1").state is State.DOWN
    assert pool.view("d1").reason == "last fault: refused; legs failed in a row: 3"


def test_one_request_takes_out_one_node_of_a_role_and_others_the_rest(pool: Pool, clock: FakeClock) -> None:
    """Any fault counts, and also where the first node is on trial again."""
    for name in ("d2", "p1"):
        node = dataclasses.replace(NODE, name=name, roles=(Role.PREFILL if name == "p1" else Role.DECODE,))
        pool.add(node)
        pool.bring_up(node)
    for name in ("d1", "d2", "p1"):
        refuse(pool, name, 2)

    def fails(request: str) -> list[State]:
        for name in ("d1", "d2", "p1"):
            pool.leg_failed(name, Leg.DECODE, Fault.REFUSED, LegOrigin(request), FailureEvidence.NODE)
        return [pool.view(name).state for name in ("d1", "d2", "p1")]

    assert fails("one") == [State.DOWN, State.UP, State.DOWN]
    clock.advance(10)
    assert pool.view("d1").state is State.PROBING
    assert fails("one")[1] is State.UP
    assert fails("another")[1] is State.DOWN


def test_a_trial_whose_request_may_be_to_blame_proves_nothing(pool: Pool, clock: FakeClock) -> None:
    pool.give_up("d1", "health")
    pool.bring_up(NODE)
    break_it(pool)
    clock.advance(10)
    serve(pool, "d1")
    break_it(pool)
    clock.advance(30)
    with pool.acquire("d1"):
        pool.leg_failed("d1", Leg.FORWARD, Fault.SERVER_ERROR, LegOrigin("r"), FailureEvidence.UNSERVED)
    assert pool.view("d1").state is State.PROBING
    with pool.acquire("d1"):
        pool.leg_failed("d1", Leg.FORWARD, Fault.SERVER_ERROR, LegOrigin("r"), FailureEvidence.SERVED)
    assert pool.view("d1").state is State.DOWN


def test_an_answer_in_one_piece_ends_a_trial_well(pool: Pool, clock: FakeClock) -> None:
    break_it(pool)
    clock.advance(10)
    assert pool.view("d1").state is State.PROBING
    pool.leg_served("d1", Leg.DECODE, "")
    assert pool.view("d1").state is State.UP


def test_a_leg_that_begins_well_ends_the_row_of_those_that_did_not(pool: Pool) -> None:
    for name in ("d2", "d3"):
        pool.add(dataclasses.replace(NODE, name=name))
        pool.bring_up(dataclasses.replace(NODE, name=name))

    def fail(requests: range) -> State:
        for number in requests:
            pool.leg_failed("d1", Leg.DECODE, Fault.SERVER_ERROR, LegOrigin(f"r-{number}"), FailureEvidence.SERVED)
        return pool.view("d1").state

    for name in ("d2", "d3"):
        for _ in range(RECENT):
            serve(pool, name)
    assert fail(range(4)) is State.UP
    pool.leg_began("d1", Leg.DECODE)
    assert fail(range(4, 8)) is State.UP
    assert fail(range(8, 9)) is State.DOWN


def test_one_request_tries_a_half_open_circuit(pool: Pool, clock: FakeClock) -> None:
    break_it(pool)
    clock.advance(10)
    assert pool.view("d1").takes_requests()
    assert "d1" in pool.state().served(NODE.model).by_name
    trial = pool.acquire("d1")
    assert pool.view("d1").state is State.PROBING
    assert not pool.view("d1").takes_requests()
    assert "d1" not in pool.state().served(NODE.model).by_name
    serve(pool, "d1")
    trial.release()
    assert pool.view("d1").state is State.UP
    assert pool.view("d1").share < 1
    clock.advance(20)
    assert pool.view("d1").share == 1


def test_a_trial_that_proves_nothing_gives_its_place_back(pool: Pool, clock: FakeClock) -> None:
    break_it(pool)
    clock.advance(10)
    assert pool.view("d1").takes_requests()
    trial = pool.acquire("d1")
    assert "d1" not in pool.state().served(NODE.model).by_name
    trial.release()
    assert pool.view("d1").takes_requests()
    assert "d1" in pool.state().served(NODE.model).by_name


def test_streams_from_before_do_not_take_the_trials_place(pool: Pool, clock: FakeClock) -> None:
    old = pool.acquire("d1")
    break_it(pool)
    clock.advance(10)
    assert pool.view("d1").takes_requests()
    trial = pool.acquire("d1")
    old.release()
    assert not pool.view("d1").takes_requests()
    trial.release()
    assert pool.view("d1").active == 0


def test_a_failed_trial_opens_it_again(pool: Pool, clock: FakeClock) -> None:
    break_it(pool)
    clock.advance(10)
    with pool.acquire("d1"):
        refuse(pool, "d1", 1)
    assert pool.view("d1").state is State.DOWN
    clock.advance(10)
    assert pool.view("d1").state is State.DOWN
    clock.advance(10)
    assert pool.view("d1").state is State.PROBING


def test_since_when_a_node_is_out_counts_from_when_it_went_out(pool: Pool, clock: FakeClock) -> None:
    """Trials that fail meanwhile begin nothing anew; being up again does."""
    began = clock.now()
    break_it(pool)
    clock.advance(10)
    assert (pool.view("d1").state, pool.view("d1").since) == (State.PROBING, began)
    with pool.acquire("d1"):
        refuse(pool, "d1", 1)
    clock.advance(20)
    assert (pool.view("d1").state, pool.view("d1").since) == (State.PROBING, began)
    with pool.acquire("d1"):
        serve(pool, "d1")
    assert (pool.view("d1").state, pool.view("d1").since) == (State.UP, began + 30)


def test_missed_probes_count_only_in_a_row(pool: Pool, clock: FakeClock) -> None:
    for _ in range(20):
        pool.probed("d1", Fault.HEADERS_TIMEOUT, clock.now())
        pool.probed("d1", Fault.HEADERS_TIMEOUT, clock.now())
        pool.probed("d1", None, clock.now())
    assert pool.view("d1").state is State.UP


def test_a_busy_node_never_flaps(pool: Pool, clock: FakeClock) -> None:
    stream = pool.acquire("d1")
    for _ in range(20):
        began = clock.now()
        clock.advance(5)
        stream.progress()
        pool.probed("d1", Fault.HEADERS_TIMEOUT, began)
    assert pool.view("d1").state is State.UP
    assert not pool.leaving("d1").is_set()


def test_progress_before_the_probe_does_not_count(pool: Pool, clock: FakeClock) -> None:
    stream = pool.acquire("d1")
    stream.progress()
    clock.advance(1)
    for _ in range(3):
        pool.probed("d1", Fault.HEADERS_TIMEOUT, clock.now())
    assert pool.view("d1").state is State.DOWN
    assert pool.leaving("d1").is_set()


def test_streams_that_still_flow_need_not_leave_a_node_that_refuses_connections(pool: Pool, clock: FakeClock) -> None:
    stream = pool.acquire("d1")
    for _ in range(3):
        began = clock.now()
        stream.progress()
        pool.probed("d1", Fault.REFUSED, began)
    assert pool.view("d1").state is State.DOWN
    assert not pool.leaving("d1").is_set()
    clock.advance(1)
    pool.probed("d1", Fault.REFUSED, clock.now())
    assert pool.leaving("d1").is_set()


@pytest.mark.parametrize("change", ["amend", "rejoin", "bring_up"])
def test_streams_older_than_a_change_can_still_be_made_to_leave(pool: Pool, change: str) -> None:
    leaving = pool.leaving("d1")
    {"amend": pool.amend, "rejoin": lambda node: pool.rejoin(node.name), "bring_up": pool.bring_up}[change](NODE)
    assert not leaving.is_set()
    pool.remove("d1")
    assert leaving.is_set()


def test_a_node_given_up_by_health_stays_down_until_it_joins_anew(pool: Pool, clock: FakeClock) -> None:
    for _ in range(3):
        pool.probed("d1", Fault.REFUSED, clock.now())
    clock.advance(1000)
    assert pool.view("d1").state is State.DOWN
    assert pool.is_given_up("d1")
    pool.bring_up(NODE)
    assert pool.view("d1").state is State.UP
    assert not pool.leaving("d1").is_set()
    assert not pool.is_given_up("d1")


def test_a_node_that_joins_anew_may_be_another_process(pool: Pool, clock: FakeClock) -> None:
    clock.advance(5)
    failed = clock.now()
    assert not pool.joined_since("d1", failed)
    clock.advance(1)
    pool.give_up("d1", "refused")
    assert not pool.joined_since("d1", failed)
    pool.bring_up(NODE)
    assert pool.joined_since("d1", failed)
    assert not pool.joined_since("d1", clock.now())
    pool.remove("d1")
    assert not pool.joined_since("d1", failed)


def test_a_node_serves_on_where_a_later_probe_found_it_well(pool: Pool, clock: FakeClock) -> None:
    pool.probed("d1", None, clock.now())
    failed = clock.now()
    assert not pool.serves_on("d1", failed), "the probe may have been there before the fault"
    clock.advance(1)
    pool.probed("d1", Fault.REFUSED, clock.now())
    assert not pool.serves_on("d1", failed)
    pool.probed("d1", None, clock.now())
    assert pool.serves_on("d1", failed)
    pool.drain("d1")
    assert not pool.serves_on("d1", failed), "it goes away"
    pool.remove("d1")
    assert not pool.serves_on("d1", failed)


def test_a_terminating_node_is_a_last_resort_and_stays_so(pool: Pool) -> None:
    pool.terminate("d1")
    assert pool.view("d1").state is State.TERMINATING
    assert (pool.view("d1").takes_requests(), pool.view("d1").is_last_resort()) == (False, True)
    pool.bring_up(NODE)
    pool.refuse("d1", "block_size")
    assert pool.view("d1").state is State.TERMINATING
    pool.drain("d1")
    pool.terminate("d1")
    assert pool.view("d1").state is State.DRAINING


def test_a_terminating_node_that_fails_is_tried_no_more(pool: Pool, clock: FakeClock) -> None:
    pool.terminate("d1")
    refuse(pool, "d1", 5)
    assert pool.view("d1").state is State.DOWN
    clock.advance(1000)
    assert (pool.view("d1").state, pool.view("d1").takes_requests()) == (State.DOWN, False)


def test_the_last_resort_is_taken_by_role(pool: Pool) -> None:
    """Roles with another node that takes requests do without theirs."""
    for name, role in (("d2", Role.DECODE), ("p1", Role.PREFILL)):
        pool.add(dataclasses.replace(NODE, name=name, roles=(role,)))
        pool.bring_up(dataclasses.replace(NODE, name=name, roles=(role,)))
    pool.terminate("d1")
    pool.terminate("p1")

    def served() -> set[str]:
        return set(pool.state().served(NODE.model).by_name)

    assert served() == {"d2", "p1"}
    pool.drain("d2")
    assert served() == {"d1", "p1"}
    refuse(pool, "d1", 5)
    assert served() == {"p1"}


def test_a_draining_node_takes_nothing_and_stays_so(pool: Pool) -> None:
    pool.drain("d1")
    assert pool.view("d1").state is State.DRAINING
    pool.bring_up(NODE)
    pool.refuse("d1", "block_size")
    assert pool.view("d1").state is State.DRAINING
    pool.rejoin("d1")
    assert pool.view("d1").state is State.JOINING


def test_a_refused_node_has_a_reason(pool: Pool) -> None:
    pool.refuse("d1", "block_size: 16 here, 256 on p1")
    assert pool.view("d1").state is State.REFUSED
    assert pool.view("d1").reason == "block_size: 16 here, 256 on p1"


def test_a_removed_node_is_forgotten_and_its_streams_must_leave(pool: Pool, registry: CollectorRegistry) -> None:
    leg, leaving = pool.acquire("d1"), pool.leaving("d1")
    pool.remove("d1")
    pool.remove("d1")
    assert leaving.is_set()
    leg.progress()
    leg.release()
    refuse(pool, "d1", 1)
    serve(pool, "d1")
    pool.probed("d1", Fault.RESET, 0)
    assert pool.state().nodes == ()
    assert registry.get_sample_value("pdproxy_node_active", {"node": "d1", "role": "decode"}) is None
    with pytest.raises(UnknownNode):
        pool.acquire("d1")


def test_a_leg_of_a_removed_node_does_not_count_on_its_successor(pool: Pool) -> None:
    old = pool.acquire("d1")
    pool.remove("d1")
    pool.add(NODE)
    new = pool.acquire("d1")
    old.release()
    assert pool.view("d1").active == 1
    new.release()


def test_what_happens_is_counted(pool: Pool, clock: FakeClock, registry: CollectorRegistry) -> None:
    leg = pool.acquire("d1")
    assert registry.get_sample_value("pdproxy_node_active", {"node": "d1", "role": "decode"}) == 1
    leg.release()
    break_it(pool)
    clock.advance(10)
    pool.state()
    up = {"node": "d1", "role": "decode"}
    assert registry.get_sample_value("pdproxy_node_up", {**up, "state": "probing"}) == 1
    assert registry.get_sample_value("pdproxy_node_up", {**up, "state": "up"}) == 0
    for phase in ("open", "half_open"):
        assert registry.get_sample_value("pdproxy_circuit_moves_total", {"node": "d1", "to": phase}) == 1


def test_bars_are_in_the_snapshot_and_counted_until_a_node_leaves(pool: Pool, registry: CollectorRegistry) -> None:
    def gauge(prefill: str, decode: str) -> float | None:
        return registry.get_sample_value("pdproxy_pair_barred", {"prefill": prefill, "decode": decode})

    prefill = Node("p1", "http://p1", (Role.PREFILL,), "tiny")
    pool.add(prefill)
    pool.bar(Bars({("p1", "d1"): "far apart"}, {"d1": "far apart"}))
    assert not pool.state().bars.allow("p1", "d1")
    assert not pool.state().bars.allow("p2", "d1")
    assert (gauge("p1", "d1"), gauge("*", "d1"), gauge("p1", "*")) == (1, 1, None)
    pool.bar(Bars({("p1", "d1"): "still"}, {"p1": "still"}))
    assert (gauge("p1", "d1"), gauge("*", "d1"), gauge("p1", "*")) == (1, None, 1)
    pool.remove("p1")
    assert (gauge("p1", "d1"), gauge("p1", "*")) == (None, None)
    assert not pool.state().bars


def test_a_bar_keeps_the_time_when_it_began_until_it_is_lifted(pool: Pool, clock: FakeClock) -> None:
    began, pair = clock.now(), ("p1", "d1")
    pool.bar(Bars({pair: "far apart"}))
    clock.advance(60)
    pool.bar(Bars({pair: "still"}, {"d2": "far apart"}))
    assert pool.state().bars.began == {pair: began, "d2": began + 60}
    pool.remove("d2")
    assert pool.state().bars.began == {pair: began}
    pool.bar(Bars())
    pool.bar(Bars({pair: "again"}))
    assert pool.state().bars.began == {pair: began + 60}


def test_models_and_adapters_that_decode_nodes_serve_become_labels(clock: FakeClock) -> None:
    metrics = Metrics(CollectorRegistry())
    pool = Pool(clock, metrics=metrics)
    for node in (
        Node("d1", "http://d1", (Role.DECODE,), "configured"),
        Node("p1", "http://p1", (Role.PREFILL,), "prefill"),
    ):
        pool.add(node)
    assert [metrics.requests.models.label(name) for name in ("configured", "prefill", "found")] == [
        "configured",
        "other",
        "other",
    ]
    pool.bring_up(dataclasses.replace(pool.configured("d1"), model="found", aliases=("adapter",)))
    assert [metrics.requests.models.label(name) for name in ("found", "adapter")] == ["found", "adapter"]
