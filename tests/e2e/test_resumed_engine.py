"""An engine goes on with an answer that was cut as if it had not been: the same tokens, ranks and end.

The cut answers are given back to the engine that produced them, by which both are computed on one machine. Streams that
go from one node to another are the API server's tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.local.node import NodeSpec, Role, environment
from deploy.local.paths import ROOT
from deploy.local.ports import free_row

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines]

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


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By case. One engine for all, in a process of its own without a server: it starts in twenty seconds."""
    [port] = free_row(1)
    folder = tmp_path_factory.mktemp("resumed")
    spec = NodeSpec("decode", Role.DECODE, 1, port, more_environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    line = [sys.executable, "-m", "tests.e2e.resumed_engine", str(folder / "answers.json")]
    with (folder / "log").open("wb") as log:
        ended = subprocess.run(
            line, cwd=ROOT, env=environment(spec, os.environ), stdout=log, stderr=log, timeout=300, check=False
        )
    assert ended.returncode == 0, (folder / "log").read_text(encoding="utf-8")[-4000:]
    found: dict[str, list[dict[str, Any]]] = {}
    for each in json.loads(Path(folder / "answers.json").read_text(encoding="utf-8")):
        found.setdefault(each["case"], []).append(each)
    return found


@pytest.mark.parametrize("case", CASES)
def test_it_goes_on_as_if_it_had_not_been_cut(answers: dict[str, list[dict[str, Any]]], case: str) -> None:
    assert len(answers[case]) >= 3
    for each in answers[case]:
        assert each["resumed"] == each["uncut"], f"cut after {each['cut']} tokens"
        assert each["resumed"]["ids"]


def test_the_settings_mattered(answers: dict[str, list[dict[str, Any]]]) -> None:
    """No two of these cases have the same answer, but for log-probabilities."""
    told = {case: tuple(answers[case][0]["uncut"]["ids"]) for case in CASES}
    del told["log-probabilities"]
    assert len(set(told.values())) == len(told)
    assert answers["log-probabilities"][0]["uncut"]["ranked"]
