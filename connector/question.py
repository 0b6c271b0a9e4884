"""What a decode node asks a prefill node's side channel, and the answers, as bytes. Pure.

All are msgpack arrays in one frame; where there are ticket keys a second frame holds their MAC (see `proof`):

    vLLM's handshake   ["get_meta_msg", pipeline rank, tensor rank]
    its answer         two frames: vLLM's `NixlHandshakePayload`, and the prefill node's clock
    introduction       [META, number, [engine id, pipeline rank, tensor rank]]    the same, for our own decode nodes
    its answer         [number, incarnation, "", payload]                         the payload as binary
    question           [ASK, number, [[engine id, request id, nonce], ...]]       an empty list is a ping
    its answer         [number, incarnation, "", [verdict, ...]]                  in the question's order
    refusal of either  [number, incarnation, reason, []]

`incarnation` names one run of a prefill node: memory that was registered in another run is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import msgspec

from connector.lease import Verdict

HANDSHAKE = b"get_meta_msg"
ASK = b"pdproxy_held"
META = b"pdproxy_meta"
MOST_QUESTIONS = 128
LONGEST_NAME = 1024
LONGEST_QUESTION = 256 * 1024
"""Bytes of a question's message. `MOST_QUESTIONS` with names as long as tickets allow take half of it."""
LONGEST_ANSWER = 4 * 1024 * 1024
"""Bytes of an answer's message. The metadata of one worker grows with its cache tensors, some hundred bytes each."""

_Name = Annotated[str, msgspec.Meta(max_length=LONGEST_NAME)]
_Items = Annotated[list[tuple[_Name, _Name, _Name]], msgspec.Meta(max_length=MOST_QUESTIONS)]
_REQUEST = msgspec.msgpack.Decoder(tuple[bytes, int, msgspec.Raw])
_QUESTIONS = msgspec.msgpack.Decoder(_Items)
_RANK = msgspec.msgpack.Decoder(tuple[_Name, int, int])
_NUMBER = msgspec.msgpack.Decoder(int)
_REPLY = msgspec.msgpack.Decoder(tuple[int, _Name, _Name, list[str] | bytes])
_CLOCK = msgspec.msgpack.Encoder()
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, ValueError)


class Refused(StrEnum):
    """Why a prefill node answers nothing usable; labels of its metric, and in answers to us."""

    UNSIGNED = "unsigned"
    BAD_SIGNATURE = "bad_signature"
    REPLAYED = "replayed"
    ANOTHER_ENGINE = "another_engine"
    NO_SUCH_RANK = "no_such_rank"


@dataclass(frozen=True, slots=True)
class Question:
    """One read to judge: the ticket's engine id and request id, and the nonce that the read carried."""

    engine_id: str
    request_id: str
    nonce: str


@dataclass(frozen=True, slots=True)
class Handshake:
    """vLLM's own question: the NIXL metadata of one worker of the prefill node."""

    pp_rank: int
    tp_rank: int


@dataclass(frozen=True, slots=True)
class Introduce:
    """The same by our own decode nodes, who know which engine they mean; `number` comes back with the answer."""

    number: int
    engine_id: str
    pp_rank: int
    tp_rank: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Several questions at once; `number` comes back with the answer."""

    number: int
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """`body`: verdicts to a batch, a payload to an introduction, the reason of a refusal to either."""

    number: int
    incarnation: str
    body: tuple[Verdict, ...] | bytes | str


def read_request(message: bytes) -> Handshake | Introduce | Batch | None:
    """What a decode node asks; None for anything else. Total."""
    try:
        kind, number, rest = _REQUEST.decode(message)
        if kind == HANDSHAKE:
            return Handshake(number, _NUMBER.decode(rest))
        if kind == META:
            return Introduce(number, *_RANK.decode(rest))
        if kind == ASK:
            return Batch(number, tuple(Question(*item) for item in _QUESTIONS.decode(rest)))
    except _UNREADABLE:
        return None
    return None


def write_batch(number: int, questions: Sequence[Question]) -> bytes:
    """The bytes of a batch; at most `MOST_QUESTIONS` of them."""
    items = [(question.engine_id, question.request_id, question.nonce) for question in questions]
    return msgspec.msgpack.encode((ASK, number, items))


def write_introduce(asked: Introduce) -> bytes:
    """The bytes of an introduction."""
    return msgspec.msgpack.encode((META, asked.number, (asked.engine_id, asked.pp_rank, asked.tp_rank)))


def write_answer(number: int, incarnation: str, body: Sequence[Verdict] | bytes | str) -> bytes:
    """The bytes of an answer."""
    if isinstance(body, str):
        return msgspec.msgpack.encode((number, incarnation, body, ()))
    plain = body if isinstance(body, bytes) else [verdict.value for verdict in body]
    return msgspec.msgpack.encode((number, incarnation, "", plain))


def read_answer(message: bytes) -> Answer | None:
    """An answer; None for anything else, an unknown verdict included. Total."""
    try:
        number, incarnation, reason, body = _REPLY.decode(message)
        said = body if isinstance(body, bytes) else tuple(map(Verdict, body))
        return Answer(number, incarnation, reason or said)
    except _UNREADABLE:
        return None


def write_clock(seconds: float) -> bytes:
    """The second frame of the answer to vLLM's handshake."""
    return _CLOCK.encode(seconds)


def write_refusal(sentence: str) -> bytes:
    """A `NixlHandshakePayload` that no node accepts: vLLM logs the hash that does not match its own, our sentence."""
    return msgspec.msgpack.encode({"compatibility_hash": sentence, "agent_metadata_bytes": b""})
