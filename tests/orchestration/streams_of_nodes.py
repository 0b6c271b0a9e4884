"""Streams as nodes write them, chunk by chunk: recorded from vLLM (tests/e2e/recorded_streams.py) and fake."""

import functools
import gzip
import itertools
import json
from pathlib import Path
from typing import NamedTuple

from pdproxy.request import Endpoint
from tests.fakes.journal import journaled
from tests.fakes.kv_transfer import FakeKvTransfer
from tests.fakes.vllm_answers import ParsedRequest

_RECORDED = Path(__file__).parent / "recorded_streams.json.gz"
_RECORD = b": pdproxy "
BODY = {"model": "m", "prompt": "a b c", "messages": [], "input": "a b c", "max_tokens": 5, "stream": True}


class Written(NamedTuple):
    """A stream with a journal: each chunk holds events, their record, or both."""

    name: str
    endpoint: Endpoint
    chunks: tuple[bytes, ...]

    @property
    def blocks(self) -> list[bytes]:
        """Events and records, each for itself."""
        return [block + b"\n\n" for block in b"".join(self.chunks).split(b"\n\n") if block]

    @property
    def events(self) -> bytes:
        """All that is no record."""
        return b"".join(block for block in self.blocks if not block.startswith(_RECORD))

    @property
    def records(self) -> bytes:
        """As a journal keeps them."""
        return b",".join(block[len(_RECORD) : -2] for block in self.blocks if block.startswith(_RECORD))

    def without_journal(self) -> "Written":
        """The same as a node without our plugin writes it: each event in a chunk of its own."""
        return self._replace(chunks=tuple(block for block in self.blocks if not block.startswith(_RECORD)))


def split(piece: bytes) -> tuple[bytes, bytes]:
    """The events of a piece, and its record."""
    at = piece.rindex(_RECORD)
    return piece[:at], piece[at + len(_RECORD) :].strip()


@functools.cache
def fake_stream(endpoint: Endpoint) -> Written:
    """Always the same one."""
    question = ParsedRequest.of(endpoint, BODY, 1)
    return Written(f"fake, {endpoint}", endpoint, journaled(question, 0, [], FakeKvTransfer()))


@functools.cache
def recorded_streams() -> tuple[Written, ...]:
    """All shapes that vLLM was asked for."""
    found = json.loads(gzip.decompress(_RECORDED.read_bytes()))
    return tuple(
        Written(each["name"], Endpoint(each["path"]), tuple(chunk.encode() for chunk in each["chunks"]))
        for each in found
    )


def cut(raw: bytes, places: list[int]) -> list[bytes]:
    """The bytes in pieces."""
    edges = [0, *sorted({place % (len(raw) + 1) for place in places}), len(raw)]
    return [raw[start:end] for start, end in itertools.pairwise(edges) if start < end]
