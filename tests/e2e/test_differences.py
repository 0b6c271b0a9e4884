"""Nodes that differ in the meaning of the cache's bytes: tickets are refused before a read, with the reason.

`pdproxy check` names the same difference. Nodes that do not differ are never refused.

Layouts and FP8 caches cannot be started on a CPU; `tests/connector/test_node_fingerprint.py` covers them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from connector.ticket_fields import RefusalReason
from deploy.local.model.quiz import quiz
from deploy.local.node import Node, NodeSpec, Role
from deploy.local.paths import ROOT
from deploy.local.stack import logs_of, start_nodes
from deploy.local.supervise import Supervisor
from tests.e2e.conftest import Pair
from tests.e2e.legs import LENGTH, complete, hand_all_over, prefill
from tests.e2e.metrics_reader import PATIENCE_S, watch
from tests.e2e.odd_nodes import BLOCK_256, ODDITIES, SPECULATIVE, STATE_TYPE, Oddity, OnePath
from tests.e2e.triton_nodes import ModelRunner, needs_triton, with_triton

pytestmark = pytest.mark.e2e

HONEST = 200
"""Hand-overs between nodes that do not differ. With 0 refusals the rate is at most 1.5 %, with 95 % confidence."""
HONEST_RANKS = 20
"""The same between nodes with different numbers of ranks."""
CHECKED_WITHIN_S = 60.0


@contextmanager
def started(spec: NodeSpec) -> Iterator[Node]:
    """A node of this test alone."""
    with Supervisor(logs_of("differences")) as supervisor:
        yield start_nodes(supervisor, [spec], print)[0]


def parts(url: str) -> dict[str, str]:
    """A node's fingerprint, from its metrics."""
    text = httpx.get(f"{url}/metrics", timeout=PATIENCE_S, trust_env=False).raise_for_status().text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    told = [sample.labels for sample in samples if sample.name == "pdproxy_connector_fingerprint"]
    return {labels["part"]: labels["value"] for labels in told}


def refuses_and_answers_right(give: Node, take: Node, oddity: Oddity) -> None:
    """Every ticket is refused for this difference; every answer is right, as is the next one without a ticket."""
    here, there = parts(take.url), parts(give.url)
    assert here[oddity.part] != there[oddity.part]
    assert here["all"] != there["all"]
    refused, reads = watch(take.url, "refused", reason=RefusalReason.FINGERPRINT), watch(take.url, "reads")
    for seed in oddity.seeds:
        question = quiz(seed, LENGTH)
        ticket = prefill(give.url, question.prompt(), pdproxy_hand_over=f"differences-{oddity.part}-{seed}")
        assert complete(take.url, question.prompt(), params=ticket).text == question.answer
        following = question.ask(1)
        assert complete(take.url, following.prompt()).text == following.answer
    refused.reaches(len(oddity.seeds))
    assert (refused.grown(), reads.grown()) == (len(oddity.seeds), 0)
    logged = [
        line for line in take.part.log.read_text(encoding="utf-8").splitlines() if "refused (fingerprint)" in line
    ]
    assert len(logged) == len(oddity.seeds)
    assert f"{oddity.part} is {here[oddity.part]} here, {there[oddity.part]} on the prefill node" in logged[0]
    assert oddity.flag in logged[0]


def checked(*nodes: Node) -> tuple[int, list[str]]:
    """Run `pdproxy check` on these nodes: its exit status and output lines."""
    line = [sys.executable, "-m", "pdproxy", "check"]
    for node in nodes:
        line += ["--prefill" if node.spec.role is Role.PREFILL else "--decode", node.url]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=CHECKED_WITHIN_S, check=False)
    assert not done.stderr
    return done.returncode, done.stdout.splitlines()


