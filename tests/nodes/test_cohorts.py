"""Which cohorts are complete, what goes to each, and which nodes may go while an upgrade is under way."""

import asyncio
import dataclasses

import pytest
from prometheus_client import CollectorRegistry

from pdproxy.background import Background
from pdproxy.nodes.cohorts import Cohorts
from pdproxy.nodes.drain import Drainer
from pdproxy.nodes.node import Bars, Footprint, Node, Role, State
from pdproxy.nodes.pool import Pool
from pdproxy.nodes.pool_entry import WINDOW, LegLoad
from pdproxy.observe.metrics import Metrics
from pdproxy.planning.plan import LEAST_LOADED, PlanPolicy, plan
from pdproxy.planning.plan_types import PlanInput
from tests.fakes.clock import FakeClock
from tests.nodes.fake_pool import settle, until

PORT = 8000
STREAM = LegLoad(footprint=Footprint(100, 1))


def node(name: str, cohort: str = "") -> Node:
    """``p-old`` is a prefill node, ``d-new`` a decode node; its host is its name."""
    role = Role.PREFILL if name.startswith("p") else Role.DECODE
    return Node(name, f"http://{name}:{PORT}", (role,), "m", cohort=cohort)


class Fleet:
    """A pool whose nodes come as they are told to: of the cohort that their name ends with."""

    def __init__(self, clock: FakeClock, *names: str) -> None:
        self.registry = CollectorRegistry()
        self.pool = Pool(clock, metrics=Metrics(self.registry))
        self.proved: set[str] = set()
        self.cohorts = Cohorts(self.pool, self.proved.__contains__)
        for name in names:
            self.come(name)
            self.serve(name)

    def come(self, name: str) -> None:
        """A node is found, and joins."""
        self.pool.add(node(name))

    def serve(self, name: str) -> None:
        """The node passed its tests."""
        self.proved.add(name)
        self.pool.bring_up(node(name, name.split("-")[1]))

    def stays(self, name: str) -> str:
        """Why it had better wait; "" where it may go."""
        answer = self.cohorts.may_leave(name, PORT)
        assert self.cohorts.is_needed(name) is not answer.leave
        return "" if answer.leave else answer.why

    def planned(self) -> tuple[str, str]:
        """Where the next request goes."""
        made = plan(self.pool.state(), PlanInput("m"), PlanPolicy(LEAST_LOADED), 0)
        return made.prefill.name if made.prefill else "", made.decode.name

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


def test_in_a_surge_the_first_role_waits_for_the_second_and_the_old_pair_serves(clock: FakeClock) -> None:
    fleet = Fleet(clock, "p-old", "d-old")
    fleet.come("p-new")
    fleet.pool.terminate("p-old")
    assert "p-new (joining)" in fleet.stays("p-old")
    fleet.serve("p-new")
    assert "p-new (up)" in fleet.stays("p-old")
    assert fleet.planned() == ("p-old", "d-old")
    fleet.come("d-new")
    fleet.pool.terminate("d-old")
    assert fleet.stays("d-old")
    assert fleet.stays("p-old")
    assert fleet.planned() == ("p-old", "d-old")
    fleet.serve("d-new")
    assert (fleet.stays("d-old"), fleet.stays("p-old")) == ("", "")
    assert fleet.planned() == ("p-new", "d-new")


def test_the_decode_node_may_be_the_first(clock: FakeClock) -> None:
    fleet = Fleet(clock, "p-old", "d-old", "d-new")
    fleet.pool.terminate("d-old")
    assert fleet.stays("d-old")
    assert fleet.planned() == ("p-old", "d-old")
    fleet.come("p-new")
    fleet.serve("p-new")
    assert not fleet.stays("d-old")
    assert fleet.planned() == ("p-new", "d-new")


def test_a_new_pair_that_is_not_proved_or_barred_is_none(clock: FakeClock) -> None:
    fleet = Fleet(clock, "p-old", "d-old", "p-new", "d-new")
    fleet.proved.discard("d-new")
    fleet.pool.terminate("p-old")
    fleet.pool.terminate("d-old")
    assert fleet.stays("p-old")
    fleet.proved.add("d-new")
    fleet.pool.bar(Bars({("p-new", "d-new"): "failed"}))
    assert fleet.stays("d-old")
    fleet.pool.bar(Bars())
    assert not fleet.stays("d-old")


@pytest.mark.parametrize(
    ("there", "coming", "going"),
    [
        pytest.param(["p-a", "d-a", "d2-a"], [], "d-a", id="scale-in"),
        pytest.param(["p-a", "p2-a", "d-a"], ["p3-x"], "p-a", id="a replica of its own cohort stays"),
        pytest.param(["p-a", "d-a"], [], "d-a", id="the last one, and none follows"),
        pytest.param(["d-a", "d-b"], [], "d-a", id="decode nodes alone"),
        pytest.param(["p-a", "d-b", "p2-b"], [], "p-a", id="one that pairs with none"),
        pytest.param(["p-a", "d-a"], ["p-b"], "unknown", id="one that is not known"),
    ],
)
def test_who_need_not_wait(clock: FakeClock, there: list[str], coming: list[str], going: str) -> None:
    fleet = Fleet(clock, *there)
    for name in coming:
        fleet.come(name)
    assert not fleet.stays(going)


