"""The question after a read, and its answer, as bytes. Pure.

Both sides are msgpack arrays on the prefill node's side channel, next to vLLM's own handshake
(`GET_META_MSG, pipeline rank, tensor rank`):

    question   [ASK, batch, [[engine id, request id, nonce], ...]]      an empty list is a ping
    answer     [batch, [verdict, ...]]                                  in the question's order
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from connector.lease import Verdict

HANDSHAKE = b"get_meta_msg"
ASK = b"pdproxy_held"
MOST_QUESTIONS = 1024
LONGEST_MESSAGE = 1024 * 1024
LONGEST_NAME = 1024

_Name = Annotated[str, msgspec.Meta(max_length=LONGEST_NAME)]
_Items = Annotated[list[tuple[_Name, _Name, _Name]], msgspec.Meta(max_length=MOST_QUESTIONS)]
_REQUEST = msgspec.msgpack.Decoder(tuple[bytes, int, int | _Items])
_REPLY = msgspec.msgpack.Decoder(tuple[int, list[str]])


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
class Batch:
    """Several questions at once; `number` comes back with the answer."""

    number: int
    questions: tuple[Question, ...]


def read_request(message: bytes) -> Handshake | Batch | None:
    """What a decode node asks; None for anything else. Total."""
    try:
        kind, first, second = _REQUEST.decode(message)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if kind == HANDSHAKE and isinstance(second, int):
        return Handshake(first, second)
    if kind == ASK and isinstance(second, list):
        return Batch(first, tuple(Question(*item) for item in second))
    return None


def write_batch(number: int, questions: Sequence[Question]) -> bytes:
    """The bytes of a batch; at most `MOST_QUESTIONS` of them."""
    items = [(question.engine_id, question.request_id, question.nonce) for question in questions]
    return msgspec.msgpack.encode((ASK, number, items))


def write_answer(number: int, verdicts: Sequence[Verdict]) -> bytes:
    """The bytes of an answer."""
    return msgspec.msgpack.encode((number, [verdict.value for verdict in verdicts]))


def read_answer(message: bytes) -> tuple[int, list[Verdict]] | None:
    """Batch number and verdicts; None for anything else, an unknown verdict included. Total."""
    try:
        number, names = _REPLY.decode(message)
        return number, [Verdict(name) for name in names]
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError):
        return None
