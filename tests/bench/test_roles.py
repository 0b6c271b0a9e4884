"""Nodes of both roles beside fixed splits: the figures, the tables, and what the plan makes of them."""

from pathlib import Path

import pytest

from deploy.bench.engines.paces import fitted
from deploy.bench.outcome import Stream
from deploy.bench.roles import (
    EQUAL,
    MACHINES,
    TABLES_BEGIN,
    TRACES,
    Bounds,
    Row,
    flipped,
    main,
    rows,
    strict_table,
    table,
)

BOUNDS = Bounds(1.0, 0.05)


def stream(first_token: float, inter_token: float, longest: float = 0.0) -> Stream:
    return Stream(0.0, first_token, 100 * inter_token, 100, longest)


def test_a_request_is_served_well_within_both_bounds() -> None:
    assert BOUNDS.met(stream(1.0, 0.05))
    assert not BOUNDS.met(stream(1.1, 0.01))
    assert not BOUNDS.met(stream(0.1, 0.06))
    assert Stream(0.0, 0.5, 0.0, 0, 0.0).inter_token == 0.0


def test_a_table_compares_with_the_best_split_and_says_what_is_missed() -> None:
    good, bad = stream(0.1, 0.01), stream(2.0, 0.01)
    found = [
        Row("day", {EQUAL: [good, bad], "1P2D": [bad, bad], "2P1D": [good, good]}),
        Row("night", {EQUAL: [good], "1P2D": [good], "2P1D": [bad]}),
    ]
    text = table(found, BOUNDS)
    assert "| day | 50.0% | 0.0% | 100.0% | 0.50 (missed) |" in text
    assert "| night | 100.0% | 100.0% | 0.0% | 1.00 |" in text


def test_a_bound_for_the_longest_time_without_a_token_is_told_apart() -> None:
    machine = MACHINES["assumed"]
    found = [Row("day", {EQUAL: [stream(0.1, 0.02, 0.4)], "1P2D": [stream(0.1, 0.035)]})]
    text = strict_table(found, machine)
    assert "| day | 30 ms, mean | 100.0% | 0.0% (1P2D) |" in text
    assert "| day | 100 ms, longest | 0.0% | 100.0% (1P2D) |" in text


def test_a_controller_that_flips_roles_has_the_best_split_of_each_kind() -> None:
    good, bad = stream(0.1, 0.01), stream(2.0, 0.01)
    long, short, turns = TRACES[:3]
    found = [
        Row(long, {EQUAL: [bad], "1P2D": [bad], "2P1D": [good]}),
        Row(short, {EQUAL: [good] * 3, "1P2D": [good, good, bad], "2P1D": [bad] * 3}),
        Row(turns, {EQUAL: [good, good, good, bad], "1P2D": [bad] * 4, "2P1D": [bad] * 4}),
    ]
    assert flipped(found, BOUNDS).endswith("first second on: 75.0%; both roles: 75.0%.")


def test_every_split_is_looked_at_and_of_many_nodes_some() -> None:
    machine = MACHINES["measured"]
    assert [name for name, _ in machine.fleets(3)] == [EQUAL, "1P2D", "2P1D"]
    assert [name for name, _ in machine.fleets(64)][1:] == [f"{p}P{64 - p}D" for p in range(8, 64, 8)]
    assert {sum((f.prefills, f.decodes, f.boths)) for n in (3, 8, 64) for _, f in machine.fleets(n)} == {3, 8, 64}


@pytest.mark.parametrize("name", MACHINES)
def test_equal_nodes_serve_a_load_that_turns_better_than_every_split_of_three(name: str) -> None:
    machine = MACHINES[name]
    (row,) = rows(machine, 3, [1], ["the two by turns"])
    found = row.shares(machine.bounds)
    assert found.pop(EQUAL) > 1.5 * max(found.values())


@pytest.mark.parametrize("name", MACHINES)
def test_equal_nodes_serve_chats_and_agents_about_as_well_as_the_best_split_of_three(name: str) -> None:
    machine = MACHINES[name]
    for row in rows(machine, 3, [1], ["agents", "chat"]):
        shares = row.shares(machine.bounds)
        assert shares.pop(EQUAL) > 0.9 * max(shares.values()), row.trace


def test_the_page_keeps_what_stands_before_the_figures(tmp_path: Path) -> None:
    page = tmp_path / "roles-figures.md"
    page.write_text(f"# Title\n\nText.\n\n{TABLES_BEGIN}\n\nolder\n", encoding="utf-8")
    assert (
        main(["--nodes", "2", "--machines", "measured", "--seeds", "1", "--traces", "agents", "--write", str(page)])
        == 0
    )
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# Title\n\nText.\n\n{TABLES_BEGIN}\n\n### ")
    assert "older" not in text
    assert "2 nodes:" in text


def test_a_line_goes_through_the_least_of_each_size() -> None:
    line = fitted([(100, 0.3), (100, 0.2), (300, 0.4), (300, 0.9)])
    assert line == pytest.approx((0.1, 0.001))
    assert fitted([(1, 0.3), (2, 0.2)]).each == 0.0
