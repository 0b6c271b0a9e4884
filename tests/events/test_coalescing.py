"""Deferred callbacks run together, in order, and keep nothing else waiting for long."""

import asyncio
from typing import Any

from pdproxy.events.coalescing import COALESCE_SECONDS, SLICE_SECONDS, Coalescer
from tests.events.publisher import until


class Ran:
    """Callbacks, each with the turn of the event loop in which it was run; a clock that goes on by work alone."""

    def __init__(self, until: int) -> None:
        self.log: list[tuple[str, int]] = []
        self.now = 0.0
        self._turn, self._until = 0, until
        asyncio.get_running_loop().call_soon(self._next_turn)

    def __call__(self, name: str, seconds: float = 0.0) -> None:
        """This one is run, and takes so long."""
        self.log.append((name, self._turn))
        self.now += seconds

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.log]

    @property
    def turns(self) -> list[int]:
        return [turn for _, turn in self.log]

    def _next_turn(self) -> None:
        self._turn += 1
        if len(self.log) < self._until:
            asyncio.get_running_loop().call_soon(self._next_turn)


async def test_callbacks_of_a_while_are_run_together_in_their_order() -> None:
    ran, began = Ran(until=3), asyncio.get_running_loop().time()
    coalescer = Coalescer(lambda: ran.now)
    for name in ("first", "second", "third"):
        coalescer.defer(lambda name=name: ran(name))  # type: ignore[misc]
        await asyncio.sleep(0)
    await until(lambda: len(ran.log) == 3)
    assert ran.names == ["first", "second", "third"]
    assert len(set(ran.turns)) == 1
    assert asyncio.get_running_loop().time() - began >= 0.9 * COALESCE_SECONDS  # timers may come a moment early


async def test_many_callbacks_let_others_in_between() -> None:
    ran = Ran(until=4)
    coalescer = Coalescer(lambda: ran.now)
    for name in "abcd":
        coalescer.defer(lambda name=name: ran(name, SLICE_SECONDS / 2))  # type: ignore[misc]
    await until(lambda: len(ran.log) == 4)
    assert ran.names == ["a", "b", "c", "d"]
    first, second = ran.turns[0], ran.turns[2]
    assert ran.turns == [first, first, second, second]
    assert second == first + 1


async def test_one_that_comes_meanwhile_is_run_and_so_is_one_that_comes_later() -> None:
    ran = Ran(until=2)
    coalescer = Coalescer(lambda: ran.now)
    coalescer.defer(lambda: coalescer.defer(lambda: ran("meanwhile")))
    await until(lambda: ran.names == ["meanwhile"])
    coalescer.defer(lambda: ran("later"))
    await until(lambda: ran.names == ["meanwhile", "later"])


async def test_an_error_is_told_to_the_loop_and_keeps_nothing_else_from_being_run() -> None:
    ran, errors = Ran(until=2), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    coalescer = Coalescer(lambda: ran.now)
    coalescer.defer(lambda: ran("before"))
    coalescer.defer(lambda: ran.log.remove(("nothing", 0)))
    coalescer.defer(lambda: ran("after"))
    await until(lambda: ran.names == ["before", "after"])
    assert [type(context["exception"]) for context in errors] == [ValueError]
