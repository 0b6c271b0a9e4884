"""Joining: preflight, judgement, warm-up, UP."""

import asyncio
import dataclasses
import logging

import pytest

from pdproxy.errors import Fault, NodeFault
from pdproxy.nodes.join import Joiner
from pdproxy.nodes.node import Role, State
from pdproxy.nodes.pool import Pool
from pdproxy.nodes.preflight import Preflight, check
from pdproxy.nodes.reachability import OutageLog
from pdproxy.nodes.warm import WarmUp
from tests.fakes.clock import FakeClock
from tests.nodes.turns import until
from tests.nodes.village import LABELS, House, Village, metrics


@pytest.fixture
def village() -> Village:
    return Village(p1=House(Role.PREFILL, ("tiny", "lora")), d1=House(Role.DECODE), d2=House(Role.DECODE))


@pytest.fixture
def pool() -> Pool:
    return Pool(FakeClock())


@pytest.fixture
def joiner(pool: Pool, village: Village) -> Joiner:
    return Joiner(pool, Preflight(village), WarmUp(village, new_id=lambda: "secret"))


def add(pool: Pool, village: Village, *names: str) -> None:
    for name in names:
        pool.add(village.node(name))


async def test_a_node_joins_with_what_it_said(pool: Pool, village: Village, joiner: Joiner) -> None:
    add(pool, village, "p1")
    await joiner.attempt("p1")
    seen = pool.view("p1")
    assert (seen.state, seen.node.model, seen.node.aliases) == (State.UP, "tiny", ("lora",))
    assert seen.node.cohort == "0.32.0+0.1.0"
    assert village.houses["p1"].completions() == []


async def test_the_first_handshake_is_made_before_clients_come(pool: Pool, village: Village, joiner: Joiner) -> None:
    add(pool, village, "p1", "d1")
    await joiner.attempt("p1")
    await joiner.attempt("d1")
    (asked,), (ticket,) = village.houses["p1"].completions(), village.houses["d1"].completions()
    assert (asked["do_remote_decode"], asked["pdproxy_hand_over"]) == (True, "secret")
    assert ticket == {"do_remote_prefill": True, "for": "secret"}
    assert pool.view("d1").state is State.UP


async def test_a_failed_warm_up_releases_and_keeps_nobody_out(pool: Pool, village: Village, joiner: Joiner) -> None:
    add(pool, village, "p1", "d1")
    await joiner.attempt("p1")
    village.houses["d1"].paths["/v1/completions"] = (500, b"")
    await joiner.attempt("d1")
    assert pool.view("d1").state is State.UP
    assert village.houses["p1"].completions()[-1] == {"pdproxy_release": "secret"}


async def test_a_failed_warm_up_is_released_on_every_rank(pool: Pool, village: Village, joiner: Joiner) -> None:
    add(pool, village, "p1", "d1")
    both = b"".join(metrics({**LABELS, "engine": engine}) for engine in ("0", "1"))
    village.houses["p1"].paths["/metrics"] = (200, both)
    await joiner.attempt("p1")
    village.houses["d1"].paths["/v1/completions"] = (500, b"")
    await joiner.attempt("d1")
    assert village.houses["p1"].completions()[1:] == [{"pdproxy_release": "secret"}] * 2


@pytest.mark.parametrize("answer", [(200, b"{}"), (200, b"x"), (200, b"[]"), (503, b""), Fault.RESET])
async def test_a_prefill_node_that_cannot_warm_up(
    pool: Pool, village: Village, joiner: Joiner, answer: tuple[int, bytes] | Fault
) -> None:
    add(pool, village, "d1", "p1")
    await joiner.attempt("d1")
    village.houses["p1"].paths["/v1/completions"] = answer
    await joiner.attempt("p1")
    assert pool.view("p1").state is State.UP
    assert village.houses["d1"].completions() == []


async def test_an_unreachable_node_goes_on_joining(pool: Pool, village: Village, joiner: Joiner) -> None:
    add(pool, village, "p1")
    village.houses["p1"].fault = Fault.REFUSED
    await joiner.attempt("p1")
    assert pool.view("p1").state is State.JOINING
    assert pool.view("p1").reason == "cannot be reached: as told"
    village.houses["p1"].fault = None
    village.houses["p1"].paths["/v1/models"] = (503, b"")
    await joiner.attempt("p1")
    assert "503" in pool.view("p1").reason


