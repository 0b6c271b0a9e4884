"""Messages of the side channel: they survive the wire, anything else is None, and a signature covers what it must."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.messages import (
    ASK,
    HANDSHAKE,
    LONGEST_MESSAGE_NAME,
    LONGEST_QUESTION,
    META,
    MOST_QUESTIONS,
    RETURN,
    Handshake,
    MetadataQuestion,
    Question,
    QuestionBatch,
    QuestionRefusal,
    QuestionSigner,
    Reply,
    ReplySigner,
    ReturnBatch,
    Verdict,
    read_reply,
    read_request,
    write_batch,
    write_clock,
    write_metadata_question,
    write_refusal,
    write_reply,
    write_returns,
)
from connector.ticket_fields import LONGEST_NAME as LONGEST_TICKET_NAME

NAMES = st.text(max_size=40)
QUESTIONS = st.lists(st.builds(Question, NAMES, NAMES, NAMES), max_size=20)


@given(st.integers(0, 2**40), QUESTIONS)
def test_questions_survive_the_wire(number: int, questions: list[Question]) -> None:
    assert read_request(write_batch(number, questions)) == QuestionBatch(number, tuple(questions))


@given(st.integers(0, 2**40), QUESTIONS)
def test_tickets_that_go_back_survive_the_wire(number: int, tickets: list[Question]) -> None:
    assert read_request(write_returns(number, tickets)) == ReturnBatch(number, tuple(tickets))


@given(st.builds(MetadataQuestion, st.integers(0, 2**40), NAMES, st.integers(0, 9), st.integers(0, 9)))
def test_a_metadata_question_survives_the_wire(asked: MetadataQuestion) -> None:
    assert read_request(write_metadata_question(asked)) == asked


BODIES = (
    st.lists(st.sampled_from(Verdict)).map(tuple) | st.binary(max_size=40) | st.sampled_from(QuestionRefusal).map(str)
)


@given(st.builds(Reply, st.integers(0, 2**40), NAMES, BODIES))
def test_answers_survive_the_wire(answer: Reply) -> None:
    assert read_reply(write_reply(answer.number, answer.incarnation, answer.body)) == answer


def test_the_longest_batch_of_names_as_tickets_allow_them_is_short_enough() -> None:
    name = "n" * LONGEST_TICKET_NAME
    assert len(write_batch(1 << 60, [Question(name, name, "n" * 80)] * MOST_QUESTIONS)) < LONGEST_QUESTION


def test_a_refused_handshake_is_a_payload_that_no_node_accepts() -> None:
    payload = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata").NixlHandshakePayload
    read = msgspec.msgpack.Decoder(payload).decode(write_refusal("refused: why"))
    assert read.compatibility_hash == "refused: why"
    assert msgspec.msgpack.decode(write_clock(1.5)) == 1.5


def test_the_stock_handshake_is_understood() -> None:
    assert read_request(msgspec.msgpack.encode((HANDSHAKE, 0, 3))) == Handshake(0, 3)


@pytest.mark.parametrize(
    "message",
    [
        (HANDSHAKE, 0),
        (HANDSHAKE, 0, []),
        (HANDSHAKE, "0", "0"),
        (ASK, 1, 2),
        (ASK, "1", []),
        (META, 1, ["e", 0]),
        (META, 1, ["e", 0, "0"]),
        (META, 1, ["e" * (LONGEST_MESSAGE_NAME + 1), 0, 0]),
        (ASK, 1, [["a", "b"]]),
        (ASK, 1, [["a", "b", 3]]),
        (ASK, 1, [["a" * (LONGEST_MESSAGE_NAME + 1), "b", "c"]]),
        (ASK, 1, [["a", "b", "c"]] * (MOST_QUESTIONS + 1)),
        (RETURN, 1, [["a", "b"]]),
        (RETURN, 1, [["a", "b", "c"]] * (MOST_QUESTIONS + 1)),
        (b"something else", 1, []),
        {"a": 1},
        None,
        10**18,
    ],
)
def test_requests_that_mean_nothing_are_none(message: object) -> None:
    assert read_request(msgspec.msgpack.encode(message)) is None


def test_an_answer_with_a_verdict_from_the_future_is_none() -> None:
    assert read_reply(msgspec.msgpack.encode((1, "run", "", ["held", "perhaps"]))) is None


@given(st.binary(max_size=200))
def test_no_bytes_raise(message: bytes) -> None:
    assert read_request(message) is None or isinstance(
        read_request(message), Handshake | MetadataQuestion | QuestionBatch | ReturnBatch
    )
    assert read_reply(message) is None or isinstance(read_reply(message), Reply)


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
