"""The queue by itself: who goes next, and what is left behind."""

import asyncio

import pytest

from pdproxy.errors import ClientError
from pdproxy.planning.shares import KeyLimits, LimitsByKey, ShareUse
from tests.orchestration.queue_setup import QueueSetup, of, queued_prompt, settle


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
    queued = queued_prompt(setup.queue)
    step = queued.start_when_room(lambda _: True, lambda: "m")
    with pytest.raises(StopIteration):
        step.send(None)
    assert queued.runs
    queued.end()
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


async def test_a_key_runs_no_more_than_its_own_limit_and_others_pass_it() -> None:
    setup = QueueSetup(concurrency=3, keys={"batch": KeyLimits(concurrency=1)})
    setup.metrics.keys.series("batch")
    for name in ("b1", "b2", "b3"):
        await setup.start(name, of("batch"))
    await setup.start("other", of("other"))
    assert setup.entered == ["b1", "other"]
    assert setup.registry.get_sample_value("pdproxy_key_requests_queued", {"key": "batch"}) == 2
    assert setup.registry.get_sample_value("pdproxy_key_requests_active", {"key": "batch"}) == 1
    setup.clock.advance(3.0)
    await setup.end("b1")
    assert setup.entered == ["b1", "other", "b2"]
    await setup.end("b2", "b3", "other")
    assert setup.registry.get_sample_value("pdproxy_key_queue_seconds_total", {"key": "batch"}) == 6
    setup.check_empty()


async def test_one_that_waits_for_its_keys_own_limit_too_long_is_told_so() -> None:
    setup = QueueSetup(concurrency=3, queue_seconds=0.01, keys={"batch": KeyLimits(concurrency=1)})
    await setup.start("b1", of("batch"))
    error = await setup.rejected("b2", of("batch"))
    assert "This API key may have 1 requests running at once" in error.message
    await setup.end("b1")
    setup.check_empty()


async def test_other_limits_hold_for_what_waits() -> None:
    setup = QueueSetup(concurrency=9, keys={"batch": KeyLimits(concurrency=1)})
    for name in ("b1", "b2", "b3"):
        await setup.start(name, of("batch"))
    setup.keys.replace(LimitsByKey({"batch": KeyLimits(concurrency=2)}))
    setup.queue.room_changed()
    await settle()
    assert setup.entered == ["b1", "b2"]
    await setup.end("b1", "b2", "b3")


async def test_weights_decide_how_often_a_key_goes() -> None:
    setup = QueueSetup(keys={"heavy": KeyLimits(weight=3.0)})
    await setup.start("first", of("another"))
    for number in range(12):
        await setup.start(f"h{number}", of("heavy"))
        await setup.start(f"l{number}", of("light"))
    order = ["first"]
    while len(order) < 13:
        await setup.end(order[-1])
        order.append(setup.entered[-1])
    assert sum(name.startswith("h") for name in order[1:]) == 9
    await setup.end(order[-1])
    while len(setup.entered) > len(order):
        order.append(setup.entered[-1])
        await setup.end(order[-1])
    setup.check_empty()


async def test_a_key_with_more_than_its_share_leaves_places_while_another_asks() -> None:
    setup = QueueSetup(concurrency=8)
    await setup.start("q0", of("quiet"))
    await setup.end("q0")
    for number in range(10):
        await setup.start(f"f{number}", of("flood"))
    assert len(setup.entered) == 1 + 7, "an eighth is left"
    await setup.start("q1", of("quiet"))
    assert setup.entered[-1] == "q1", "though others came before"
    await setup.end("f0")
    assert setup.entered[-1] == "q1", "that place is left now"
    await setup.end("q1")
    assert setup.entered[-1] == "f7"
    await setup.end(*(f"f{number}" for number in range(1, 10)))
    setup.check_empty()


async def test_a_key_alone_has_all_places_and_without_a_reserve_every_key() -> None:
    setup = QueueSetup(concurrency=8)
    for number in range(10):
        await setup.start(f"f{number}", of("flood"))
    assert len(setup.entered) == 8
    await setup.end(*(f"f{number}" for number in range(10)))
    setup = QueueSetup(concurrency=8, reserve=0.0)
    await setup.start("q0", of("quiet"))
    for number in range(10):
        await setup.start(f"f{number}", of("flood"))
    assert len(setup.entered) == 8
    await setup.end("q0", *(f"f{number}" for number in range(10)))
    setup.check_empty()


async def test_prompts_cost_what_they_took_once_that_is_known() -> None:
    setup = QueueSetup()
    for name in ("x", "a1", "b1", "a2", "a3", "b2", "b3"):
        await setup.start(name, of(name[0]))
    await setup.end("x")
    assert setup.entered[-1] == "a1"
    setup.prompts["a1"].correct_cost(25)
    await setup.end("a1", "b1")
    assert setup.entered[-1] == "b2", "a's next one has to wait for longer"
    await setup.end("b2", "b3")
    assert setup.entered[-2:] == ["b3", "a2"]
    await setup.end("a2", "a3")
    setup.check_empty()


async def test_a_full_queue_refuses_before_anything_waits_there() -> None:
    setup = QueueSetup(queue=2)
    setup.queue.check_room("a")
    for name in ("r", "a1", "a2"):
        await setup.start(name, of("a"))
    with pytest.raises(ClientError) as caught:
        setup.queue.check_room("a")
    assert (caught.value.status, caught.value.code) == (429, "queue_full")
    setup.queue.check_room("b")  # it would take a place of the other key
    await setup.end("r", "a1", "a2")
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
    queued = queued_prompt(setup.queue)

    def fail(_: ShareUse) -> bool:
        raise error

    failing = asyncio.create_task(queued.start_when_room(fail, lambda: "m"))
    await setup.start("b")
    await setup.end("a")
    with pytest.raises(type(error), match="no node"):
        await failing
    assert not queued.runs
    assert setup.entered == ["a", "b"]
    await setup.end("b")
    setup.check_empty()


async def test_what_a_prompt_really_cost_does_not_change_what_counts_as_running() -> None:
    setup = QueueSetup(concurrency=2)
    for name in ("stays", "goes", "waits"):
        await setup.start(name)
    await setup.end("goes")
    setup.prompts["waits"].correct_cost(10_000)
    await setup.end("waits")
    assert setup.queue._shares._total == setup.prompts["stays"].began_with
    await setup.end("stays")
    setup.check_empty()
