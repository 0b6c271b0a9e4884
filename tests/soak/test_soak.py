"""The soak, in three lengths. SOAK_SECONDS sets the short one's."""

import logging
import os

import pytest

from tests.soak.soak import Tally, soak

SHORT = float(os.environ.get("SOAK_SECONDS", "20"))


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Pytest keeps every line that is logged: the process would grow by it."""
    caplog.set_level(logging.CRITICAL, "pdproxy")


async def test_short_soak() -> None:
    tally = await soak(SHORT, seed=1)
    assert tally.ended["complete"] > 0
    assert tally.kills > 0
    assert tally.deliveries["ticket"] > 0
    assert tally.waited > 0
    print(tally.ended, tally.deliveries, tally.kills)


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_long_soak() -> None:
    tally = await soak(900, seed=2)
    print(tally)
    assert tally.ended["complete"] > 100
    assert grown(tally) < 0.25, "objects that a request leaves"


def grown(tally: Tally) -> float:
    """Objects by which the process grew, per request, from the first third to the last: the means of each."""
    third = len(tally.objects) // 3
    first, last = sum(tally.objects[:third]) / third, sum(tally.objects[-third:]) / third
    return (last - first) / (sum(tally.ended.values()) * 2 / 3)
