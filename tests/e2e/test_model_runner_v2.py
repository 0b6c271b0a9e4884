"""A hand-over between nodes with vLLM's model runner V2, the default on GPUs.

V2 posts loads after the forward pass, V1 before it. V2 is written in Triton, whose interpreter runs it here.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deploy.local.model.quiz import quiz
from deploy.local.node import Node
from deploy.local.stack import logs_of, pair_specs, start_nodes
from deploy.local.supervise import Supervisor
from tests.e2e.conftest import Pair
from tests.e2e.legs import LENGTH, hand_all_over, hand_over
from tests.e2e.metrics_reader import watch
from tests.e2e.triton_nodes import ModelRunner, needs_triton, with_triton

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines, pytest.mark.long, needs_triton]

SEEDS = range(160, 168)


@pytest.fixture(scope="module")
def v2_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("interpreted")
    specs = [with_triton(spec, ModelRunner.V2, folder) for spec in pair_specs()]
    with Supervisor(logs_of("model_runner_v2")) as supervisor:
        give, take = start_nodes(supervisor, specs, print)
        yield Pair(give, take)


def runs_v2(node: Node) -> bool:
    """Whether the node's log says so."""
    return "Using V2 Model Runner" in node.part.log.read_text(encoding="utf-8")


def test_prompts_are_handed_over(v2_pair: Pair) -> None:
    assert runs_v2(v2_pair.prefill)
    assert runs_v2(v2_pair.decode)
    hand_over(v2_pair.prefill.url, v2_pair.decode.url, quiz(159, LENGTH))
    hand_all_over(v2_pair.prefill, v2_pair.decode, SEEDS)


def test_the_second_turn_finds_the_first_in_the_cache(v2_pair: Pair) -> None:
    talk = quiz(168, 2 * LENGTH)
    hand_over(v2_pair.prefill.url, v2_pair.decode.url, talk.at_turn(1))
    hit = watch(v2_pair.decode.url, "prompt_tokens", source="hit")
    hand_over(v2_pair.prefill.url, v2_pair.decode.url, talk.at_turn(2))
    hit.reaches(LENGTH)
