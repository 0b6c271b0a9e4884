"""Tables of the tests that were run on each vLLM: `docs/tested.md` and the README's families, from `docs/tested.json`.

That file has the names of the tests that passed, by version of vLLM (`pytest -p tests.recorded --record` writes it). A
cell says "run" where every test of it passed on that version. A feature that was not run was read; a kind of model
counts as handed over only where it was run.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.local.paths import ROOT

RESULTS = ROOT / "docs" / "tested.json"
PAGE = ROOT / "docs" / "tested.md"
README = ROOT / "README.md"
E2E = "tests/e2e/"
FAMILY_TESTS = f"{E2E}test_families.py"
Results = Mapping[str, Collection[str]]
"""By version: the tests that passed."""


@dataclass(frozen=True)
class Aspect:
    """A column of the families' table, and the test that shows it."""

    title: str
    test: str


TWO_RANKS = "test_nodes_of_one_and_of_two_ranks_are_right_or_refuse_each_other_by_name"
OF_A_PAIR = (
    Aspect("tokens and log-probabilities", "test_one_engine_and_a_pair_say_what_transformers_says"),
    Aspect("hits on both nodes, resume", "test_both_nodes_go_on_from_what_was_handed_over"),
    Aspect("several at once", "test_several_at_once_with_and_without_a_ticket"),
    Aspect("preemption", "test_requests_that_are_preempted_end_as_if_they_had_not_been"),
    Aspect("a lost state is seen", "test_a_state_that_is_lost_is_seen"),
)
"""A kind of model counts as handed over where all of these were run."""
ASPECTS = (
    *OF_A_PAIR,
    Aspect("decode node dies in a stream", "test_a_decode_node_that_dies_in_a_stream_costs_no_token"),
    Aspect("prefill node dies", "test_a_prefill_node_that_dies_before_it_is_read_costs_a_prefill"),
    Aspect("TP 1 and 2", TWO_RANKS),
)


@dataclass(frozen=True)
class Kind:
    """A kind of model. `name`: as its tests have it. `ranks`: what nodes of one and of two ranks do together."""

    name: str
    models: str
    state: str
    ranks: str = "right"


KINDS = (
    Kind("Qwen3-Next", "Qwen3-Next", "GDN"),
    Kind("Qwen3.5", "Qwen3.5, 3.6 (`Qwen3_5ForConditionalGeneration`), text", "GDN"),
    Kind("Qwen3.6-MoE", "the same with experts (`Qwen3_5MoeForConditionalGeneration`), text", "GDN"),
    Kind("Kimi-Linear", "Kimi-Linear", "KDA, beside MLA"),
    Kind("Nemotron-H", "Nemotron-H, Nemotron Nano", "Mamba-2, several groups"),
    Kind("Granite-4", "Granite-4", "Mamba-2, one group", "refused"),
    Kind("Falcon-H1", "Falcon-H1", "Mamba-2, one group", "refused"),
    Kind("Jamba", "Jamba", "Mamba-1"),
)


@dataclass(frozen=True)
class Feature:
    """A row of the matrix. `ours`: the tests that show it, below `tests/e2e/`, or nothing where it was read.

    `stock`: what vLLM's own connector does; `stock_tests` show it.
    """

    title: str
    ours: tuple[str, ...] = ()
    stock: str = "no"
    stock_tests: tuple[str, ...] = ()

    def seen_of_stock(self, how: str) -> str:
        """The cell about vLLM's own connector."""
        return self.stock if self.stock == "no" and not self.stock_tests else f"{self.stock}: {how}"


STOCK = "test_stock_nixl.py"
FEATURES = (
    Feature(
        "a hybrid prompt is handed over, tokens and log-probabilities of one engine",
        ("test_hand_over.py::test_the_answers_are_those_of_one_node",),
        "yes",
        (f"{STOCK}::test_a_hand_over_is_right",),
    ),
    Feature(
        "the second turn, with a ticket, pulls only what is new",
        ("test_hand_over.py::test_the_second_turn_pulls_only_what_is_new",),
        "yes",
        (f"{STOCK}::test_the_second_turn_pulls_only_what_is_new",),
    ),
    Feature(
        "the decode node goes on by itself after a hand-over",
        (
            "test_resume.py::test_a_chat_s_later_turns_need_no_ticket",
            "test_resume.py::test_it_goes_on_as_one_node_would",
        ),
        "no",
        (f"{STOCK}::test_nothing_is_hit_without_a_ticket",),
    ),
    Feature(
        "a ticket for another prompt is refused, the answer right",
        ("test_wrong_tickets.py::test_prompt_a_with_the_ticket_of_b_and_then_b_with_its_own",),
        "no: wrong text",
        (f"{STOCK}::test_the_ticket_of_another_prompt_gives_a_wrong_answer",),
    ),
    Feature("blocks that are no longer held are not used", ("test_stale_tickets.py",)),
    Feature(
        "malformed tickets end nothing",
        ("test_wrong_tickets.py::test_a_decode_node_refuses_what_is_wrong_and_answers_right",),
    ),
    Feature(
        "nodes that differ refuse each other by name", ("test_differences.py::test_one_flag_that_differs_is_found",)
    ),
    Feature("the prefill node dies or freezes under a read", ("test_prefill_faults.py",)),
    Feature("streams go on when a node dies", ("test_node_deaths.py::test_no_stream_is_lost_and_no_token_is_wrong",)),
    Feature(
        "plans by what nodes cache (KV events)", ("test_kv_events.py::test_planned_hits_are_what_the_nodes_count",)
    ),
    Feature("tensor parallel nodes", ("test_tensor_parallel.py",), "yes"),
    Feature("data-parallel ranks", ("test_data_parallel.py",), "yes"),
    Feature("Granite-4: Mamba-2", (f"test_families.py::{ASPECTS[0].test}[Granite-4]",), "yes"),
    Feature("Jamba: Mamba-1", (f"test_families.py::{ASPECTS[0].test}[Jamba]",), "yes"),
    Feature("speculative decoding (MTP), FP8 caches, CUDA graphs, RDMA", (), "yes"),
)
"""Features, each with the tests that show it; nothing is claimed of a version on which nobody ran them."""


