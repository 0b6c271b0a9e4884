"""A signed message is genuine only from a node with a key, on this connection, in this direction."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.messages import QuestionSigner, ReplySigner

OLD, NEW, OTHER = b"the old key 16 bytes", b"the new key 16 bytes", b"another key 16 bytes"
THEIRS, OURS = b"t" * 16, b"o" * 16
MESSAGE = b"a question"


@pytest.mark.parametrize(
    ("asking", "answering", "genuine"),
    [
        ([OLD], [OLD], True),
        ([OLD], [OLD, NEW], True),
        ([NEW, OLD], [OLD, NEW], True),
        ([NEW], [NEW, OLD], True),
        ([OLD], [NEW], False),
        ([OTHER, OLD], [OLD, NEW], False),
    ],
)
def test_the_first_key_signs_and_every_key_verifies(asking: list[bytes], answering: list[bytes], genuine: bool) -> None:
    question_signer, reply_signer = QuestionSigner(asking, THEIRS, OURS), ReplySigner(answering, THEIRS, OURS)
    assert reply_signer.genuine(*question_signer.sign(MESSAGE)) is genuine
    assert question_signer.genuine(reply_signer.sign(b"an answer")) is genuine


def test_without_a_question_no_answer_is_signed() -> None:
    assert ReplySigner([OLD], THEIRS, OURS).sign(b"an answer") == (b"an answer",)


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_random_signatures_are_not_genuine(message: bytes, mac: bytes) -> None:
    assert not ReplySigner([OLD, NEW], THEIRS, OURS).genuine(message, mac)
    assert not QuestionSigner([OLD, NEW], THEIRS, OURS).genuine((message, mac))
    assert not QuestionSigner([OLD, NEW], THEIRS, OURS).genuine((message,))


@pytest.mark.parametrize(("theirs", "ours"), [(b"x" * 16, OURS), (THEIRS, b"x" * 16)])
def test_a_signature_of_another_connection_is_not_genuine(theirs: bytes, ours: bytes) -> None:
    question_signer, reply_signer = QuestionSigner([OLD], THEIRS, OURS), ReplySigner([OLD], theirs, ours)
    assert not reply_signer.genuine(*question_signer.sign(MESSAGE))


def test_a_question_is_no_answer_and_an_answer_no_question() -> None:
    question_signer, reply_signer = QuestionSigner([OLD], THEIRS, OURS), ReplySigner([OLD], THEIRS, OURS)
    asked = question_signer.sign(MESSAGE)
    assert reply_signer.genuine(*asked)
    assert not question_signer.genuine(asked)
    assert not reply_signer.genuine(*reply_signer.sign(MESSAGE))


def test_without_keys_nothing_is_signed_and_everything_is_genuine() -> None:
    question_signer = QuestionSigner([], b"", b"")
    assert question_signer.sign(MESSAGE) == (MESSAGE,)
    assert question_signer.genuine((MESSAGE,))
    assert question_signer.genuine((MESSAGE, b"a MAC"))
