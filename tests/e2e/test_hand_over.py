"""What a hand-over moves, told by the nodes' own metrics."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pytest

from deploy.local.model.exam import Exam, exam
from tests.e2e.conftest import Pair
from tests.e2e.legs import complete, prefill
from tests.e2e.meters import Watch, watch

pytestmark = pytest.mark.e2e

BLOCK = 256
"""Tokens in an attention block of the tiny model."""


ATTEMPTS = 4
"""Conversations that are tried, each over a list of its own, until both turns were read: on a machine with fewer cores
than engines that spin, a deadline of the connector may pass, and the decode node rightly computes."""


def read_and_right(pair: Pair, question: Exam) -> bool:
    """Hand a question over; its answer must be right. Whether the read was verified, and not computed instead."""
    verified, ended = (watch(pair.decode.url, "reads", **label) for label in ({"outcome": "verified"}, {}))
    got = complete(pair.decode.url, question.prompt(), params=prefill(pair.prefill.url, question.prompt()))
    assert got.text == question.answer
    ended.reaches(1)
    return verified.grown() == 1


@dataclass(frozen=True)
class Moved:
    """What the second of two verified turns moved on the decode node: blocks hit and pulled, prompt tokens."""

    hits: Watch
    state: Watch
    pulled: Watch
    hit_tokens: Watch


def second_turn(pair: Pair, talks: Iterable[tuple[Exam, Exam]]) -> tuple[Exam, Moved]:
    """The first of the pairs of turns whose reads were both verified: its second turn, and what that moved."""
    for first, second in talks:
        if not read_and_right(pair, first):
            continue
        moved = Moved(
            watch(pair.decode.url, "blocks", group="attention", kind="hit"),
            watch(pair.decode.url, "blocks", group="state", kind="pulled"),
            watch(pair.decode.url, "prompt_tokens", source="pulled"),
            watch(pair.decode.url, "prompt_tokens", source="hit"),
        )
        if read_and_right(pair, second):
            return second, moved
    raise AssertionError("in no conversation both reads were verified")


def papers(seed: int) -> Iterator[Exam]:
    """Long lists."""
    return (exam(seed + 1000 * attempt, 1500) for attempt in range(ATTEMPTS))


def test_the_second_turn_pulls_only_what_is_new(pair: Pair) -> None:
    second, moved = second_turn(pair, ((talk.at_turn(1), talk.at_turn(2)) for talk in papers(101)))
    full_blocks = tokens(second.at_turn(1).prompt()) // BLOCK
    moved.hits.reaches(0.9 * full_blocks)
    moved.state.reaches(1)
    moved.pulled.reaches(1)
    assert moved.pulled.grown() <= tokens(second.prompt()) - full_blocks * BLOCK + BLOCK


def test_without_a_ticket_all_groups_count(pair: Pair) -> None:
    second, moved = second_turn(pair, ((paper, paper.ask(1)) for paper in papers(102)))
    attention_hit = 5 * BLOCK
    moved.hit_tokens.reaches(attention_hit)

    plain = second.ask(2)
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
