"""The question and its answer survive the wire; anything else is None."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.lease import Verdict
from connector.question import (
    ASK,
    HANDSHAKE,
    LONGEST_NAME,
    MOST_QUESTIONS,
    Batch,
    Handshake,
    Question,
    read_answer,
    read_request,
    write_answer,
    write_batch,
)

NAMES = st.text(max_size=40)
QUESTIONS = st.lists(st.builds(Question, NAMES, NAMES, NAMES), max_size=20)


@given(st.integers(0, 2**40), QUESTIONS)
def test_questions_survive_the_wire(number: int, questions: list[Question]) -> None:
    assert read_request(write_batch(number, questions)) == Batch(number, tuple(questions))


@given(st.integers(0, 2**40), st.lists(st.sampled_from(Verdict)))
def test_answers_survive_the_wire(number: int, verdicts: list[Verdict]) -> None:
    assert read_answer(write_answer(number, verdicts)) == (number, verdicts)


def test_the_stock_handshake_is_understood() -> None:
    assert read_request(msgspec.msgpack.encode((HANDSHAKE, 0, 3))) == Handshake(0, 3)


@pytest.mark.parametrize(
    "message",
    [
        (HANDSHAKE, 0),
        (HANDSHAKE, 0, []),
        (HANDSHAKE, "0", "0"),
        (ASK, 1, 2),
        (ASK, 1, [["a", "b"]]),
        (ASK, 1, [["a", "b", 3]]),
        (ASK, 1, [["a" * (LONGEST_NAME + 1), "b", "c"]]),
        (ASK, 1, [["a", "b", "c"]] * (MOST_QUESTIONS + 1)),
        (b"something else", 1, []),
        {"a": 1},
        None,
        10**18,
    ],
)
def test_requests_that_mean_nothing_are_none(message: object) -> None:
    assert read_request(msgspec.msgpack.encode(message)) is None


def test_an_answer_with_a_verdict_from_the_future_is_none() -> None:
    assert read_answer(msgspec.msgpack.encode((1, ["held", "perhaps"]))) is None


@given(st.binary(max_size=200))
def test_no_bytes_raise(message: bytes) -> None:
    assert read_request(message) is None or isinstance(read_request(message), Handshake | Batch)
    assert read_answer(message) is None or isinstance(read_answer(message), tuple)
