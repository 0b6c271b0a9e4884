"""An engine continues a cut answer as if it had not been cut: the same tokens, ranks and end.

The engine that produced an answer also continues it, so that one machine computes both. The API server's tests cover
streams that go from one node to another.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from deploy.local.node import NodeSpec, Role, environment
from deploy.local.paths import ROOT
from deploy.local.ports import free_row
from tests.e2e.triton_nodes import ModelRunner, needs_triton, with_triton

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines, pytest.mark.long]

CASES = (
    "greedy",
    "log-probabilities",
    "penalties",
    "logit bias",
    "bad words",
    "minimum",
    "seed",
    "seed, cut tail",
    "seed, penalties",
    "regex",
    "regex, seed",
    "schema, seed",
)


ON_V2 = ("log-probabilities", "penalties", "logit bias", "bad words", "minimum", "seed")
"""Without cases that Triton's interpreter cannot run: vLLM's kernels for grammars, and for `top_k` and `top_p`. Also
without a seed with penalties: of 40 such tokens one is a tie but for the last digits of bfloat16 (log-probabilities
differ by 0.03 to 0.1 between a prefill and single steps), as after any preemption or prefix hit."""

Answers = dict[str, list[dict[str, Any]]]
"""By case: each cut, the rest of the uncut answer, and the rest of the resumed one."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return ask(node(), CASES, tmp_path_factory.mktemp("resumed"))


def node() -> NodeSpec:
    [port] = free_row(1)
    return NodeSpec("decode", Role.DECODE, 1, port, more_environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})


def ask(spec: NodeSpec, cases: Sequence[str], folder: Path) -> Answers:
    """Run one engine for all cases in a process of its own, without a server: it starts in twenty seconds."""
    line = [sys.executable, "-m", "tests.e2e.resumed_engine", str(folder / "answers.json"), *cases]
    with (folder / "log").open("wb") as log:
        ended = subprocess.run(
            line, cwd=ROOT, env=environment(spec, os.environ), stdout=log, stderr=log, timeout=550, check=False
        )
    assert ended.returncode == 0, (folder / "log").read_text(encoding="utf-8")[-4000:]
    found: Answers = {}
    for each in json.loads((folder / "answers.json").read_text(encoding="utf-8")):
        found.setdefault(each["case"], []).append(each)
    return found


def goes_on(answers: Answers, case: str) -> None:
    assert len(answers[case]) >= 3
    for each in answers[case]:
        assert each["resumed"] == each["uncut"], f"cut after {each['cut']} tokens"
        assert each["resumed"]["ids"]


@pytest.mark.parametrize("case", CASES)
def test_it_goes_on_as_if_it_had_not_been_cut(answers: Answers, case: str) -> None:
    goes_on(answers, case)


@needs_triton
def test_so_it_does_on_model_runner_v2(tmp_path: Path) -> None:
    """The default on GPUs. Triton's interpreter runs it here."""
    spec = with_triton(node(), ModelRunner.V2, tmp_path)
    answers = ask(spec, ON_V2, tmp_path)
    assert "Using V2 Model Runner" in (tmp_path / "log").read_text(encoding="utf-8")
    for case in ON_V2:
        goes_on(answers, case)


def test_the_settings_mattered(answers: Answers) -> None:
    """No two of these cases have the same answer, apart from log-probabilities."""
    told = {case: tuple(answers[case][0]["uncut"]["ids"]) for case in CASES}
    del told["log-probabilities"]
    assert len(set(told.values())) == len(told)
    assert answers["log-probabilities"][0]["uncut"]["ranked"]
