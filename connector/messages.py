"""The messages between decode and prefill nodes, as bytes, and their signatures. Pure.

Side channel. All messages are msgpack arrays in one frame:

    vLLM's handshake   ["get_meta_msg", pipeline rank, tensor rank]
    its reply          two frames: vLLM's `NixlHandshakePayload`, and the prefill node's clock
    metadata question  [META, number, [engine id, pipeline rank, tensor rank]]    the same, from our own decode nodes
    its reply          [number, incarnation, "", payload]                         the payload as binary
    question batch     [ASK, number, [[engine id, request id, nonce], ...]]       an empty list is a ping
    its reply          [number, incarnation, "", [verdict, ...]]                  in the questions' order
    returns            [RETURN, number, [[engine id, request id, nonce], ...]]    tickets that will not be read
    its reply          as to a question batch                                     HELD: they are given up now
    refusal of these   [number, incarnation, reason, []]

`incarnation` names one run of a prefill node: memory that was registered in another run is gone.

Signatures. Where there are ticket keys a second frame holds the message's MAC. On every connection each side sends a
fresh random *challenge* before the first message (a property of ZMTP's READY command). The MAC is an HMAC-SHA256 over
both challenges, the message's direction, and its bytes, which hold a number; who is asked takes only numbers that
grow. What a captured message is worth to an attacker:
    on another connection, to this node or another        nothing: the challenges differ
    on the same connection, injected into it              nothing: its number was used
    sent back to its sender                               nothing: the direction differs
So a replay needs no clock to be refused. Nothing is encrypted: an observer of the packets sees ids, verdicts and the
metadata of the handshake, and can delay or cut the connection.
The first key signs, as with tickets; every key is tried, each in constant time. A reply is signed with the key
that signed the question, so that keys can be changed one node after the other.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import msgspec

HANDSHAKE = b"get_meta_msg"
ASK = b"pdproxy_held"
META = b"pdproxy_meta"
RETURN = b"pdproxy_return"
MOST_QUESTIONS = 128
LONGEST_MESSAGE_NAME = 1024
LONGEST_QUESTION = 256 * 1024
"""Bytes of a question's message. `MOST_QUESTIONS` with names as long as tickets allow take half of it."""
LONGEST_REPLY = 4 * 1024 * 1024
"""Bytes of a reply's message. The metadata of one worker grows with its cache tensors, some hundred bytes each."""
CHALLENGE_BYTES = 16
PROPERTY = b"x-pdproxy-challenge"

_Name = Annotated[str, msgspec.Meta(max_length=LONGEST_MESSAGE_NAME)]
_Items = Annotated[list[tuple[_Name, _Name, _Name]], msgspec.Meta(max_length=MOST_QUESTIONS)]
_REQUEST = msgspec.msgpack.Decoder(tuple[bytes, int, msgspec.Raw])
_QUESTIONS = msgspec.msgpack.Decoder(_Items)
_RANK = msgspec.msgpack.Decoder(tuple[_Name, int, int])
_NUMBER = msgspec.msgpack.Decoder(int)
_REPLY = msgspec.msgpack.Decoder(tuple[int, _Name, _Name, list[str] | bytes])
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError)
_DOMAIN = b"pdproxy side channel\n"
_QUESTION, _REPLY_DIRECTION = b"q", b"a"


class Verdict(StrEnum):
    """The answer to "may I use what I read?"; the values go over the wire."""

    HELD = "held"
    RELEASED_BY_YOU = "released_by_you"
    RELEASED_BY_ANOTHER = "released_by_another"
    EXPIRED = "expired"
    UNKNOWN = "unknown"

    @property
    def good(self) -> bool:
        """Whether the bytes read are certainly the ticket's."""
        return self in (Verdict.HELD, Verdict.RELEASED_BY_YOU)


class QuestionRefusal(StrEnum):
    """Why a prefill node does not answer a question; the metric's labels, and the reason in its reply."""

    UNSIGNED = "unsigned"
    BAD_SIGNATURE = "bad_signature"
    REPLAYED = "replayed"
    ANOTHER_ENGINE = "another_engine"
    NO_SUCH_RANK = "no_such_rank"


@dataclass(frozen=True, slots=True)
class Question:
    """One read to verify: the ticket's engine id and request id, and the nonce that the read carried."""

    engine_id: str
    request_id: str
    nonce: str


@dataclass(frozen=True, slots=True)
class Handshake:
    """vLLM's own question for the NIXL metadata of one worker of the prefill node."""

    pp_rank: int
    tp_rank: int


@dataclass(frozen=True, slots=True)
class MetadataQuestion:
    """The same by our own decode nodes, which name the engine; `number` comes back with the reply."""

    number: int
    engine_id: str
    pp_rank: int
    tp_rank: int


@dataclass(frozen=True, slots=True)
class QuestionBatch:
    """Several questions at once; `number` comes back with the reply."""

    number: int
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class ReturnBatch:
    """Tickets that will not be read, or not any more: their leases end, each as if a read with this nonce had."""

    number: int
    questions: tuple[Question, ...]


SideRequest = Handshake | MetadataQuestion | QuestionBatch | ReturnBatch