async def test_a_node_out_of_reach_is_logged_and_that_it_is_back(
    pool: Pool, village: Village, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    joiner = Joiner(pool, Preflight(village), outages=OutageLog(FakeClock()))
    add(pool, village, "p1")
    village.houses["p1"].fault = Fault.REFUSED
    for _ in range(3):
        await joiner.attempt("p1")
    [said] = caplog.messages
    assert said.startswith("node p1 cannot be reached: as told. ")
    village.houses["p1"].fault = None
    await joiner.attempt("p1")
    assert caplog.messages[1] == "node p1 answers again, after 0 s"


async def test_missing_metrics_and_version_do_not_matter(pool: Pool, village: Village, joiner: Joiner) -> None:
    add(pool, village, "p1")
    village.houses["p1"].paths |= {"/metrics": (404, b""), "/version": Fault.INVALID_BODY}
    await joiner.attempt("p1")
    assert pool.view("p1").state is State.UP
    assert pool.view("p1").node.cohort == ""


async def test_a_mismatch_is_refused_by_name_and_mended_without_a_restart(
    pool: Pool, village: Village, joiner: Joiner
) -> None:
    add(pool, village, "p1", "d1")
    village.houses["d1"].labels = {**LABELS, "block_size": "16"}
    await joiner.attempt("p1")
    await joiner.attempt("d1")
    assert pool.view("d1").state is State.REFUSED
    assert pool.view("d1").reason == "block_size: 16 here, 256 on p1"
    village.houses["d1"].labels = LABELS
    await joiner.attempt("d1")
    assert pool.view("d1").state is State.UP


async def test_nodes_that_join_at_once_are_judged_against_each_other(
    pool: Pool, village: Village, joiner: Joiner
) -> None:
    add(pool, village, "p1", "d1")
    village.houses["d1"].labels = {**LABELS, "dtype": "float16"}
    await asyncio.gather(joiner.attempt("p1"), joiner.attempt("d1"))
    states = {view.state for view in pool.snapshot().nodes}
    assert states == {State.UP, State.REFUSED}


async def test_a_node_that_left_is_no_measure_any_more(pool: Pool, village: Village, joiner: Joiner) -> None:
    add(pool, village, "p1", "d1")
    village.houses["d1"].labels = {**LABELS, "dtype": "float16"}
    await joiner.attempt("p1")
    pool.remove("p1")
    await joiner.attempt("d1")
    assert pool.view("d1").state is State.UP


async def test_a_node_removed_while_it_was_asked_stays_removed(pool: Pool, village: Village, joiner: Joiner) -> None:
    add(pool, village, "p1")
    village.houses["p1"].held.clear()
    attempt = asyncio.create_task(joiner.attempt("p1"))
    await asyncio.sleep(0)
    pool.remove("p1")
    village.houses["p1"].held.set()
    await attempt
    assert pool.snapshot().nodes == ()


async def test_every_answer_is_closed(pool: Pool, village: Village, joiner: Joiner) -> None:
    add(pool, village, "p1", "d1", "d2")
    await asyncio.gather(*(joiner.attempt(name) for name in ("p1", "d1", "d2")))
    assert village.answers
    assert all(answer.closed for answer in village.answers)


async def test_a_check_judges_in_the_order_given(village: Village) -> None:
    village.houses["d1"].labels = {**LABELS, "mamba_cache_mode": "none"}
    village.houses["d2"].fault = Fault.REFUSED
    rows = await check(Preflight(village), [village.node(name) for name in ("p1", "d1", "d2")])
    assert [row.good() for row in rows] == [True, False, False]
    assert [finding.setting for finding in rows[1].verdict.refusals] == ["mamba_cache_mode"]
    assert isinstance(rows[2].facts, NodeFault)


async def test_a_node_that_serves_something_else_now_is_taken_as_that(
    pool: Pool, village: Village, joiner: Joiner
) -> None:
    add(pool, village, "p1")
    await joiner.attempt("p1")
    village.houses["p1"].names = ("huge",)
    await joiner.attempt("p1")
    assert pool.view("p1").state is State.UP
    assert (pool.view("p1").node.model, pool.view("p1").node.aliases) == ("huge", ())


async def test_an_amended_node_joins_again_with_its_new_settings(pool: Pool, village: Village, joiner: Joiner) -> None:
    add(pool, village, "p1")
    await joiner.attempt("p1")
    pool.amend(dataclasses.replace(village.node("p1"), weight=3.0))
    assert pool.view("p1").state is State.JOINING
    await joiner.attempt("p1")
    assert pool.view("p1").node.weight == 3.0


async def test_a_slow_partner_delays_no_other_warm_up(pool: Pool, village: Village, joiner: Joiner) -> None:
    add(pool, village, "d1", "d2", "p1")
    await asyncio.gather(joiner.attempt("d1"), joiner.attempt("d2"))
    village.houses["d1"].held.clear()
    attempt = asyncio.create_task(joiner.attempt("p1"))
    await until(lambda: len(village.houses["d2"].completions()) == 1)
    assert pool.view("p1").state is State.JOINING
    village.houses["d1"].held.set()
    await attempt
    assert pool.view("p1").state is State.UP
