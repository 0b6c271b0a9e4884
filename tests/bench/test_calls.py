"""The code that one request runs through: the parts add up to the whole, and a policy that looks at less runs less."""

import re

import pytest

from deploy.bench import calls
from pdproxy.settings.types import Routing


async def printed(routing: Routing, capsys: pytest.CaptureFixture[str]) -> list[tuple[str, list[int]]]:
    await calls.table(routing, calls.file_of)
    rows = [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()[1:]]
    return [(name, [int(number) for number in numbers]) for name, *numbers in rows]


async def test_the_parts_add_up_and_a_policy_that_looks_at_less_runs_less(capsys: pytest.CaptureFixture[str]) -> None:
    rows = await printed(Routing.CACHE, capsys)
    shapes = [numbers for name, numbers in rows if name in calls.SHAPES]
    parts = [numbers for name, numbers in rows if name not in calls.SHAPES]
    assert len(shapes) == len(calls.SHAPES)
    assert sum(numbers[-1] for numbers in parts) == sum(numbers[-1] for numbers in shapes)
    assert sum(numbers[0] for numbers in parts) == sum(numbers[2] for numbers in shapes)
    loads = dict(await printed(Routing.LEAST_LOADED, capsys))
    assert all(loads[name][-1] < numbers[-1] for name, numbers in rows if name in calls.SHAPES)
