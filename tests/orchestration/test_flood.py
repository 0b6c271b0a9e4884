"""A flood of one key hardly lengthens the others' time to first token. The figures: `tests.orchestration.flood`."""

import dataclasses

import pytest

from pdproxy.orchestration.request_queue import QueueLimits
from tests.orchestration.flood import LIKE_ENGINES, LONGER, SHORTER, Scene, measure

SHORT, LONG = (
    dataclasses.replace(scene, flood=dataclasses.replace(scene.flood, callers=30, answer=2))
    for scene in (SHORTER, LONGER)
)


@pytest.mark.parametrize("scene", [SHORT, LONG], ids=["short", "long"])
def test_others_wait_at_most_half_as_long_again(scene: Scene) -> None:
    waits = measure(scene, QueueLimits().reserve, rounds=1, seconds=15.0)
    assert waits.ratio(0.5) <= 1.5
    assert waits.ratio(0.9) <= 1.5
    assert waits.flood_answers / waits.flood_seconds > 5, "it does not starve either"


@pytest.mark.parametrize("seconds", [5.0, pytest.param(20.0, marks=pytest.mark.long)])
def test_before_a_single_node_others_wait_for_one_prompt_of_the_flood(seconds: float) -> None:
    waits = measure(LIKE_ENGINES, QueueLimits().reserve, rounds=1, seconds=seconds)
    assert waits.ratio(0.5) <= 1.4
    assert waits.ratio(0.9) <= 1.4
    assert waits.flood_answers / waits.flood_seconds > 12, "it has what the other one leaves"


def test_without_shares_others_wait_for_the_flood() -> None:
    waits = measure(SHORT, 0.0, rounds=1, seconds=5.0)
    assert waits.ratio(0.5) > 5
