"""Real engines as nodes of other roles: what they are asked, and the ratios that come of it."""

import httpx
import pytest

from deploy.bench.engines.loads import question
from deploy.bench.engines.roles import EQUAL, FLEETS, LONG, PHASES, SHORT, Served, arrivals, run, table
from tests.bench.engines.test_legs import served


def test_phases_take_turns_and_no_prompt_comes_twice() -> None:
    planned = list(arrivals({LONG: 20.0, SHORT: 10.0}, 5.0, 1))
    for number, shape in enumerate(PHASES):
        assert {asked.shape for at, asked in planned if number * 5.0 <= at < (number + 1) * 5.0} == {shape}
    other = list(arrivals({LONG: 20.0, SHORT: 10.0}, 5.0, 2))
    prompts = [asked.prompt for _, asked in (*planned, *other)]
    assert len(set(prompts)) == len(prompts)


async def test_answers_are_timed_and_looked_at() -> None:
    with served() as (server, connection):
        url = f"http://127.0.0.1:{server.server_port}"
        (found,) = await run(url, [(0.0, question(SHORT, 1))])
        assert found.right
        assert 0 < found.first_token < 30
        assert 0 <= found.inter_token < 30
        server.status = 503
        with pytest.raises(httpx.HTTPStatusError):
            await run(url, [(0.0, question(SHORT, 2))])
        connection.close()


def test_ratios_are_made_within_each_round() -> None:
    def of(first_token: float) -> list[Served]:
        return [Served(shape, first_token, 0.01, right=True) for shape in (LONG, SHORT)]

    found = {EQUAL: [of(1.0), of(3.0)], "1P2D": [of(2.0), of(3.0)], "2P1D": [of(1.0), of(1.0)]}
    assert set(found) == set(FLEETS)
    text = table(found)
    assert f"| {LONG.name} | first token, p50 | 0.75 (0.50 to 1.00) | 2.00 (1.00 to 3.00) |" in text
    assert f"| {SHORT.name} | inter token, p90 | 1.00 (1.00 to 1.00) | 1.00 (1.00 to 1.00) |" in text