def asked_for(test: str) -> bool:
    """Whether a table asks for this test."""
    return test.startswith(f"{FAMILY_TESTS}::") or of_features(test)


def of_features(test: str) -> bool:
    """Whether the matrix of features asks for this test."""
    return any(begins(test, E2E + name) for each in FEATURES for name in (*each.ours, *each.stock_tests))


def feature_files() -> list[str]:
    """The files of those tests."""
    tests = (test for each in FEATURES for test in (*each.ours, *each.stock_tests))
    return sorted({E2E + test.partition("::")[0] for test in tests})


def pages(results: Results) -> dict[Path, str]:
    """The pages with these tables, as they should be. Raises ValueError where one has no place for a table."""
    tested = spliced(PAGE.read_text(encoding="utf-8"), "kinds", aspects_table(results))
    return {
        PAGE: spliced(tested, "features", features_table(results)),
        README: spliced(README.read_text(encoding="utf-8"), "families", families_table(results)),
    }


def spliced(text: str, name: str, table: Iterable[str]) -> str:
    """A page with this table between the two comments of its name."""
    first, last = f"<!-- {name}: by `make generate` -->\n", f"<!-- end of {name} -->\n"
    return "".join((text[: text.index(first)], first, *table, text[text.index(last) :]))


def families_table(results: Results) -> Iterator[str]:
    """The lines of the README's table: a kind of model counts where all that a pair does was run."""
    yield from row("models", "state", "handed over", "nodes of TP 1 and 2 together", "the command")
    yield from row("---", "---", "---", "---", "---")
    for kind in KINDS:
        told = ran(results, *(of_kind(kind, aspect) for aspect in OF_A_PAIR))
        ranks = ran(results, of_kind(kind, Aspect("", TWO_RANKS)))
        command = f"`python -m pytest -m e2e {FAMILY_TESTS} -k {kind.name}`"
        yield from row(kind.models, kind.state, told, f"{kind.ranks}: {ranks}" if ranks != "no" else "not run", command)


def aspects_table(results: Results) -> Iterator[str]:
    """Kinds of models by what was seen of them."""
    yield from row("", *(aspect.title for aspect in ASPECTS))
    yield from row("---", *("---" for _ in ASPECTS))
    for kind in KINDS:
        yield from row(kind.name, *(ran(results, of_kind(kind, aspect)) for aspect in ASPECTS))


def features_table(results: Results) -> Iterator[str]:
    """Features by version and connector."""
    versions = sorted(results)
    yield from row("", *(f"{each}, ours" for each in versions), *(f"{each}, stock" for each in versions))
    yield from row("---", *("---" for _ in (*versions, *versions)))
    for each in FEATURES:
        ours = (cell(results, version, each.ours) for version in versions)
        stock = (each.seen_of_stock(cell(results, version, each.stock_tests)) for version in versions)
        yield from row(each.title, *ours, *stock)


def row(*cells: str) -> Iterator[str]:
    """One line of a table."""
    yield f"| {' | '.join(cells)} |\n"


def of_kind(kind: Kind, aspect: Aspect) -> str:
    """The test of an aspect; its other parameters come before or after the kind's name."""
    return f"{FAMILY_TESTS}::{aspect.test}[{kind.name}"


def ran(results: Results, *tests: str) -> str:
    """On which versions all of these passed."""
    versions = [version for version in sorted(results) if passed(results, version, tests)]
    return f"run on {', '.join(versions)}" if versions else "no"


def cell(results: Results, version: str, tests: Sequence[str]) -> str:
    """The evidence for a claim on a version: its tests were run, or vLLM's source was read (`tests.vllm_compat`)."""
    return "run" if tests and passed(results, version, [E2E + test for test in tests]) else "read"


def passed(results: Results, version: str, tests: Iterable[str]) -> bool:
    """Whether a test of each of these beginnings of names passed there; a kind's name is whole."""
    return all(any(begins(name, test) for name in results[version]) for test in tests)


def begins(name: str, beginning: str) -> bool:
    return name.startswith(beginning) and name[len(beginning) : len(beginning) + 1] in ("", "[", "]", "-", ":")


def printed(results: Results) -> str:
    """The results' file."""
    return json.dumps({version: sorted(results[version]) for version in sorted(results)}, indent=1) + "\n"


def read() -> Results:
    """The results' file, as it is."""
    found: Results = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def missing(results: Results) -> Iterator[str]:
    """Tests of the results that are not there any more."""
    for name in {name.partition("[")[0] for names in results.values() for name in names}:
        path, _, test = name.partition("::")
        file = ROOT / path
        if not file.is_file() or f"def {test.rpartition('::')[2]}(" not in file.read_text(encoding="utf-8"):
            yield name
