"""Waiting for servers, on a clock that the test turns."""

from collections.abc import Callable

import pytest

from deploy.local.readiness import Clock, NotReadyError, await_ready


class HandClock(Clock):
    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


def up_from(clock: HandClock, times: dict[str, float]) -> Callable[[str], bool]:
    return lambda url: clock.time >= 100.0 + times[url]


def test_returns_when_all_have_answered_and_reports_each() -> None:
    clock, lines = HandClock(), list[str]()
    await_ready(
        {"one": "u1", "two": "u2"},
        within=60,
        still_alive=lambda: None,
        say=lines.append,
        probe=up_from(clock, {"u1": 2, "u2": 7}),
        clock=clock,
    )
    assert lines == ["one is up after 2 s", "waiting for two (5 s) …", "two is up after 7 s"]


def test_gives_up_in_time_and_names_what_is_missing() -> None:
    clock = HandClock()
    with pytest.raises(NotReadyError, match="not up after 60 s: two"):
        await_ready(
            {"one": "u1", "two": "u2"},
            within=60,
            still_alive=lambda: None,
            say=lambda _: None,
            probe=up_from(clock, {"u1": 2, "u2": 1000}),
            clock=clock,
        )
    assert clock.time - 100 < 62


def test_an_early_end_cuts_the_wait_short() -> None:
    clock = HandClock()

    def dies_after_three_seconds() -> None:
        if clock.time > 103:
            raise RuntimeError("ended")

    with pytest.raises(RuntimeError, match="ended"):
        await_ready(
            {"one": "u1"},
            within=60,
            still_alive=dies_after_three_seconds,
            say=lambda _: None,
            probe=lambda _: False,
            clock=clock,
        )
    assert clock.time < 105
