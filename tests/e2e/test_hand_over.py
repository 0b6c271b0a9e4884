"""What a hand-over moves, told by the nodes' own metrics."""

import pytest

from deploy.local.model.exam import exam
from tests.e2e.conftest import Pair
from tests.e2e.legs import complete, prefill
from tests.e2e.meters import watch

pytestmark = pytest.mark.e2e

BLOCK = 256
"""Tokens in an attention block of the tiny model."""


def test_the_second_turn_pulls_only_what_is_new(pair: Pair) -> None:
    talk = exam(101, 1500)
    first, second = talk.at_turn(1), talk.at_turn(2)
    pulled = watch(pair.decode.url, "prompt_tokens", source="pulled")
    got = complete(pair.decode.url, first.prompt(), params=prefill(pair.prefill.url, first.prompt()))
    assert got.text == first.answer
    pulled.reaches(1000)

    full_blocks = tokens(talk.at_turn(1).prompt()) // BLOCK
    hits = watch(pair.decode.url, "blocks", group="attention", kind="hit")
    state = watch(pair.decode.url, "blocks", group="state", kind="pulled")
    moved = watch(pair.decode.url, "prompt_tokens", source="pulled")
    got = complete(pair.decode.url, second.prompt(), params=prefill(pair.prefill.url, second.prompt()))
    assert got.text == second.answer
    hits.reaches(0.9 * full_blocks)
    state.reaches(1)
    assert moved.grown() <= tokens(second.prompt()) - full_blocks * BLOCK + BLOCK


def test_without_a_ticket_all_groups_count(pair: Pair) -> None:
    question = exam(102, 1500)
    got = complete(pair.decode.url, question.prompt(), params=prefill(pair.prefill.url, question.prompt()))
    assert got.text == question.answer
    other = question.ask(1)
    with_ticket = watch(pair.decode.url, "prompt_tokens", source="hit")
    assert (
        complete(pair.decode.url, other.prompt(), params=prefill(pair.prefill.url, other.prompt())).text == other.answer
    )
    attention_hit = 5 * BLOCK
    with_ticket.reaches(attention_hit)

    plain = question.ask(2)
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
