"""A ticket beside two tiers on disk, on real engines: the tier that saves most is loaded, others are let go, all
counted.

Stock vLLM takes the first connector that has anything: one block on disk would cancel a whole remote prefill.
"""

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import pytest

from deploy.local.model.quiz import Quiz, quiz
from deploy.local.node import PREFIX_MATCH_UNIT
from deploy.local.paths import ROOT
from deploy.local.stack import logs_of
from deploy.local.supervise import Supervisor
from tests.e2e.legs import complete, prefill
from tests.e2e.metrics_reader import PATIENCE_S, Watch, read, watch
from tests.e2e.tiered import BLOCK, CHILDREN, Tiered, start_tiered

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines]

LONG, STORED = 1498, 5 * BLOCK
"""Tokens of a prompt, and of the part of it that a tier can hold."""
EVEN = 2 * BLOCK + 1
"""A prompt of which a ticket and a tier have the same part: all but the last token."""
Key = TypeVar("Key")
SOURCES = ("hit", "pulled", "loaded", "computed")


@dataclass(frozen=True)
class Case:
    """Who has a part of a prompt of `length` tokens, who loads it, and how many tokens. `wins`: in order."""

    seed: int
    tiers: frozenset[str] = frozenset()
    ticket: bool = False
    wins: Mapping[str, int] = field(default_factory=dict)
    length: int = LONG


ONLY_DISK, ONLY_FAST, BOTH = frozenset({"disk"}), frozenset({"fast"}), frozenset({"disk", "fast"})
HANDED_OVER = (LONG - 1) // PREFIX_MATCH_UNIT * PREFIX_MATCH_UNIT
CASES = {
    "the ticket has more": Case(2001, ONLY_DISK, True, {"pull": HANDED_OVER}),
    "a tier is worth more": Case(2002, ONLY_FAST, True, {"fast": STORED}),
    "equal, and the first wins": Case(2003, ONLY_DISK, True, {"pull": EVEN - 1}, EVEN),
    "only a tier": Case(2004, ONLY_DISK, False, {"disk": STORED}),
    "two tiers": Case(2005, BOTH, False, {"fast": STORED}),
    "only a ticket": Case(2006, frozenset(), True, {"pull": HANDED_OVER}),
    "nothing": Case(2007),
}


class Counted:
    """The counts of the decode node's connectors from now on."""

    def __init__(self, url: str) -> None:
        self._selected = {
            (child, name): watch(url, f"child_{name}", child=child)
            for child in CHILDREN
            for name in ("queries", "wins", "losses", "misses", "tokens_won", "failed_loads")
        }
        self._sources = {source: watch(url, "prompt_tokens", source=source) for source in SOURCES}
        self.unused = watch(url, "unused_tickets")

    def sources(self) -> dict[str, float]:
        return grown(self._sources)

    def await_prompts(self, tokens: int) -> None:
        """Wait until all these prompt tokens are counted; they are the last counts of a request."""
        limit = time.monotonic() + PATIENCE_S
        while sum(self.sources().values()) < tokens:
            assert time.monotonic() < limit, f"{self.sources()} is not {tokens}"
            time.sleep(0.05)

    def of(self, child: str) -> dict[str, float]:
        return {name: count for (of, name), count in grown(self._selected).items() if of == child}


def grown(watches: Mapping[Key, Watch]) -> dict[Key, float]:
    """The growth of each counter, without zeros."""
    return {key: amount for key, each in watches.items() if (amount := each.grown())}


@pytest.fixture(scope="module")
def tiered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiered]:
    """Both nodes. Logs: `.run/e2e-tiers`."""
    with Supervisor(logs_of("e2e-tiers")) as supervisor:
        yield start_tiered(supervisor, tmp_path_factory.mktemp("shelves"))


def ask(tiered: Tiered, paper: Quiz, *, ticket: bool) -> None:
    """Ask the decode node; the answer must be right."""
    params = prefill(tiered.prefill.url, paper.prompt()) if ticket else None
    assert complete(tiered.decode.url, paper.prompt(), params=params).text == paper.answer


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_what_saves_most_is_loaded_and_the_rest_let_go(tiered: Tiered, case: Case) -> None:
    paper = quiz(case.seed, case.length)
    tiered.shelve(paper, case.tiers)
    counted = Counted(tiered.decode.url)
    ended, expired = (watch(tiered.prefill.url, "leases_ended", **how) for how in ({}, {"how": "expired"}))
    ask(tiered, paper, ticket=case.ticket)
    counted.await_prompts(case.length)

    won = sum(case.wins.values())
    source = {"pulled" if "pull" in case.wins else "loaded": won} if won else {}
    assert counted.sources() == {**source, "computed": case.length - won}
    for child in CHILDREN:
        has = child in case.tiers or (child == "pull" and case.ticket)
        end = {"wins": 1, "tokens_won": won} if child in case.wins else {"losses" if has else "misses": 1}
        assert counted.of(child) == {"queries": 1, **end}, child
    if case.ticket:
        ended.reaches(1)
        assert counted.unused.grown() == ("pull" not in case.wins)
    assert (ended.grown(), expired.grown()) == (case.ticket, 0)


@pytest.mark.parametrize("fallback", ["disk", "nothing"])
def test_a_stale_file_falls_back(tiered: Tiered, fallback: str) -> None:
    """The next best tier is used, or the prompt is computed."""
    paper = quiz(2010 + len(fallback), LONG)
    files = tiered.shelve(paper, BOTH if fallback == "disk" else ONLY_FAST)
    for path in files["fast"]:
        path.write_bytes(b"of another time")
    counted = Counted(tiered.decode.url)
    ask(tiered, paper, ticket=False)
    counted.await_prompts(LONG)
    loaded = {"loaded": STORED} if fallback == "disk" else {}
    assert counted.sources() == {**loaded, "computed": LONG - sum(loaded.values())}
    fast, disk = counted.of("fast"), counted.of("disk")
    assert (fast["wins"], fast["failed_loads"]) == (1, 1)
    assert (disk.get("wins", 0), disk.get("failed_loads", 0)) == (len(loaded), 0)


def test_the_figures_add_up(tiered: Tiered) -> None:
    """The figures cover everything that the node did so far."""
    url = tiered.decode.url
    counted = Counted(url)
    ask(tiered, quiz(2020, LONG), ticket=True)
    counted.await_prompts(LONG)

    def total(name: str, **labels: str) -> float:
        return read(url, f"pdproxy_connector_{name}_total", **labels)

    for child in CHILDREN:
        ends = sum(total(f"child_{name}", child=child) for name in ("wins", "losses", "misses"))
        assert ends == total("child_queries", child=child) > 0
        assert read(url, "pdproxy_connector_child_pending_loads", child=child) == 0
    assert total("prompt_tokens", source="pulled") == total("child_tokens_won", child="pull") > 0
    assert sum(total("prompt_tokens", source=source) for source in SOURCES) == read(url, "vllm:prompt_tokens_total")


def test_a_check_reads_through_the_children(tiered: Tiered) -> None:
    """The children's series have one label more than those of a node with one connector."""
    line = [sys.executable, "-m", "pdproxy", "check", "--prefill", tiered.prefill.url, "--decode", tiered.decode.url]
    checked = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    rows = [row.split() for row in checked.stdout.splitlines() if "tiny-hybrid" in row]
    assert [row[-1] for row in rows] == ["ok", "ok"], checked.stdout + checked.stderr
    assert rows[0][1:-1] == ["prefill", *rows[1][2:-1]]
