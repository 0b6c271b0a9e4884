"""The queue by itself: who goes next, and what is left behind."""

import asyncio

import pytest

from pdproxy.errors import ClientError
from pdproxy.orchestration.admission import Admission
from tests.orchestration.queue_setup import ASKED, QueueSetup, of, settle


async def test_the_queue_is_served_by_priority_then_arrival() -> None:
    setup = QueueSetup()
    for name, priority in [("a", 0), ("b", 5), ("c", 0), ("d", 0)]:
        await setup.start(name, of(priority=priority))
    assert setup.entered == ["a"]
    assert setup.registry.get_sample_value("pdproxy_requests_queued") == 3
    await setup.end("a", "c", "d", "b")
    assert setup.entered == ["a", "c", "d", "b"]
    setup.check_empty()


async def test_without_pressure_the_loop_gets_no_turn() -> None:
    """A coroutine that does not wait ends at its first step."""
    setup = QueueSetup()
    admission = Admission(setup.queue, setup.clock, ASKED)
    step = admission.begin(lambda _: "begun", lambda: "m")
    with pytest.raises(StopIteration) as ended:
        step.send(None)
    assert ended.value.value == "begun"
    admission.end()
    setup.check_empty()


async def test_one_for_which_there_is_no_room_waits_and_lets_no_smaller_one_pass() -> None:
    setup = QueueSetup(concurrency=9)
    setup.room["m"] = 0
    await setup.start("large")
    setup.room["m"] = 1
    await setup.start("small")
    assert setup.entered == [], "it is not the small one's turn"
    setup.queue.room_changed()
    await settle()
    assert setup.entered == ["large"]
    await setup.end("large", "small")
    setup.check_empty()


async def test_full_nodes_of_one_model_delay_no_other() -> None:
    setup = QueueSetup(concurrency=2)
    setup.room["full"] = 0
    waits = await setup.start("a", model="full")
    await setup.start("b", model="free")
    assert setup.entered == ["b"]
    assert setup.queue.status().by_model == {"full": 1}
    waits.cancel()
    await setup.end("b")
    setup.check_empty()


async def test_a_model_that_gets_room_is_begun_though_another_ones_more_urgent_head_has_none() -> None:
    setup = QueueSetup(concurrency=9)
    setup.room = {"full": 0, "free": 0}
    waits = await setup.start("a", of(priority=-1), model="full")
    await setup.start("b", model="free")
    setup.room["free"] = 1
    setup.queue.room_changed()
    await settle()
    assert setup.entered == ["b"]
    waits.cancel()
    await setup.end("b")
    setup.check_empty()


async def test_priority_counts_across_models() -> None:
    setup = QueueSetup()
    await setup.start("first")
    await setup.start("x", model="x")
    await setup.start("y", of(priority=-1), model="y")
    await setup.end("first", "y", "x")
    assert setup.entered == ["first", "y", "x"]


async def test_models_that_compete_for_the_same_places_take_turns() -> None:
    setup = QueueSetup()
    await setup.start("first")
    for number in range(3):
        await setup.start(f"x{number}", model="x")
    await setup.start("y0", model="y")
    await setup.end("first", "x0", "y0", "x1", "x2")
    assert setup.entered == ["first", "x0", "y0", "x1", "x2"]


async def test_a_flood_of_one_key_delays_another_key_by_one() -> None:
    setup = QueueSetup()
    names = [f"flood{number}" for number in range(20)]
    for name in names:
        await setup.start(name, of("flood"))
    await setup.start("quiet", of("quiet"))
    await setup.end(*names[:2])
    assert setup.entered[2] == "quiet"
    await setup.end("quiet", *names[2:])
    setup.check_empty()


async def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    setup = QueueSetup()
    for name in "abc":
        await setup.start(name)
    setup.tasks["b"].cancel()
    await setup.end("a")
    assert setup.entered == ["a", "c"]
    assert setup.tasks["b"].cancelled()
    await setup.end("c")
    setup.check_empty()


async def test_the_head_that_leaves_lets_the_next_one_go() -> None:
    setup = QueueSetup(concurrency=9)
    setup.room["m"] = 0
    await setup.start("a")
    await setup.start("b")
    setup.room["m"] = 1
    setup.tasks["a"].cancel()
    await settle()
    assert setup.entered == ["b"]
    await setup.end("b")
    setup.check_empty()


@pytest.mark.parametrize("turns", range(4))
async def test_one_that_is_cancelled_at_the_moment_of_its_turn_gives_it_back(turns: int) -> None:
    setup = QueueSetup()
    for name in "abc":
        await setup.start(name)
    setup.ends["a"].set()
    for _ in range(turns):
        await asyncio.sleep(0)
    setup.tasks["b"].cancel()
    await settle()
    assert "c" in setup.entered
    await setup.end("c")
    setup.check_empty()


async def test_one_that_has_been_cancelled_is_not_begun() -> None:
    setup = QueueSetup(concurrency=9)
    setup.room["m"] = 0
    await setup.start("a")
    setup.room["m"] = 1
    setup.queue.room_changed()
    setup.tasks["a"].cancel()
    await settle()
    assert setup.entered == []
    setup.check_empty()


@pytest.mark.parametrize("error", [ClientError(503, "no node"), IndexError("no node")])
async def test_an_error_of_the_attempt_is_its_own(error: Exception) -> None:
    setup = QueueSetup()
    await setup.start("a")
    admission = Admission(setup.queue, setup.clock, ASKED)

    def fail(_: bool) -> str | None:
        raise error

    failing = asyncio.create_task(admission.begin(fail, lambda: "m"))
    await setup.start("b")
    await setup.end("a")
    with pytest.raises(type(error), match="no node"):
        await failing
    assert not admission.runs
    assert setup.entered == ["a", "b"]
    await setup.end("b")
    setup.check_empty()
