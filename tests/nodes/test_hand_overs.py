"""Pairs whose tickets are of no use are barred, tested again, and tried."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.nodes.hand_overs import LAST, LAST_ON_TRIAL, RECENT, HandOverResults, Used
from pdproxy.nodes.outlier import LATELY, LegOrigin

PAIR, OTHER = ("p0", "d0"), ("p0", "d1")
NOW = 1000.0


class Seen:
    """The ends of tickets, each of another prompt."""

    def __init__(self) -> None:
        self.hand_overs, self.requests = HandOverResults(), 0

    def in_vain(self, times: int = 1, client: str = "", now: float = NOW, prompt: str | None = None) -> None:
        for _ in range(times):
            self.requests += 1
            source, name = (
                LegOrigin(f"r-{self.requests}", client),
                f"prompt {self.requests}" if prompt is None else prompt,
            )
            self.hand_overs.ticket_in_vain(PAIR, source, name, now)

    def used(self, times: int = 1, client: str = "", now: float = NOW, pair: tuple[str, str] = PAIR) -> None:
        for _ in range(times):
            self.hand_overs.ticket_used(pair, client, now)

    def barred(self) -> bool:
        return PAIR in self.hand_overs.bars()


@pytest.fixture
def seen() -> Seen:
    return Seen()


def test_nine_in_ten_of_the_last_fifty_bar_a_pair(seen: Seen) -> None:
    seen.used(6)
    seen.in_vain(LAST - 6)
    assert not seen.barred()
    seen.in_vain()
    assert seen.barred()
    assert seen.hand_overs.changed
    assert seen.hand_overs.bars()[PAIR].startswith(
        "d0 computed the prompts of 45 of the last 50 tickets of p0 itself; the log of d0, and its pdproxy_connector_"
    )


@given(st.lists(st.booleans(), min_size=1, max_size=400))
def test_a_pair_of_which_one_ticket_in_five_is_of_use_is_never_barred(useful: list[bool]) -> None:
    seen = Seen()
    for number, each in enumerate(useful):
        if each or number % 5 == 0:
            seen.used()
        else:
            seen.in_vain()
        assert not seen.barred()


def test_a_prompt_counts_once_and_without_its_digest_a_session_does(seen: Seen) -> None:
    seen.in_vain(500, prompt="one")
    for number in range(500):
        seen.hand_overs.ticket_in_vain(PAIR, LegOrigin(f"s-{number}", session=7), "", NOW)
    assert not seen.barred()
    seen.in_vain(LAST - 2)
    assert seen.barred()


def test_one_client_alone_bars_no_pair_while_another_s_tickets_are_of_use(seen: Seen) -> None:
    seen.used(1, "other", pair=OTHER)
    seen.in_vain(500, "hostile")
    assert not seen.barred()
    seen.in_vain(1, "hostile", now=NOW + LATELY + 1)
    assert seen.barred(), "nobody else was served lately"
    for_two = Seen()
    for_two.used(1, "third", pair=OTHER)
    dice = random.Random(1)
    for _ in range(4 * LAST):
        for_two.in_vain(1, dice.choice(["a", "b"]))
    assert for_two.barred()


def test_it_is_tested_again_with_growing_waits_and_then_on_trial(seen: Seen) -> None:
    hand_overs, now, waits = seen.hand_overs, NOW, list[float]()
    seen.in_vain(LAST)
    hand_overs.not_passed(PAIR, now)
    for _ in range(3):
        waits.append(next(wait for wait in range(5, 2000, 5) if hand_overs.due(now + wait)))
        now += waits[-1]
        hand_overs.not_passed(PAIR, now)
        assert seen.barred()
    hand_overs.passed(PAIR)
    assert not seen.barred()
    assert hand_overs.due(now + 10_000) == []
    seen.in_vain(LAST_ON_TRIAL - 1, now=now)
    assert not seen.barred()
    seen.in_vain(now=now)
    assert seen.barred()
    hand_overs.not_handed_over(PAIR, "d0 cannot reach p0", now)
    assert hand_overs.bars()[PAIR] == "d0 cannot reach p0"
    waits.append(next(wait for wait in range(5, 2000, 5) if hand_overs.due(now + wait)))
    assert waits == [30, 60, 120, 480]


def test_a_trial_that_goes_well_is_as_if_it_had_never_been_barred(seen: Seen) -> None:
    seen.in_vain(LAST)
    assert seen.hand_overs.due(NOW) == [PAIR], "why?"
    seen.hand_overs.passed(PAIR)
    assert seen.barred(), "that did not show why"
    seen.hand_overs.passed(PAIR)
    seen.used(LAST)
    seen.in_vain(LAST - 6)
    assert not seen.barred()
    seen.in_vain(LAST)
    assert seen.barred()
    assert seen.hand_overs.due(NOW + 30) == [PAIR]


def test_what_became_of_the_tickets_of_five_minutes_is_counted(seen: Seen) -> None:
    seen.used(2, now=NOW)
    seen.in_vain(2, now=NOW + 60)
    seen.used(4, now=NOW + 120, pair=OTHER)
    assert seen.hand_overs.recent(NOW + 120) == Used(8, 2)
    assert seen.hand_overs.recent(NOW + 120).share == 0.25
    assert seen.hand_overs.recent(NOW + 300) == Used(6, 2)
    assert seen.hand_overs.recent(NOW + 420) == Used()
    for minute in range(100):
        seen.used(now=NOW + 60 * minute)
    assert len(seen.hand_overs._of(PAIR).minutes) <= RECENT + 1


def test_a_node_that_comes_back_or_leaves_is_forgotten(seen: Seen) -> None:
    seen.in_vain(LAST)
    seen.hand_overs.keep_only(frozenset({"p0", "d0"}))
    assert seen.barred()
    seen.hand_overs.node_joins("d0")
    assert not seen.barred()
    seen.in_vain(LAST)
    seen.hand_overs.keep_only(frozenset({"p0"}))
    assert not seen.barred()
