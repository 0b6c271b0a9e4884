"""A prefill and a decode node that differ in what the bytes mean: refused before anything is read, and said why.

Speculative tokens, layouts and FP8 caches cannot be started on a CPU: `tests/connector/test_node_fingerprint.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from connector.ticket_fields import RefusalReason
from deploy.local.model.quiz import quiz
from deploy.local.node import Node, NodeSpec, Role
from deploy.local.stack import logs_of, start_nodes
from deploy.local.supervise import Supervisor
from tests.e2e.conftest import Pair
from tests.e2e.legs import complete, prefill
from tests.e2e.metrics_reader import PATIENCE_S, watch
from tests.e2e.odd_nodes import BLOCK_256, ODDITIES, STATE_TYPE, Oddity, OnePath

pytestmark = pytest.mark.e2e

QUESTIONS = 4
LINES = 800


@contextmanager
def started(spec: NodeSpec) -> Iterator[Node]:
    """One node of this test's own."""
    with Supervisor(logs_of("differences")) as supervisor:
        yield start_nodes(supervisor, [spec], print)[0]


def parts(url: str) -> dict[str, str]:
    """A node's fingerprint, off its metrics."""
    text = httpx.get(f"{url}/metrics", timeout=PATIENCE_S, trust_env=False).raise_for_status().text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    told = [sample.labels for sample in samples if sample.name == "pdproxy_connector_fingerprint"]
    return {labels["part"]: labels["value"] for labels in told}


def refuses_and_answers_right(give: Node, take: Node, oddity: Oddity) -> None:
    """Every ticket is refused for what differs, every answer is right, and so is the next without a ticket."""
    here, there = parts(take.url), parts(give.url)
    assert here[oddity.part] != there[oddity.part]
    assert here["all"] != there["all"]
    refused, reads = watch(take.url, "refused", reason=RefusalReason.FINGERPRINT), watch(take.url, "reads")
    for seed in range(900, 900 + QUESTIONS):
        question = quiz(seed, LINES)
        ticket = prefill(give.url, question.prompt(), pdproxy_hand_over=f"differences-{oddity.part}-{seed}")
        assert complete(take.url, question.prompt(), params=ticket).text == question.answer
        following = question.ask(1)
        assert complete(take.url, following.prompt()).text == following.answer
    refused.reaches(QUESTIONS)
    assert (refused.grown(), reads.grown()) == (QUESTIONS, 0)
    logged = [
        line for line in take.part.log.read_text(encoding="utf-8").splitlines() if "refused (fingerprint)" in line
    ]
    assert len(logged) == QUESTIONS
    assert f"{oddity.part} is {here[oddity.part]} here, {there[oddity.part]} on the prefill node" in logged[0]
    assert oddity.flag in logged[0]


def test_one_flag_that_differs_is_found(pair: Pair) -> None:
    with started(STATE_TYPE.spec()) as odd:
        assert {name for name, value in parts(odd.url).items() if value != parts(pair.prefill.url)[name]} == {
            "all",
            STATE_TYPE.part,
        }
        refuses_and_answers_right(pair.prefill, odd, STATE_TYPE)


def test_the_shared_nodes_have_one_fingerprint(pair: Pair) -> None:
    assert parts(pair.prefill.url) == parts(pair.decode.url)


FLAGS = [oddity for oddity in ODDITIES[1:] if oddity.weights is None]
WEIGHTS = [oddity for oddity in ODDITIES if oddity.weights is not None]


@pytest.mark.long
@pytest.mark.parametrize("oddity", FLAGS, ids=lambda oddity: oddity.name)
def test_every_flag_that_differs_is_found(pair: Pair, oddity: Oddity) -> None:
    with started(oddity.spec()) as odd:
        refuses_and_answers_right(pair.prefill, odd, oddity)


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


@pytest.mark.long
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE], ids=lambda role: f"{role.name.lower()} of two ranks")
def test_the_number_of_ranks_is_no_difference(pair: Pair, role: Role) -> None:
    spec = NodeSpec("two-ranks", role, 0, 0, tensor_parallel_size=2, more_arguments=BLOCK_256)
    with started(spec) as wide:
        assert parts(wide.url) == parts(pair.prefill.url)
        give, take = (wide, pair.decode) if role is Role.PREFILL else (pair.prefill, wide)
        refused = watch(take.url, "refused", reason=RefusalReason.FINGERPRINT)
        verified = watch(take.url, "reads", outcome="verified")
        for seed in range(940, 940 + QUESTIONS):
            question = quiz(seed, LINES)
            ticket = prefill(give.url, question.prompt())
            assert complete(take.url, question.prompt(), params=ticket).text == question.answer
        verified.reaches(QUESTIONS * take.spec.tensor_parallel_size)
        assert refused.grown() == 0
