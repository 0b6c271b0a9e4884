"""Whatever happens on a node with a small cache: no request holds up another one that could run, and each one ends; and
no step admits less, or preempts more, than it would without keeps.

`crowded` says what happens, and `kept_crowd` compares. Without `admission`, 136 of the first 200 seeds ended with
requests stuck.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.connector.crowded import Stuck
from tests.connector.kept_crowd import kept_crowd

MANY = 10_000


def stuck(seeds: range, folder: Path) -> Iterator[str]:
    """What is wrong with those of the seeds that end badly, and whether enough steps were compared."""
    compared = 0
    for seed in seeds:
        with kept_crowd(seed, folder) as one:
            try:
                one.play()
            except Stuck as wrong:
                yield str(wrong)
            compared += one.compared
    print(f"{compared} steps were planned with and without keeps")
    if compared < len(seeds) // 2:
        yield f"only {compared} steps were compared"


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_nobody_waits_behind_a_request_that_cannot_run_or_for_a_keep(first: int, tmp_path: Path) -> None:
    assert list(stuck(range(first, first + 50), tmp_path)) == []


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_nobody_waits_behind_a_request_that_cannot_run_or_for_a_keep_in_many_ways(tmp_path: Path) -> None:
    found = list(stuck(range(200, 200 + MANY), tmp_path))
    print(f"{len(found)} of {MANY} seeds ended with requests stuck")
    assert found == []
