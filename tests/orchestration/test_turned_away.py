"""The queue by itself: who is turned away, when, and with what."""

import pytest

from pdproxy.errors import ClientError
from tests.orchestration.queue_setup import QueueSetup, of


async def test_a_full_queue_answers_429_with_retry_after() -> None:
    setup = QueueSetup(queue=1)
    await setup.start("a")
    await setup.start("b")
    error = await setup.rejected("c")
    assert (error.status, error.code, error.kind) == (429, "queue_full", "rate_limit_error")
    assert dict(error.headers)["retry-after"] == "5", "nothing has left the queue yet"
    assert setup.registry.get_sample_value("pdproxy_rejected_total", {"reason": "queue_full"}) == 1
    await setup.end("a", "b")
    setup.check_empty()


async def test_retry_after_follows_the_rate_at_which_others_left() -> None:
    setup = QueueSetup(queue=4)
    names = [f"r{number}" for number in range(7)]
    for name in names[:5]:
        await setup.start(name)
    for ends, name in zip(names[:2], names[5:], strict=True):
        setup.clock.advance(3)
        await setup.end(ends)
        await setup.start(name)
    error = await setup.rejected("late")
    assert dict(error.headers)["retry-after"] == "12", "four wait, and one leaves every three seconds"
    assert "4 requests wait already: try again in 12 s" in error.message
    await setup.end(*names[2:])


async def test_a_key_that_fills_the_queue_gives_way_to_another() -> None:
    setup = QueueSetup(queue=3)
    await setup.start("runs")
    for number in range(3):
        await setup.start(f"flood{number}", of("flood"))
    await setup.start("quiet", of("quiet"))
    with pytest.raises(ClientError, match="wait already"):
        await setup.tasks["flood2"]
    assert setup.queue.status().by_key == {"flood": 2, "quiet": 1}
    refused = await setup.rejected("quiet2", of("quiet"))
    assert refused.code == "queue_full", "it would have as much as the other"
    await setup.end("runs", "flood0", "quiet", "flood1")
    setup.check_empty()


async def test_a_wait_ends_with_queue_seconds_or_the_requests_deadline() -> None:
    setup = QueueSetup(queue_seconds=0.02)
    await setup.start("a")
    assert (await setup.rejected("b")).code == "queue_timeout"
    patient = QueueSetup()
    await patient.start("a")
    error = await patient.rejected("b", of(deadline=patient.clock.now() + 0.02))
    assert (error.code, error.status) == ("queue_timeout", 429)
    for each in (setup, patient):
        await each.end("a")
        each.check_empty()


async def test_what_is_past_its_deadline_is_not_begun() -> None:
    setup = QueueSetup()
    await setup.start("a")
    late = await setup.start("b", of(deadline=setup.clock.now() + 50))
    setup.clock.advance(50)
    await setup.end("a")
    with pytest.raises(ClientError, match="no room for this request in time"):
        await late
    assert setup.entered == ["a"]
    setup.check_empty()


async def test_later_prompts_of_a_request_that_has_begun_are_not_turned_away() -> None:
    setup = QueueSetup(queue=0, queue_seconds=0.0)
    await setup.start("first")
    later = await setup.start("later", of(later=True))
    assert not later.done()
    await setup.end("first", "later")
    await setup.start("again")
    deadline = setup.clock.now() + 0.02
    error = await setup.rejected("too late", of(later=True, deadline=deadline))
    assert (error.status, error.code) == (504, "deadline")
    await setup.end("again")
    setup.check_empty()


async def test_a_prompt_of_a_request_that_has_begun_does_not_give_way() -> None:
    setup = QueueSetup(queue=2)
    await setup.start("runs", of("list"))
    later = [await setup.start(f"later{number}", of("list", later=True)) for number in range(3)]
    error = await setup.rejected("quiet", of("quiet"))
    assert error.code == "queue_full"
    assert not any(task.done() for task in later)
    await setup.end("runs", "later0", "later1", "later2")
    setup.check_empty()
