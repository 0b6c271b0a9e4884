"""The bench of several workers: what wrk tells, and the figures of its turns."""

from pathlib import Path

import pytest

from tests.bench.cores import Turn, Wrk, nginx_config, read_wrk, table
from tests.bench.rounds import BenchError

TOLD = """Running 6s test @ http://127.0.0.1:8080/v1/completions
  1 threads and 64 connections
  11011 requests in 6.01s, 7.54MB read
Requests/sec:   1832.11
Transfer/sec:      1.25MB
"""


def test_wrk_tells_requests_and_rate() -> None:
    assert read_wrk(TOLD) == Wrk(11011, 1832.11)


@pytest.mark.parametrize(
    "line", ["  Non-2xx or 3xx responses: 3", "  Socket errors: connect 0, read 1, write 0, timeout 0"]
)
def test_wrong_answers_are_an_error(line: str) -> None:
    with pytest.raises(BenchError, match="not all answers"):
        read_wrk(f"{TOLD}{line}\n")


def test_the_nodes_answer_quotes_too() -> None:
    assert "it\\'s" not in (written := nginx_config(Path("x"), 1, 2))
    assert written.count("server {") == 2
    assert written.count("{") == written.count("}")


def test_ratios_are_to_one_worker_with_as_many_connections() -> None:
    turns = [
        Turn(1, 64, 1000.0, 0.50, 0.06, 0.02, ()),
        Turn(1, 64, 900.0, 0.60, 0.06, 0.02, ()),
        Turn(2, 64, 1500.0, 0.55, 0.06, 0.02, (0.5, 0.5)),
        Turn(2, 64, 1400.0, 0.58, 0.06, 0.02, (0.4, 0.6)),
    ]
    rows = table(turns).splitlines()
    assert rows[2] == "| 1 | 64 | 1000 | 1.00x | 0.500 | 1.00x | 0.060 | 0.020 |  |"
    assert rows[3] == "| 2 | 64 | 1500 | 1.50x | 0.550 | 1.10x | 0.060 | 0.020 | 45 : 55 |"
