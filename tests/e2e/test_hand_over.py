"""The tokens and blocks that a hand-over moves, by the nodes' own metrics."""

from dataclasses import dataclass

import pytest

from deploy.local.model.quiz import Quiz, quiz
from tests.e2e.conftest import Pair
from tests.e2e.legs import complete, hand_over, prefill
from tests.e2e.metrics_reader import Watch, read, watch

pytestmark = pytest.mark.e2e

BLOCK = 256
"""Tokens in an attention block of the tiny model."""
VERDICTS = 40


@dataclass(frozen=True)
class Moved:
    """The second turn's figures on the decode node: blocks hit and pulled, prompt tokens."""

    hits: Watch
    state: Watch
    pulled: Watch
    hit_tokens: Watch


def two_turns(pair: Pair, first: Quiz, second: Quiz) -> Moved:
    """Hand both turns over. Returns the second one's figures."""
    hand_over(pair.prefill.url, pair.decode.url, first)
    moved = Moved(
        watch(pair.decode.url, "blocks", group="attention", kind="hit"),
        watch(pair.decode.url, "blocks", group="state", kind="pulled"),
        watch(pair.decode.url, "prompt_tokens", source="pulled"),
        watch(pair.decode.url, "prompt_tokens", source="hit"),
    )
    hand_over(pair.prefill.url, pair.decode.url, second)
    return moved


def test_a_hybrid_node_keeps_states_where_blocks_end_without_being_told(pair: Pair) -> None:
    for node in (pair.prefill, pair.decode):
        assert read(node.url, "pdproxy_connector_info", mamba_cache_mode="align") == 1


def test_the_second_turn_pulls_only_what_is_new(pair: Pair) -> None:
    talk = quiz(101, 1500)
    first, second = talk.at_turn(1), talk.at_turn(2)
    moved = two_turns(pair, first, second)
    full_blocks = tokens(first.prompt()) // BLOCK
    moved.hits.reaches(0.9 * full_blocks)
    moved.state.reaches(1)
    moved.pulled.reaches(1)
    assert moved.pulled.grown() <= tokens(second.prompt()) - full_blocks * BLOCK + BLOCK


def test_the_answers_are_those_of_one_node(pair: Pair) -> None:
    question = quiz(103, 1200)
    alone = complete(pair.prefill.url, question.prompt())
    handed = complete(pair.decode.url, question.prompt(), params=prefill(pair.prefill.url, question.prompt()))
    assert handed.text == alone.text == question.answer
    assert handed.logprobs == pytest.approx(alone.logprobs, abs=0.05)


def tokens(prompt: str) -> int:
    """How many tokens a prompt has: every name, digit, mark and newline is one."""
    lines = prompt.split("\n")
    return 5 * (len(lines) - 1) + 2


def test_a_verdict_comes_at_once(pair: Pair) -> None:
    """From a read's last byte to its verdict: within a millisecond for half of them, on idle nodes and cores."""

    def verdicts(within: str) -> float:
        return read(pair.decode.url, "pdproxy_connector_verify_seconds_bucket", le=within)

    before = {within: verdicts(within) for within in ("0.001", "0.0025", "0.01", "+Inf")}
    for seed in range(140, 140 + VERDICTS):
        hand_over(pair.prefill.url, pair.decode.url, quiz(seed, 800))
    came = {within: verdicts(within) - count for within, count in before.items()}
    print(f"of {VERDICTS} verdicts so many came within so many seconds: {came}")
    assert came["+Inf"] == VERDICTS
    assert came["0.01"] > VERDICTS / 2
