"""KV events that are put off are taken in together, in order, and keep nothing else waiting for long."""

import asyncio
import time
from typing import Any

from pdproxy.events.bunches import AT_ONCE_SECONDS, BUNCH_SECONDS, Bunches


async def test_callbacks_of_a_while_are_run_together_in_their_order() -> None:
    bunches, ran, began = Bunches(), list[tuple[int, float]](), time.monotonic()
    for number in range(3):
        bunches.later(lambda number=number: ran.append((number, time.monotonic() - began)))  # type: ignore[misc]
        await asyncio.sleep(BUNCH_SECONDS / 10)
    assert ran == []
    await asyncio.sleep(10 * BUNCH_SECONDS)
    assert [number for number, _ in ran] == [0, 1, 2]
    assert ran[0][1] >= 0.9 * BUNCH_SECONDS  # two clocks
    assert ran[2][1] - ran[0][1] < BUNCH_SECONDS / 10


async def test_a_long_bunch_lets_others_in_between() -> None:
    bunches, ran = Bunches(), list[str]()

    def work() -> None:
        ran.append("bunch")
        time.sleep(AT_ONCE_SECONDS)

    async def tick() -> None:
        while ran.count("bunch") < 4:
            ran.append("other")
            await asyncio.sleep(0)

    for _ in range(4):
        bunches.later(work)
    await asyncio.wait_for(tick(), 10)
    first = ran.index("bunch")
    assert ran[first : first + 7 : 2] == ["bunch"] * 4
    assert ran[first + 1 : first + 7 : 2] == ["other"] * 3


async def test_one_that_comes_meanwhile_is_run_and_so_is_one_that_comes_later() -> None:
    bunches, ran = Bunches(), list[str]()
    bunches.later(lambda: bunches.later(lambda: ran.append("meanwhile")))
    await asyncio.sleep(5 * BUNCH_SECONDS)
    bunches.later(lambda: ran.append("later"))
    await asyncio.sleep(5 * BUNCH_SECONDS)
    assert ran == ["meanwhile", "later"]


async def test_an_error_is_told_to_the_loop_and_keeps_nothing_else_from_being_run() -> None:
    bunches, ran, errors = Bunches(), list[str](), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    bunches.later(lambda: ran.append("before"))
    bunches.later(lambda: ran.remove("nothing"))
    bunches.later(lambda: ran.append("after"))
    await asyncio.sleep(5 * BUNCH_SECONDS)
    assert ran == ["before", "after"]
    assert [type(context["exception"]) for context in errors] == [ValueError]
