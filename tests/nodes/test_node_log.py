"""Log lines about nodes: every change of a state at once and once, and that a role is not served any more."""

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.errors import Fault
from pdproxy.nodes.node import SERVING, Bars, Node, Role, State
from pdproxy.nodes.outlier import FailureEvidence, LegOrigin
from pdproxy.nodes.pool import Pool
from pdproxy.nodes.pool_entry import Slot
from pdproxy.observe.labels import Leg
from tests.fakes.clock import FakeClock
from tests.nodes.test_pool_balance import MOVES, NODES, play

P1, D1, D2 = (
    Node("p1", "http://p1", (Role.PREFILL,), "tiny"),
    Node("d1", "http://d1", (Role.DECODE,), "tiny"),
    Node("d2", "http://d2", (Role.DECODE,), "tiny"),
)


class Lines(logging.Handler):
    """Keeps the fields of each line."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.all.append({**vars(record), "message": record.getMessage()})

    def taken(self) -> list[dict[str, Any]]:
        lines, self.all = self.all, []
        return lines


LOG = logging.getLogger("pdproxy.nodes")


@pytest.fixture(scope="module")
def lines() -> Iterator[Lines]:
    handler, level = Lines(), LOG.level
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    yield handler
    LOG.removeHandler(handler)
    LOG.setLevel(level)


@pytest.fixture
def serving(lines: Lines) -> Pool:
    pool = Pool(FakeClock())
    for node in (P1, D1, D2):
        pool.add(node)
        pool.bring_up(node)
    lines.taken()
    return pool


def told(line: dict[str, Any]) -> tuple[str, str, str | None]:
    return line["levelname"], line["message"], line.get("reason")


def test_a_node_that_its_legs_find_down_is_told_of_at_once(serving: Pool, lines: Lines) -> None:
    for request in "abc":
        serving.leg_failed("d1", Leg.DECODE, Fault.RESET, LegOrigin(request), FailureEvidence.NODE)
    (line,) = lines.taken()
    assert told(line) == ("WARNING", "node d1 is down", "last fault: reset; legs failed in a row: 3")
    assert (line["node"], line["role"], line["model"], line["state"], line["was"]) == (
        "d1", "decode", "tiny", "down", "up"
    )  # fmt: skip


def test_the_last_of_a_role_is_an_error_and_its_return_is_told(serving: Pool, lines: Lines) -> None:
    clock = serving.clock
    assert isinstance(clock, FakeClock)
    for name in ("d1", "d2"):
        serving.give_up(name, "health: gone")
    clock.advance(12)
    serving.bring_up(D2)
    serving.remove("p1")
    assert [told(line)[:2] for line in lines.taken()] == [
        ("WARNING", "node d1 is down"),
        ("WARNING", "node d2 is down"),
        ("ERROR", "no decode node serves any more: requests are refused with 503"),
        ("INFO", "node d2 is up"),
        ("INFO", "decode nodes serve again"),
        ("INFO", "node p1 has left"),
        ("ERROR", "no prefill node serves any more: decode nodes compute all prompts"),
    ]


def test_a_role_that_never_was_served_is_not_lost(lines: Lines) -> None:
    pool = Pool(FakeClock())
    pool.add(D1)
    pool.refuse("d1", "block_size: 16 here, 32 on p1")
    pool.refuse("d1", "block_size: 16 here, 32 on p1")
    pool.refuse("d1", "dtype: float16 here, bfloat16 on p1")
    pool.remove("d1")
    assert [told(line) for line in lines.taken()] == [
        ("INFO", "node d1 is new", None),
        ("ERROR", "node d1 is refused", "block_size: 16 here, 32 on p1"),
        ("ERROR", "node d1 is refused", "dtype: float16 here, bfloat16 on p1"),
        ("INFO", "node d1 has left", None),
    ]


def test_another_model_on_the_last_node_is_a_loss_too(lines: Lines) -> None:
    pool = Pool(FakeClock())
    pool.add(D1)
    pool.bring_up(D1)
    pool.bring_up(Node("d1", "http://d1", (Role.DECODE,), "other"))
    assert [(line["levelname"], line["model"]) for line in lines.taken()][-1:] == [("ERROR", "tiny")]


def test_bars_are_told_of_and_those_of_a_node_that_left_are_not_lifted(serving: Pool, lines: Lines) -> None:
    serving.bar(Bars({("p1", "d1"): "far apart"}, {"d2": "also with p1"}))
    serving.bar(Bars({("p1", "d1"): "far apart"}, {}))
    serving.remove("d1")
    assert [told(line)[:2] for line in lines.taken()] == [
        ("ERROR", "node d2 exchanges no tickets with any node: it failed where others pass: also with p1"),
        ("ERROR", "prefill node p1 and decode node d1 exchange no tickets: far apart"),
        ("INFO", "node d2 exchanges tickets again"),
        ("INFO", "node d1 has left"),
    ]


def test_another_reason_of_a_bar_is_told_once(serving: Pool, lines: Lines) -> None:
    """The pair is barred while it is tested; the result says what to change."""
    for why in ("under way", "no bytes come", "no bytes come"):
        serving.bar(Bars({("p1", "d1"): why}, {"d2": why}))
    assert [told(line)[:2] for line in lines.taken()] == [
        ("ERROR", f"{who}: {why}")
        for why in ("under way", "no bytes come")
        for who in (
            "node d2 exchanges no tickets with any node: it failed where others pass",
            "prefill node p1 and decode node d1 exchange no tickets",
        )
    ]


@given(moves=st.lists(MOVES, max_size=60))
def test_each_change_is_one_line(lines: Lines, moves: list[tuple[str, str]]) -> None:
    clock, legs = FakeClock(), list[Slot]()
    pool = Pool(clock)
    lines.taken()
    states: dict[str, State] = {}
    served = False
    for move, name in [("new", "a"), ("new", "b"), *moves]:
        if move == "new":
            pool.add(NODES[name])
        else:
            play(pool, clock, legs, move, name)
        now = {view.node.name: view.state for view in pool.state().nodes}
        changed = Counter(name for name in now if name in states and now[name] is not states[name])
        new = lines.taken()
        moved = Counter(line["node"] for line in new if "was" in line)
        if move in ("new", "renew"):
            assert "is new" in " ".join(line["message"] for line in new)
        else:
            assert moved == changed
        for line in (line for line in new if "was" in line):
            assert line["state"] == now[line["node"]].value
        losses = [line for line in new if line["levelname"] == "ERROR"]
        before, served = served, any(state in SERVING for state in now.values())
        assert len(losses) == (1 if before and not served else 0)
        states = now
    for leg in legs:
        leg.release()
