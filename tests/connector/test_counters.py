"""Counts are drained once, from any thread, and never decrease."""

from __future__ import annotations

import threading
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from connector.counters import MAX_OBSERVATIONS, Counters


def test_what_was_added_is_drained_once() -> None:
    counters = Counters()
    counters.prompt_tokens(hit=512, pulled=26, computed=1)
    counters.blocks("attention", hit=2, pulled=1)
    counters.read("verified")
    counters.read("verified")
    counters.verify_seconds(0.25)
    snapshot = counters.drain()
    assert {(name, *labels): value for name, labels, value in snapshot.counts} == {
        ("prompt_tokens", "hit"): 512,
        ("prompt_tokens", "pulled"): 26,
        ("prompt_tokens", "computed"): 1,
        ("blocks", "attention", "hit"): 2,
        ("blocks", "attention", "pulled"): 1,
        ("reads", "verified"): 2,
    }
    assert snapshot.seconds == [("verify_seconds", 0.25)]
    again = counters.drain()
    assert (again.counts, again.seconds) == ([], [])


@given(st.lists(st.integers(-1_000, 1_000)))
def test_no_increment_is_ever_negative_and_the_good_ones_add_up(values: list[int]) -> None:
    counters = Counters()
    for value in values:
        counters.bytes("state", pulled=value)
    total = sum(value for value in values if value > 0)
    assert [value for _, _, value in counters.drain().counts] == ([total] if total else [])


def test_threads_lose_nothing() -> None:
    counters = Counters()
    seen: Counter[str] = Counter()

    def add() -> None:
        for _ in range(500):
            counters.junk("notice")

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        seen.update({name: value for name, _, value in counters.drain().counts})
    for thread in threads:
        thread.join()
    seen.update({name: value for name, _, value in counters.drain().counts})
    assert seen["junk"] == 2_000


def test_a_stalled_reader_costs_bounded_memory() -> None:
    counters = Counters()
    for _ in range(MAX_OBSERVATIONS + 5):
        counters.lease_ended("read", 1.0)
    assert len(counters.drain().seconds) == MAX_OBSERVATIONS
