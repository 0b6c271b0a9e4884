"""From answers to figures, tables, plots and the page."""

import math
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from deploy.bench.engines.figures import (
    Estimate,
    Metric,
    Round,
    estimate,
    figures,
    median_estimate,
    percentile,
)
from deploy.bench.engines.guidellm import Answer
from deploy.bench.engines.legs import DIRECT
from deploy.bench.engines.loads import LONG, MIXED, ONE, SHORT, USUAL
from deploy.bench.engines.report import BEGIN, END, PAGE, ahead, behind, losses, plots, text, write
from deploy.bench.engines.results import Results
from deploy.bench.engines.targets import AGGREGATED, PDPROXY, ROUTER

SLOWER = {AGGREGATED: 1.0, ROUTER: 1.2, PDPROXY: 1.5}


def made(rounds: int = 3, slower: Callable[[str, int], float] = lambda target, _: SLOWER[target]) -> Results:
    """Answers whose times are those of one engine, times ``slower``."""
    results = Results({"cores": "2 of a kind"})
    for number in range(rounds):
        for load in (ONE, MIXED):
            for target in SLOWER:
                times, reads = slower(target, number), 0.0 if target == AGGREGATED else 4.0
                answers = [
                    Answer(shape, True, 10.0 * at, 10.0 * at + 2, 50.0 * times + at, 5.0 * times, shape.answer)
                    for at in range(4)
                    for shape in load.shapes
                ]
                results.rounds.append(Round(load.name, target, number, answers, reads, 4))
    results.firsts = {DIRECT: [40.0, 41.0, 42.0], ROUTER: [41.0, 42.0, 43.0], PDPROXY: [42.0, 43.0, 50.0]}
    return results


def test_percentiles_are_interpolated() -> None:
    assert [percentile([3.0, 1.0, 2.0], share) for share in (0, 0.5, 0.75, 1)] == [1.0, 2.0, 2.5, 3.0]
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_an_interval_is_students() -> None:
    found = estimate([1.0, 2.0, 3.0])
    assert found.value == 2.0
    assert found.spread == pytest.approx(4.303 / math.sqrt(3))
    assert math.isnan(estimate([1.0]).spread)
    assert estimate([1.0] * 40) == (1.0, 0.0)


def test_the_median_of_differences_is_not_moved_by_one_of_them() -> None:
    quiet = median_estimate([float(each) for each in range(101)])
    assert quiet.value == 50.0
    assert quiet.spread == pytest.approx(9.8, abs=0.1)
    assert median_estimate([*map(float, range(100)), 1e9]) == quiet


def test_a_figure_says_as_many_digits_as_it_has() -> None:
    assert str(Estimate(1.2345, 0.0567)) == "1.23 ± 0.06"
    assert str(Estimate(53.19, 2.04)) == "53.2 ± 2.0"
    assert str(Estimate(1037.2, 51.3)) == "1037 ± 51"
    assert str(Estimate(0.0, math.nan)) == "0.00"
    assert str(Estimate(0.123, 0.456)) == "0.12 ± 0.46"


def test_the_figures_of_a_run() -> None:
    answers = [Answer(USUAL, True, float(at), at + 2.0, 10.0 * (at + 1), 5.0, 64) for at in range(3)]
    found = {metric.name: value for metric, value in figures(answers).items()}
    assert found["first token, p50"] == 20.0
    assert found["first token, p99"] == pytest.approx(29.8)
    assert found["between tokens, p90"] == 5.0
    assert found["throughput"] == 3 * 64 / 4


def test_tables_have_one_engines_times_and_ratios_to_it() -> None:
    told = text(made())
    assert "**One request at a time** (800 tokens in, 64 out)" in told
    assert f"**Mixed: five a second: {SHORT.name}** (300 tokens in, 96 out)" in told
    assert f"**Mixed: five a second: {LONG.name}** (2100 tokens in, 16 out)" in told
    assert f"| | {AGGREGATED} | vllm-router ÷ one engine | pdproxy ÷ one engine | pdproxy ÷ vllm-router |" in told
    assert "| between tokens, p50 | 5.00 ± 0.00 ms | 1.20 ± 0.00 | 1.50 ± 0.00 | 1.25 ± 0.00 |" in told
    assert "verified: vllm-router 100.0%, pdproxy 100.0%" in told
    assert "| pdproxy | 43.0 ms | 2.00 ± " in told
    assert f"| {DIRECT} | 41.0 ms |  |" in told


