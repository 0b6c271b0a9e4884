"""How busy nodes were lately."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.planning.recent_work import MEMORY, RecentWork


def worked(shares: dict[str, float], seconds: int, begin: int = 0, work: RecentWork | None = None) -> RecentWork:
    """Each node computes a prompt every second, which takes such a share of it."""
    work = work or RecentWork()
    for second in range(begin, begin + seconds):
        for node, share in shares.items():
            work.add(node, share, second + share)
    return work


def test_a_share_is_that_of_the_time() -> None:
    work = worked({"p0": 0.5, "p1": 0.1}, 300)
    assert work.share("p0") == pytest.approx(0.5, rel=0.15)
    assert work.share("p1") == pytest.approx(0.1, rel=0.15)
    assert work.share("p2") == 0.0
    assert work.usual == pytest.approx(0.3, rel=0.3)


def test_a_young_record_is_not_taken_for_idle_nodes_nor_one_prompt_for_a_busy_one() -> None:
    assert worked({"p0": 0.5}, 10).share("p0") > 0.35
    assert worked({"p0": 0.5}, 1).share("p0") < 0.2
    assert worked({"p0": 0.5}, 1).usual < 0.05


def test_what_was_long_ago_counts_little() -> None:
    work = worked({"p0": 0.8}, 100)
    before = work.share("p0")
    worked({"p1": 0.1}, int(MEMORY), 100, work)
    assert work.share("p0") == pytest.approx(before / math.e, rel=0.1)


def test_days_go_by_and_nodes_that_left_are_forgotten() -> None:
    work = worked({"left": 0.9}, 10)
    for hour in range(1, 200):
        worked({"p0": 0.5}, 120, hour * 3600, work)
    assert set(work.busy) == {"p0"}
    assert work.share("p0") == pytest.approx(0.5, rel=0.15)
    assert max(work.busy.values()) < 1e200


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 600), st.floats(0, 1e6)), max_size=40))
def test_whatever_is_added_shares_are_finite_and_not_negative(added: list[tuple[str, float, float]]) -> None:
    """Also where one that ended earlier is told later."""
    work = RecentWork()
    for node, seconds, ended in added:
        work.add(node, seconds, ended)
    assert all(0 <= work.share(node) < math.inf for node in "abc")
    assert 0 <= work.usual < math.inf