@dataclass(frozen=True, slots=True)
class Reply:
    """`body`: verdicts to a batch of questions or returns, a payload to a metadata question; to each the reason of a
    refusal."""

    number: int
    incarnation: str
    body: tuple[Verdict, ...] | bytes | str


def read_request(message: bytes) -> SideRequest | None:
    """A message that asks for a reply; None for anything else. Never raises."""
    try:
        kind, number, rest = _REQUEST.decode(message)
        if kind == HANDSHAKE:
            return Handshake(number, _NUMBER.decode(rest))
        if kind == META:
            return MetadataQuestion(number, *_RANK.decode(rest))
        if kind == ASK:
            return QuestionBatch(number, tuple(Question(*item) for item in _QUESTIONS.decode(rest)))
        if kind == RETURN:
            return ReturnBatch(number, tuple(Question(*item) for item in _QUESTIONS.decode(rest)))
    except _UNREADABLE:
        return None
    return None


def write_batch(number: int, questions: Sequence[Question]) -> bytes:
    """The bytes of a batch; at most `MOST_QUESTIONS` of them."""
    return _write_questions(ASK, number, questions)


def write_returns(number: int, tickets: Sequence[Question]) -> bytes:
    """The bytes of a batch of tickets to give back; at most `MOST_QUESTIONS` of them."""
    return _write_questions(RETURN, number, tickets)


def _write_questions(kind: bytes, number: int, questions: Sequence[Question]) -> bytes:
    items = [(question.engine_id, question.request_id, question.nonce) for question in questions]
    return msgspec.msgpack.encode((kind, number, items))


def write_metadata_question(question: MetadataQuestion) -> bytes:
    """The bytes of a metadata question."""
    return msgspec.msgpack.encode((META, question.number, (question.engine_id, question.pp_rank, question.tp_rank)))


def write_reply(number: int, incarnation: str, body: Sequence[Verdict] | bytes | str) -> bytes:
    """The bytes of a reply."""
    if isinstance(body, str):
        return msgspec.msgpack.encode((number, incarnation, body, ()))
    plain = body if isinstance(body, bytes) else [verdict.value for verdict in body]
    return msgspec.msgpack.encode((number, incarnation, "", plain))


def read_reply(message: bytes) -> Reply | None:
    """A reply; None for anything else, an unknown verdict included. Never raises."""
    try:
        number, incarnation, reason, body = _REPLY.decode(message)
        answer = body if isinstance(body, bytes) else tuple(map(Verdict, body))
        return Reply(number, incarnation, reason or answer)
    except _UNREADABLE:
        return None


def write_clock(seconds: float) -> bytes:
    """The second frame of the reply to vLLM's handshake."""
    return msgspec.msgpack.encode(seconds)


def write_refusal(sentence: str) -> bytes:
    """A `NixlHandshakePayload` that no node accepts: vLLM logs the hash that does not match its own, our sentence."""
    return msgspec.msgpack.encode({"compatibility_hash": sentence, "agent_metadata_bytes": b""})


class QuestionSigner:
    """The end of one connection that asks."""

    def __init__(self, keys: Sequence[bytes], theirs: bytes, ours: bytes) -> None:
        self._keys = keys
        self._challenges = theirs + ours

    def sign(self, message: bytes) -> tuple[bytes, ...]:
        """The frames of a message: with its MAC where there is a key."""
        return (message, _mac(self._keys[0], self._challenges, _QUESTION, message)) if self._keys else (message,)

    def genuine(self, frames: Sequence[bytes]) -> bool:
        """Whether a reply (message, and MAC if any) comes from a node with one of our keys; without keys always."""
        if not self._keys:
            return len(frames) in (1, 2)
        return len(frames) == 2 and _find(self._keys, self._challenges, _REPLY_DIRECTION, *frames) is not None


class ReplySigner:
    """The end of one connection that replies."""

    def __init__(self, keys: Sequence[bytes], ours: bytes, theirs: bytes) -> None:
        self._keys = keys
        self._challenges = ours + theirs
        self._key = b""

    def genuine(self, message: bytes, mac: bytes) -> bool:
        """Whether a question comes from a node with one of our keys."""
        key = _find(self._keys, self._challenges, _QUESTION, message, mac)
        self._key = key or self._key
        return key is not None

    def sign(self, message: bytes) -> tuple[bytes, ...]:
        """The frames of a reply: with its MAC, by the key of the last genuine question, if there was one."""
        return (message, _mac(self._key, self._challenges, _REPLY_DIRECTION, message)) if self._key else (message,)


def _mac(key: bytes, challenges: bytes, direction: bytes, message: bytes) -> bytes:
    return hmac.digest(key, _DOMAIN + challenges + direction + message, "sha256")


def _find(keys: Sequence[bytes], challenges: bytes, direction: bytes, message: bytes, mac: bytes) -> bytes | None:
    """The key that made `mac`; every key is tried."""
    known = tuple(keys)  # of a file they may be others at the next look
    made = [hmac.compare_digest(_mac(key, challenges, direction, message), mac) for key in known]
    return known[made.index(True)] if any(made) else None