def test_one_of_two_need_not_wait_while_their_partner_goes(clock: FakeClock) -> None:
    fleet = Fleet(clock, "p-a", "p2-a", "d-a")
    fleet.come("d-b")
    fleet.pool.terminate("d-a")
    assert not fleet.stays("p-a")
    fleet.pool.remove("p2-a")
    assert fleet.stays("p-a")


def test_a_proxy_that_knows_nothing_yet_lets_nobody_go(clock: FakeClock) -> None:
    fleet = Fleet(clock, "d-a")
    fleet.come("p-a")
    assert not fleet.cohorts.may_leave("p-old", PORT).leave
    fleet.serve("p-a")
    assert fleet.cohorts.may_leave("p-old", PORT).leave


def test_a_node_that_serves_nothing_may_go(clock: FakeClock) -> None:
    fleet = Fleet(clock, "p-old", "d-old", "p-new")
    fleet.pool.drain("p-old")
    assert not fleet.stays("p-old")


def test_an_address_is_asked_for_by_host_and_port(clock: FakeClock) -> None:
    fleet = Fleet(clock, "d-old", "p-new", "p-old")
    fleet.pool.add(dataclasses.replace(node("p6"), url="http://[fd00::1]:8000"))
    fleet.pool.bring_up(dataclasses.replace(node("p6", "six"), url="http://[fd00::1]:8000"))
    assert not fleet.cohorts.may_leave("p-old", PORT).leave
    assert fleet.cohorts.may_leave("p-old", PORT + 1).why == "this proxy knows no such node"
    assert fleet.cohorts.may_leave("fd00::1", PORT).why != "this proxy knows no such node"


async def test_streams_need_not_move_while_their_node_waits(clock: FakeClock) -> None:
    fleet = Fleet(clock, "p-old", "d-old", "d-new")
    background = Background(clock)
    drainer = Drainer(fleet.pool, clock, background, is_needed=fleet.cohorts.is_needed)
    leaving = fleet.pool.leaving("d-old")
    drainer.terminate("d-old", 30)
    for _ in range(100):
        await settle()
        clock.advance(1)
    assert not leaving.is_set()
    fleet.come("p-new")
    fleet.serve("p-new")
    async with asyncio.timeout(60):
        while not leaving.is_set():
            await settle()
            clock.advance(1)
    await until(leaving.is_set)
    await background.aclose()


def test_the_report_counts_nodes_and_requests(clock: FakeClock) -> None:
    fleet = Fleet(clock, "p-old", "d-old", "d2-old", "p-new")
    fleet.come("d-new")
    fleet.pool.terminate("d2-old")
    for name, requests in (("d-old", 3), ("d-new", 1)):
        for _ in range(requests):
            fleet.pool.acquire(name, STREAM).release()
        fleet.serve("d-new")
    old, new = fleet.cohorts.report()
    assert (old.name, old.models, old.complete) == ("old", ("m",), True)
    assert (dataclasses.astuple(old.prefill), dataclasses.astuple(old.decode)) == ((1, 0, 0), (2, 1, 0))
    assert (new.name, new.complete, old.requests, new.requests) == ("new", True, 3, 1)
    assert (old.share, new.share) == (0.75, 0.25)
    clock.advance(WINDOW + 11)
    assert [(cohort.requests, cohort.share) for cohort in fleet.cohorts.report()] == [(0, 0.0), (0, 0.0)]
    assert fleet.value("pdproxy_cohort_requests_total", cohort="old") == 3


def test_a_prefill_leg_is_no_request(clock: FakeClock) -> None:
    fleet = Fleet(clock, "p-old", "d-old")
    fleet.pool.acquire("p-old").release()
    assert fleet.cohorts.report()[0].requests == 0


def test_a_cohort_without_nodes_leaves_no_series(clock: FakeClock) -> None:
    fleet = Fleet(clock, "p-old", "d-old", "d-new")
    fleet.pool.acquire("d-new", STREAM)
    assert fleet.value("pdproxy_cohort_nodes", cohort="new", role="decode") == 1
    fleet.pool.remove("d-new")
    for name in ("pdproxy_cohort_nodes", "pdproxy_cohort_requests_total"):
        for labels in ({"cohort": "new"}, {"cohort": "new", "role": "decode"}, {"cohort": ""}):
            assert fleet.value(name, **labels) is None
    assert fleet.value("pdproxy_cohort_nodes", cohort="old", role="decode") == 1
    fleet.pool.rejoin("d-old")
    assert fleet.value("pdproxy_cohort_nodes", cohort="old", role="decode") == 0
    fleet.pool.bring_up(node("d-old", "replaced"))
    assert fleet.value("pdproxy_cohort_nodes", cohort="replaced", role="decode") == 1
    assert fleet.pool.view("d-old").state is State.UP
    assert [cohort.requests for cohort in fleet.cohorts.report()] == [0, 0]
