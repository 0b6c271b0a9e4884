"""Policies beside sessions that stay, at several speeds."""

from collections.abc import Callable

import pytest

from deploy.bench.generators import Agents, agents
from deploy.bench.simulate import Fleet
from deploy.bench.speeds import SPEEDS, Figures, Speed, bare, cache, means, row, sticky
from deploy.bench.traces import Trace

LONE = agents(Agents(agents=1, calls=1))
TRACES = [agents(Agents(agents=3, calls=3, system=1500), seed) for seed in (1, 2)]


@pytest.mark.parametrize("run", [sticky, cache, bare])
def test_a_prompt_alone_takes_as_long_at_every_speed(run: Callable[[Trace, Speed, Fleet], Figures]) -> None:
    as_it_is = run(LONE, Speed(), Fleet())
    assert run(LONE, Speed(2.0, 2.0), Fleet()) == pytest.approx(as_it_is)
    assert run(LONE, Speed(2.0), Fleet()) == pytest.approx(as_it_is), "it meets no other prompt"


def test_what_a_machine_adds_comes_before_the_first_token() -> None:
    late = sticky(LONE, Speed(2.0, 2.0, 0.5), Fleet()).mean - sticky(LONE, Speed(), Fleet()).mean
    assert 0.0 < late < 2 * 2 * 0.5


def test_figures_are_means_over_seeds_in_multiples_of_sessions_that_stay() -> None:
    found = means(sticky, TRACES, Speed(), Fleet())
    each = [sticky(trace, Speed(), Fleet()) for trace in TRACES]
    assert found.mean == pytest.approx((each[0].mean + each[1].mean) / 2)
    for name, speed in SPEEDS.items():
        cells = row(name, TRACES, speed, Fleet()).split(" | ")
        assert len(cells) == 4
        assert all(0.2 < float(ratio) < 5.0 for cell in cells[2:] for ratio in cell.rstrip(" |").split(", "))
