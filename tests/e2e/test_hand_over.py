"""What a hand-over moves, told by the nodes' own metrics."""

from dataclasses import dataclass

import pytest

from deploy.local.model.exam import Exam, exam
from tests.e2e.conftest import Pair
from tests.e2e.legs import complete, prefill
from tests.e2e.meters import Watch, read, watch

pytestmark = pytest.mark.e2e

BLOCK = 256
"""Tokens in an attention block of the tiny model."""


def read_rightly(pair: Pair, question: Exam) -> None:
    """Hand a question over: its answer is right, and was read, not computed."""
    verified, ended = (watch(pair.decode.url, "reads", **label) for label in ({"outcome": "verified"}, {}))
    got = complete(pair.decode.url, question.prompt(), params=prefill(pair.prefill.url, question.prompt()))
    assert got.text == question.answer
    ended.reaches(1)
    assert verified.grown() == 1


@dataclass(frozen=True)
class Moved:
    """What the second of two turns moved on the decode node: blocks hit and pulled, prompt tokens."""

    hits: Watch
    state: Watch
    pulled: Watch
    hit_tokens: Watch


def two_turns(pair: Pair, first: Exam, second: Exam) -> Moved:
    """Hand both over; what the second moved."""
    read_rightly(pair, first)
    moved = Moved(
        watch(pair.decode.url, "blocks", group="attention", kind="hit"),
        watch(pair.decode.url, "blocks", group="state", kind="pulled"),
        watch(pair.decode.url, "prompt_tokens", source="pulled"),
        watch(pair.decode.url, "prompt_tokens", source="hit"),
    )
    read_rightly(pair, second)
    return moved


def test_a_hybrid_node_keeps_states_where_blocks_end_without_being_told(pair: Pair) -> None:
    for node in (pair.prefill, pair.decode):
        assert read(node.url, "pdproxy_connector_info", mamba_cache_mode="align") == 1


def test_the_second_turn_pulls_only_what_is_new(pair: Pair) -> None:
    talk = exam(101, 1500)
    first, second = talk.at_turn(1), talk.at_turn(2)
    moved = two_turns(pair, first, second)
    full_blocks = tokens(first.prompt()) // BLOCK
    moved.hits.reaches(0.9 * full_blocks)
    moved.state.reaches(1)
    moved.pulled.reaches(1)
    assert moved.pulled.grown() <= tokens(second.prompt()) - full_blocks * BLOCK + BLOCK


def test_without_a_ticket_all_groups_count(pair: Pair) -> None:
    paper = exam(102, 1500)
    moved = two_turns(pair, paper, paper.ask(1))
    attention_hit = 5 * BLOCK
    moved.hit_tokens.reaches(attention_hit)

    plain = paper.ask(2)
    without = complete(pair.decode.url, plain.prompt())
    assert without.text == plain.answer
    assert without.cached < attention_hit, "attention alone was counted, with no state to go on from"


def test_the_answers_are_those_of_one_node(pair: Pair) -> None:
    question = exam(103, 1200)
    alone = complete(pair.prefill.url, question.prompt())
    handed = complete(pair.decode.url, question.prompt(), params=prefill(pair.prefill.url, question.prompt()))
    assert handed.text == alone.text == question.answer
    assert handed.logprobs == pytest.approx(alone.logprobs, abs=0.05)


def tokens(prompt: str) -> int:
    """How many tokens a prompt has: every name, digit, mark and newline is one."""
    lines = prompt.split("\n")
    return 5 * (len(lines) - 1) + 2
