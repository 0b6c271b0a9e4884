"""Reading what `perf stat` prints."""

import pytest

from deploy.bench.perf import counted


@pytest.mark.parametrize(
    ("output", "count"),
    [
        ("123456,,instructions:u,5000,100.00,,\n", 123456.0),
        ("<not supported>,,instructions:u,0,100.00,,\n", None),
        ("<not counted>,,instructions:u,0,100.00,,\n", None),
        ("Error:\nNo permission to enable instructions:u event.\n", None),
        ("0.54,msec,task-clock,540332,100.00,0.189,CPUs utilized\n", None),
        ("", None),
    ],
)
def test_a_count_is_found_where_there_is_one(output: str, count: float | None) -> None:
    assert counted(output) == count