def named_by_check(give: Node, take: Node, oddity: Oddity) -> None:
    """`pdproxy check` exits with 1, and names for both nodes the difference and the flag to align."""
    status, lines = checked(give, take)
    assert status == 1
    here, there = parts(take.url)[oddity.part], parts(give.url)[oddity.part]
    for name, values in (
        ("prefill-0", f"{there} here, {here} on decode-0"),
        ("decode-0", f"{here} here, {there} on prefill-0"),
    ):
        (said,) = [line for line in lines if line.startswith(f"{name}: exchanges no tickets: {oddity.part}: ")]
        assert f": {values}: " in said
        assert oddity.flag in said


def test_one_flag_that_differs_is_found(pair: Pair) -> None:
    with started(STATE_TYPE.spec()) as odd:
        assert {name for name, value in parts(odd.url).items() if value != parts(pair.prefill.url)[name]} == {
            "all",
            STATE_TYPE.part,
        }
        refuses_and_answers_right(pair.prefill, odd, STATE_TYPE)
        named_by_check(pair.prefill, odd, STATE_TYPE)
        status, lines = checked(pair.prefill, pair.decode, odd)
        assert status == 1, "one of the decode nodes has no partner"
        assert {line.partition(":")[0] for line in lines if "exchanges no tickets" in line} == {"decode-1"}


def test_the_shared_nodes_have_one_fingerprint(pair: Pair) -> None:
    assert parts(pair.prefill.url) == parts(pair.decode.url)
    status, lines = checked(pair.prefill, pair.decode)
    assert status == 0
    assert not [line for line in lines if "exchanges no tickets" in line]


FLAGS = [oddity for oddity in ODDITIES[1:] if oddity.weights is None]
WEIGHTS = [oddity for oddity in ODDITIES if oddity.weights is not None]


@pytest.mark.long
@pytest.mark.parametrize("oddity", FLAGS, ids=lambda oddity: oddity.name)
def test_every_flag_that_differs_is_found(pair: Pair, oddity: Oddity) -> None:
    with started(oddity.spec()) as odd:
        refuses_and_answers_right(pair.prefill, odd, oddity)
        named_by_check(pair.prefill, odd, oddity)


@pytest.mark.long
@pytest.mark.parametrize("oddity", WEIGHTS, ids=lambda oddity: oddity.name)
def test_other_weights_under_the_same_path_are_found(tmp_path: Path, oddity: Oddity) -> None:
    assert oddity.weights is not None
    path = OnePath(tmp_path)
    with (
        started(NodeSpec("before", Role.PREFILL, 0, 0, model=path.usual())) as before,
        started(oddity.spec(path.changed(oddity.weights))) as after,
    ):
        refuses_and_answers_right(before, after, oddity)
        named_by_check(before, after, oddity)


@needs_triton
@pytest.mark.long
def test_speculative_tokens_on_one_side_are_found(pair: Pair, tmp_path: Path) -> None:
    with started(with_triton(SPECULATIVE.spec(), ModelRunner.V1, tmp_path)) as odd:
        refused, reads = watch(odd.url, "refused", reason=RefusalReason.FINGERPRINT), watch(odd.url, "reads")
        prompt = quiz(960, LENGTH).prompt()
        complete(odd.url, prompt, params=prefill(pair.prefill.url, prompt))
        refused.reaches(1)
        assert reads.grown() == 0
        named_by_check(pair.prefill, odd, SPECULATIVE)


@pytest.mark.long
def test_honest_hand_overs_are_never_refused(pair: Pair) -> None:
    hand_all_over(pair.prefill, pair.decode, range(2000, 2000 + HONEST))


@pytest.mark.long
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE], ids=lambda role: f"{role.name.lower()} of two ranks")
def test_the_number_of_ranks_is_no_difference(pair: Pair, role: Role) -> None:
    spec = NodeSpec("two-ranks", role, 0, 0, tensor_parallel_size=2, more_arguments=BLOCK_256)
    with started(spec) as wide:
        assert parts(wide.url) == parts(pair.prefill.url)
        give, take = (wide, pair.decode) if role is Role.PREFILL else (pair.prefill, wide)
        hand_all_over(give, take, range(2300, 2300 + HONEST_RANKS))
        assert checked(give, take)[0] == 0
