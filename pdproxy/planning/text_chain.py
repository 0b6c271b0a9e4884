"""Prompts cut into pieces, so that what two of them begin with is found without comparing texts. Pure.

A prompt is a chain of *marks*: one after each `CHUNK` bytes of a part of its text, and one at each part's end, each a
hash of all that comes before it.
"""

import itertools
from array import array
from collections.abc import Sequence

import msgspec

CHUNK = 512
"""Bytes between two marks of one part."""
IDS = 128
"""Token ids between two marks, where the client sent ids."""


Piece = bytes | tuple[int, ...]
"""A piece of a prompt: text, or token ids."""


class Chain(msgspec.Struct, frozen=True):
    """A prompt's marks.

    Attributes:
        model: as clients name it.
        hashes: of everything up to each mark. These and ``ends`` are arrays: they are kept while the request lives,
            and a tuple of integers has six times their size.
        ends: where each mark is: bytes from the beginning, or tokens.
        pieces: what is between each mark and the one before it; none once `TextIndex.refined` has looked at them.
        tail: of a completion's prompt whose last piece is shorter than others: the hash of the mark before that piece,
            and its length. Of a chat there is none: a template puts something between a message's end and the answer.
        in_tokens: the client sent token ids, so that ``ends`` are tokens.
    """

    model: str
    hashes: Sequence[int]
    ends: Sequence[int]
    pieces: tuple[Piece, ...] = ()
    tail: tuple[int, int] | None = None
    in_tokens: bool = False


def chain_of_text(model: str, salt: str, parts: Sequence[bytes]) -> Chain:
    """The marks of a text in parts, each of which a later prompt has whole or not at all."""
    return _chain(model, salt, [piece for part in parts for piece in _pieces(part)])


def chain_of_completion(model: str, salt: str, prompt: bytes) -> Chain:
    """The marks of a text from whose end later ones may go on."""
    return _chain(model, salt, _pieces(prompt), goes_on_after=CHUNK)


def _pieces(text: bytes) -> list[bytes]:
    return [text[begin : begin + CHUNK] for begin in range(0, len(text) or 1, CHUNK)]


def chain_of_ids(model: str, salt: str, ids: Sequence[int]) -> Chain:
    """The marks of token ids."""
    pieces = [tuple(ids[begin : begin + IDS]) for begin in range(0, len(ids), IDS)]
    return _chain(model, salt, pieces, goes_on_after=IDS, in_tokens=True)


def _chain(model: str, salt: str, pieces: Sequence[Piece], *, goes_on_after: int = 0, in_tokens: bool = False) -> Chain:
    """``goes_on_after``: the size of a whole piece, where later prompts may go on from within a shorter last one."""
    last = hash(salt)
    hashes = array("q", [last := hash((last, piece)) for piece in pieces])
    ends, tail = array("q", itertools.accumulate(map(len, pieces))), None
    if len(pieces) > 1 and len(pieces[-1]) < goes_on_after:
        tail = hashes[-2], len(pieces[-1])
    return Chain(model, hashes, ends, tuple(pieces), tail, in_tokens)
