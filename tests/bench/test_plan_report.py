"""The report's figures, tables and plots."""

import math
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from deploy.bench.outcome import Outcome
from deploy.bench.plan import Store, main
from deploy.bench.plan_report import (
    FIGURES,
    GUIDE,
    RATIOS_BEGIN,
    RATIOS_END,
    TABLES_BEGIN,
    TIMES,
    Row,
    against_others,
    make_report,
    write_tables,
)
from deploy.bench.svg import Bar, bars
from pdproxy.nodes.node import DECODE, PREFILL

ROLES = {"p0": PREFILL, "p1": PREFILL, "d0": DECODE}


def outcome(name: str = "hybrid", p0: int = 300) -> Outcome:
    made = Outcome(name, ROLES, computed=Counter({"p0": p0, "p1": 100, "d0": 50}), moved=1234)
    for hundredth in range(1, 101):
        made.add_first_token(10, hundredth / 100)
    return made


def test_the_figures_of_a_run() -> None:
    made = outcome()
    assert (made.share, made.local, made.spread) == (0.45, 0.05, 1.5)
    assert (made.percentile(0.5), made.percentile(0.9), made.percentile(0.99)) == (0.5, 0.9, 0.99)
    assert made.mean == pytest.approx(0.505)
    assert math.isnan(made.kept_promise)
    assert math.isnan(Outcome("x", ROLES).spread)


def test_outcomes_are_kept_and_reported(tmp_path: Path) -> None:
    store, made = Store(tmp_path / "kept"), outcome()
    made.planned, made.resumed = 400, 300
    store.keep("simulated", "chat", outcome(p0=500))
    store.keep("simulated", "chat", made)
    store.keep("http", "chat", outcome("pdproxy"))
    rows = list(store.rows())
    assert [row for row in rows if row.way == "simulated"] == [Row("simulated", "chat", made)]
    text = make_report(rows, {("simulated", "chat"): (0.25, 0.3), ("http", "chat"): (0.25, 0.3)})
    assert "chat: at least 25.0% must be computed" in text
    assert "| hybrid | 45.0% | 5.0% | 0.505 | 0.500 | 0.900 | 0.990 | 1,234 | 1.50 | 75.0% |" in text


def pages(docs: Path, tables: str = "", ratios: str = "") -> tuple[Path, Path]:
    """A folder of documentation with the two pages."""
    guide, figures = docs / GUIDE, docs / FIGURES
    figures.parent.mkdir()
    guide.write_text(f"# Guide\n\n{RATIOS_BEGIN}\n{ratios}\n{RATIOS_END}\n\nMore.\n", encoding="utf-8")
    figures.write_text(f"# Title\n\nText.\n\n{TABLES_BEGIN}\n\n{tables}\n", encoding="utf-8")
    return guide, figures


def test_tables_are_written_in_the_place_of_earlier_ones(tmp_path: Path) -> None:
    guide, figures = pages(tmp_path, "chat: at least one")
    before = guide.read_text(encoding="utf-8")
    report = make_report([Row("simulated", "chat", outcome())], {("simulated", "chat"): (0.25, 0.3)})
    for _ in range(2):
        write_tables(tmp_path, report)
        assert figures.read_text(encoding="utf-8") == f"# Title\n\nText.\n\n{report.strip()}\n"
    assert guide.read_text(encoding="utf-8") == before
    assert not list(tmp_path.glob("*.svg"))
    figures.write_text("# Title\n", encoding="utf-8")
    with pytest.raises(ValueError, match="no line"):
        write_tables(tmp_path, report)


def test_tables_of_other_traces_and_ways_stay(tmp_path: Path) -> None:
    over_http = "## Over HTTP, on loopback\n\nchat: at least 3% must be computed\n\n| c |"
    older = f"agents: at least 1 %\n\n| a |\n\nchat: at least 2 %\n\n| b |\n\n{over_http}"
    _, figures = pages(tmp_path, older)
    write_tables(tmp_path, make_report([Row("simulated", "chat", outcome())], {("simulated", "chat"): (0.25, 0.3)}))
    text = figures.read_text(encoding="utf-8")
    for kept in (
        "agents: at least 1 %\n\n| a |\n\nchat: at least 25.0%",
        "\n\n## Over HTTP, on loopback\n\nchat: at least 3% must be computed\n\n| c |\n",
    ):
        assert kept in text
    assert "| b |" not in text


