"""A flood of one key hardly lengthens the others' time to first token. The figures: `tests.orchestration.flood`."""

import dataclasses

import pytest

from pdproxy.orchestration.request_queue import QueueLimits
from tests.orchestration.flood import FLOODS, Load, measure

SHORTER, LONGER = (dataclasses.replace(flood, callers=30, answer=2) for flood in FLOODS.values())


@pytest.mark.parametrize("flood", [SHORTER, LONGER], ids=["short", "long"])
def test_others_wait_at_most_half_as_long_again(flood: Load) -> None:
    waits = measure(flood, QueueLimits().reserve, rounds=1, seconds=15.0)
    assert waits.ratio(0.5) <= 1.5
    assert waits.ratio(0.9) <= 1.5
    assert waits.flood_answers / waits.flood_seconds > 5, "it does not starve either"


def test_without_shares_others_wait_for_the_flood() -> None:
    waits = measure(SHORTER, 0.0, rounds=1, seconds=5.0)
    assert waits.ratio(0.5) > 5
