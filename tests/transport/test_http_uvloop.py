"""The same cases on uvloop, whose transports differ from asyncio's in the details."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from pdproxy.transport.h1_client import H1Transport
from tests.transport import (
    test_http_answers,
    test_http_faults,
    test_http_keeping,
    test_http_leaving,
    test_http_piping,
    test_http_resending,
    test_http_size,
)
from tests.transport.asking import HandClock

Case = Callable[..., Awaitable[None]]
GIVEN = frozenset({"transport", "clock"})
FILES = (
    test_http_answers, test_http_faults, test_http_keeping, test_http_leaving, test_http_piping,
    test_http_resending, test_http_size,
)  # fmt: skip


def plain_cases() -> dict[str, Case]:
    """The cases that are not parametrized."""
    found = (pair for file in FILES for pair in inspect.getmembers(file, inspect.iscoroutinefunction))
    return {
        name: case
        for name, case in found
        if name.startswith("test_") and inspect.signature(case).parameters.keys() <= GIVEN
    }


async def play(case: Case) -> None:
    clock = HandClock()
    transport = H1Transport(clock)
    wanted = inspect.signature(case).parameters.keys()
    given = {"transport": transport, "clock": clock}
    try:
        await case(**{name: given[name] for name in wanted})
    finally:
        await transport.aclose()
    assert transport.connections == 0


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("name", plain_cases())
def test_case_on_uvloop(name: str) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(play(plain_cases()[name]))


def test_there_are_cases() -> None:
    assert len(plain_cases()) > 25
