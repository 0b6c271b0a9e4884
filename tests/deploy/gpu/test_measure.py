"""Figures out of streams and counters."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from deploy.gpu import summary
from deploy.gpu.measure import Cell, cells, checked, hand_overs, summed
from deploy.gpu.metrics import parse
from deploy.gpu.options import RunError, on_cpu
from deploy.gpu.results import Step, StepResult
from deploy.gpu.streams import Stream

CELL = Cell((300,), 2)


def stream(first: float, gaps: list[float], failure: str = "") -> Stream:
    at = [10 + first]
    for gap in gaps:
        at.append(at[-1] + gap)
    return Stream("?", "text", failure, 10.0, at, output_tokens=len(at), prompt_tokens=298)


def test_figures_are_of_all_streams_together() -> None:
    streams = [stream(0.1, [0.01] * 9), stream(0.3, [0.01] * 8 + [0.5]), stream(9.0, [9.0], failure="500: broken")]
    figures = summed("P/D", CELL, streams, seconds=2.0)
    assert (figures.requests, figures.failed, figures.prompt_tokens) == (2, 1, 298)
    assert (figures.first_p50, figures.first_p90) == (100, 300)
    assert (figures.gap_p50, figures.gap_p99) == (10, 500)
    assert (figures.output_rate, figures.request_rate) == (10, 1)


def test_a_load_of_which_most_failed_gives_no_figures() -> None:
    with pytest.raises(RunError, match="0 of 2 came: 503: no decode node"):
        summed("P/D", CELL, [stream(1, [], "503: no decode node")] * 2, 1.0)


def test_a_stream_reads_its_pieces_and_its_usage() -> None:
    one = Stream("?", asked=1.0)
    for line in ('data: {"choices": [{"text": "a"}], "usage": null}', "", 'data: {"choices": [{"text": "b"}]}'):
        one.heard(line)
    one.heard('data: {"choices": [], "usage": {"completion_tokens": 2, "prompt_tokens": 5}}')
    assert (one.text, len(one.at), one.output_tokens, one.prompt_tokens) == ("ab", 2, 2, 5)
    assert one.longest_stall >= one.first > 0


def test_each_length_meets_each_concurrency_and_the_mixed_load_comes_last(tmp_path: Path) -> None:
    options = replace(on_cpu(tmp_path), lengths=(100, 900), concurrencies=(1, 4))
    assert [(cell.name, cell.concurrency) for cell in cells(options)] == [
        ("100", 1), ("100", 4), ("900", 1), ("900", 4), ("100 and 900", 4),
    ]  # fmt: skip
    assert len(list(cells(replace(options, lengths=(100,), concurrencies=(1,))))) == 1


def exposition(values: Mapping[str, float]) -> str:
    return "".join(f"{name} {value}\n" for name, value in values.items())


def test_hand_overs_are_what_counters_gained() -> None:
    names = ('pdproxy_connector_reads_total{outcome="verified"}', 'pdproxy_connector_reads_total{outcome="not_held"}',
             'pdproxy_connector_bytes_total{group="attention",kind="pulled"}',
             'pdproxy_connector_bytes_total{group="state",kind="pulled"}',
             "vllm:nixl_xfer_time_seconds_sum", "vllm:nixl_xfer_time_seconds_count")  # fmt: skip
    before = {"decode-0": parse(exposition(dict(zip(names, (1, 1, 1e6, 1e6, 1.0, 1), strict=True))))}
    after = {"decode-0": parse(exposition(dict(zip(names, (5, 2, 9e6, 5e6, 1.004, 5), strict=True))))}
    found = hand_overs(CELL, before, after)
    assert (found.verified, found.other_ends) == (4, 1)
    assert (found.attention_megabytes, found.state_megabytes) == (2, 1)
    assert found.rate == pytest.approx(3.0)
    assert found.milliseconds["NIXL transfer"] == pytest.approx(1.0)


def test_figures_without_hand_overs_do_not_pass() -> None:
    figures = asdict(summed("P/D", CELL, [stream(0.1, [0.01])], 1.0))
    handed = {"verified": 4.0, "other_ends": 0.0}
    assert all(check.holds for check in checked({"figures": [figures], "hand_overs": [handed]}))
    for change in ({"verified": 0.0}, {"other_ends": 1.0}):
        assert not all(check.holds for check in checked({"figures": [figures], "hand_overs": [handed | change]}))
    assert not all(check.holds for check in checked({"figures": [figures | {"failed": 1}], "hand_overs": [handed]}))


def test_the_summary_puts_both_systems_side_by_side(tmp_path: Path) -> None:
    def result(step: Step, system: str, first: float) -> StepResult:
        return StepResult(step, [], figures={"figures": [asdict(summed(system, CELL, [stream(first, [0.01])], 1.0))]})

    results = {
        step: result(step, *told) for step, told in {Step.ALONE: ("alone", 0.2), Step.MEASURE: ("P/D", 0.1)}.items()
    }
    page = summary.write(on_cpu(tmp_path), {"vllm": "0.33.0"}, results)
    assert "| 300 (298) | 2 | alone | 1 | 0 | 200.0 |" in page
    assert "| 300 | 2 | 0.50 | 0.50 | 0.50 | 1.00 |" in page
    assert "| vllm | 0.33.0 |" in page
    assert "Not run: preflight, start, answers, attacks, kills." in page


def test_a_table_is_not_broken_by_what_it_holds() -> None:
    assert summary.table(("a",), [("x | y\nz",)]).splitlines()[-1] == "| x \\| y z |"