def test_ratios_are_made_round_by_round() -> None:
    told = text(made(slower=lambda target, number: SLOWER[target] * (1 + number)))
    assert "| between tokens, p50 | 10.0 ± 12.4 ms | 1.20 ± 0.00 | 1.50 ± 0.00 | 1.25 ± 0.00 |" in told


def test_what_is_worse_is_said() -> None:
    told = text(made())
    assert "- One request at a time, between tokens, p50: 1.25 ± 0.00 times vllm-router\n" in told
    assert "- One request at a time, between tokens, p50: 1.50 ± 0.00 times one engine\n" in told
    assert "in 36 of 42 ratios to the other two with all of the interval; 6 have 1 within the interval" in told
    assert losses(made(slower=lambda target, _: 1 / SLOWER[target])) == []
    assert "in 0 of 42 ratios" in text(made(slower=lambda target, _: 1 / SLOWER[target]))


def test_without_intervals_nothing_is_decided() -> None:
    assert "in 0 of 42 ratios to the other two with all of the interval; 42 have" in text(made(rounds=1))


def test_only_an_interval_that_leaves_1_out_is_a_loss() -> None:
    less, more = Metric("first token, p50", "ms"), Metric("throughput", "tokens/s", more_is_better=True)
    assert [behind(less, each) for each in (Estimate(1.1, 0.2), Estimate(1.3, 0.2), Estimate(0.7, 0.2))] == [0, 1, 0]
    assert [ahead(less, each) for each in (Estimate(0.9, 0.2), Estimate(1.3, 0.2), Estimate(0.7, 0.2))] == [0, 0, 1]
    assert [behind(more, each) for each in (Estimate(0.9, 0.2), Estimate(1.3, 0.2), Estimate(0.7, 0.2))] == [0, 0, 1]
    assert not behind(less, Estimate(9.0, math.nan))


def test_wrong_answers_are_told_unless_one_engine_gives_them_too() -> None:
    results = made()
    assert results.wrong() == []
    spoiled = [
        each._replace(answers=[answer._replace(right=False) for answer in each.answers])
        if each.target == PDPROXY
        else each
        for each in results.rounds
    ]
    assert Results({}, spoiled).wrong() == ["pdproxy: 0.0% of the answers were right"]
    all_wrong = [
        each._replace(answers=[answer._replace(right=False) for answer in each.answers]) for each in results.rounds
    ]
    assert Results({}, all_wrong).wrong() == []


def test_what_was_found_is_kept_whole(tmp_path: Path) -> None:
    results = made()
    results.save(tmp_path / "kept" / "results.json")
    assert Results.load(tmp_path / "kept" / "results.json") == results


def test_the_page_gets_figures_and_plots_in_the_place_of_earlier_ones(tmp_path: Path) -> None:
    page, results = tmp_path / PAGE, made()
    page.parent.mkdir()
    page.write_text(f"before\n\n{BEGIN}\nolder\n{END}\n\nafter\n", encoding="utf-8")
    for _ in range(2):
        write(results, tmp_path)
        written = page.read_text(encoding="utf-8")
        assert written.startswith(f"before\n\n{BEGIN}\n\n")
        assert written.endswith(f"\n\n{END}\n\nafter\n")
        assert text(results) in written
        assert "older" not in written
    for name in plots(results):
        assert f"(../{name})" in written
        assert (tmp_path / name).exists()
    page.write_text("no place", encoding="utf-8")
    with pytest.raises(ValueError, match="no place for figures"):
        write(results, tmp_path)


def test_plots_show_every_target_with_its_interval() -> None:
    drawn = plots(made(slower=lambda target, number: SLOWER[target] * (1 + number)))
    assert list(drawn) == [
        "bench-engines-first-token.svg",
        "bench-engines-between-tokens.svg",
        "bench-engines-throughput.svg",
    ]
    picture = ET.fromstring(drawn["bench-engines-between-tokens.svg"])
    space = "{http://www.w3.org/2000/svg}"
    assert len(picture.findall(f"{space}rect")) == 1 + 3 * 3 * 3
    assert len(picture.findall(f"{space}line")) == 3 * 3 * 3
    bar, line = picture.findall(f"{space}rect")[1], picture.findall(f"{space}line")[0]
    end = float(bar.attrib["x"]) + float(bar.attrib["width"])
    assert float(line.attrib["x1"]) < end < float(line.attrib["x2"])
