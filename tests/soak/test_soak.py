"""The soak, in three lengths. SOAK_SECONDS sets the short one's."""

import os

import pytest

from tests.soak.soak import soak

SHORT = float(os.environ.get("SOAK_SECONDS", "20"))


async def test_short_soak() -> None:
    tally = await soak(SHORT, seed=1)
    assert tally.ended["complete"] > 0
    assert tally.kills > 0


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_long_soak() -> None:
    tally = await soak(900, seed=2)
    print(tally)
    assert tally.ended["complete"] > 100
    half = tally.resident[len(tally.resident) // 2]
    assert tally.resident[-1] - half < 32, "MiB: a request that left some hundred bytes would show"