def test_this_proxy_is_compared_with_the_best_other_in_each_column(tmp_path: Path) -> None:
    bounds = {("http", "chat"): (0.2, 0.3), ("http", "agents"): (0.2, 0.3)}
    slower, other = outcome("smg", p0=250), outcome("vllm-router", p0=350)
    slower.first_tokens = [4 * each for each in slower.first_tokens]
    ours = [outcome("pdproxy cache"), outcome("pdproxy session"), outcome("pdproxy cache without sessions", p0=50)]
    rows = [Row("http", "chat", each) for each in (slower, other, *ours)]
    ratios = against_others([*rows, Row("http", "agents", ours[0])], bounds)
    assert ratios.replace(TIMES, "x").splitlines()[2:] == [
        "| chat, with sessions | 1.12 x | 2.25 x | 1.00 x | 1.00 x |",
        "| chat, without sessions | 0.50 x | 1.00 x | 1.00 x | 1.00 x |",
    ]
    head = "| | computed | of the least possible | mean first token | p99 |\n|---|---|---|---|---|"
    older = f"{head}\n| agents, with sessions | 2 |\n| chat, with sessions | 3 |"
    guide, _ = pages(tmp_path, ratios=older)
    write_tables(tmp_path, "", ratios)
    agents, *chats = guide.read_text(encoding="utf-8").splitlines()[5:8]
    assert (agents, chats) == ("| agents, with sessions | 2 |", ratios.splitlines()[2:])
    guide.write_text("Text.\n", encoding="utf-8")
    with pytest.raises(ValueError, match="no lines"):
        write_tables(tmp_path, "", ratios)


def test_plots_show_the_tables_of_the_page_whichever_traces_were_run(tmp_path: Path) -> None:
    late = outcome("pdproxy cache")
    late.late = 0.01
    first = make_report(
        [Row("http", "chat", late), Row("http", "chat", outcome("smg"))], {("http", "chat"): (0.2, 0.3)}
    )
    pages(tmp_path)
    write_tables(tmp_path, first)
    write_tables(tmp_path, make_report([Row("http", "agents", outcome("smg"))], {("http", "agents"): (0.1, 0.3)}))
    plots = {plot.name: ET.parse(plot) for plot in tmp_path.glob("*.svg")}
    assert set(plots) == {"planning-http-computed.svg", "planning-http-first-token.svg"}
    svg = "{http://www.w3.org/2000/svg}"
    texts = [text.text for text in plots["planning-http-computed.svg"].iter(f"{svg}text")][1:]
    assert texts == ["chat", "pdproxy cache", "45", "smg", "45", "agents", "smg", "45"]
    assert len(list(plots["planning-http-computed.svg"].iter(f"{svg}line"))) == 2
    waited = [text.text for text in plots["planning-http-first-token.svg"].iter(f"{svg}text")]
    assert waited.count("505") == 3


def test_earlier_runs_are_reported_without_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for made in (outcome("pdproxy cache"), outcome("smg")):
        Store(tmp_path).keep("http", "no-reuse", made)
    assert main(["--traces", "no-reuse", "--keep", str(tmp_path), "--kept"]) == 0
    assert "| no-reuse, with sessions | 1.00 x |" in capsys.readouterr().out.replace(TIMES, "x")
    assert len(list(tmp_path.iterdir())) == 2


def test_recorded_traces_are_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = Path(__file__).with_name("data")
    asked = ["--traces", "--mooncake", str(data / "mooncake.jsonl"), "--weka", str(data / "weka.jsonl")]
    assert main([*asked, "--keep", str(tmp_path), "--limit", "20", "--faster", "2"]) == 0
    told = capsys.readouterr().out
    assert "mooncake: at least" in told
    assert told.count("| cache without sessions |") == 2


def test_a_chart_is_well_formed_and_shows_every_bar() -> None:
    groups = {"a & b": [Bar("x<y", 2000.0), Bar("z", 1000.0)], "c": [Bar("z", 0.0)]}
    drawn = ET.fromstring(bars("T", groups, {"c": 0.5, "a & b": 0.5}))
    rects = drawn.findall("{http://www.w3.org/2000/svg}rect")
    assert len(rects) == 1 + 3
    assert float(rects[1].attrib["width"]) == 2 * float(rects[2].attrib["width"])
    assert rects[2].attrib["fill"] == rects[3].attrib["fill"]
    assert len(drawn.findall("{http://www.w3.org/2000/svg}line")) == 2
    assert [text.text for text in drawn.findall("{http://www.w3.org/2000/svg}text")].count("2000") == 1
