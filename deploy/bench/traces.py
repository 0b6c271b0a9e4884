"""Traces: who asks what, and when. Their prompts are made of segments, so that whoever shares a segment shares tokens.

`generators` makes them from a seed, `recorded` reads them from files. A request comes at a time, or so long after the
end of another one. The token ids of a prompt follow from its segments alone.
"""

import dataclasses
import functools
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from deploy.bench.hybrid_cache import HashedPrompt

VOCABULARY = 4096
"""Token ids are less than it."""
_LOW = (1 << 64) - 1


class Segment(NamedTuple):
    """A run of tokens: one of the same name and fewer tokens is a beginning of it."""

    name: int
    tokens: int


Prompt = tuple[Segment, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One prompt of a trace.

    Attributes:
        at: seconds since the trace began; or, where there is an ``after``, since that one has ended.
        after: the number of the request that must have ended before; None for none.
        session: what a client would say in a session header; None where it has none.
        output: tokens that are generated.
    """

    at: float
    after: int | None
    session: int | None
    prompt: Prompt
    output: int

    @property
    def tokens(self) -> int:
        """Tokens of the prompt."""
        return length(self.prompt)


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """Requests by number; one that comes after another stands behind it."""

    name: str
    requests: tuple[Request, ...]

    @property
    def tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(request.tokens for request in self.requests)

    def followers(self) -> dict[int, list[int]]:
        """The numbers of the requests that come after each request."""
        found: dict[int, list[int]] = {}
        for number, request in enumerate(self.requests):
            if request.after is not None:
                found.setdefault(request.after, []).append(number)
        return found


def length(prompt: Iterable[Segment]) -> int:
    """Tokens of a prompt."""
    return sum(segment.tokens for segment in prompt)


def token_ids(prompt: Prompt) -> list[int]:
    """The prompt as a model sees it."""
    return list(itertools.chain.from_iterable(_tokens_of(segment) for segment in prompt))


@functools.lru_cache(maxsize=4096)
def _tokens_of(segment: Segment) -> tuple[int, ...]:
    return tuple(random.Random(segment.name).choices(range(1, VOCABULARY), k=segment.tokens))


def hashed(prompt: Prompt, step: int) -> HashedPrompt:
    """Names for the beginnings of a prompt, made of its segments: quick, and equal where the tokens are.

    That holds for prompts that cut their common tokens into the same segments, as those of one trace do.
    """
    tokens, found, parent = length(prompt), list[int](), 0
    for pieces in itertools.islice(_steps(prompt, step), tokens // step):
        parent = hash((parent, pieces)) & _LOW
        found.append(parent)
    return HashedPrompt(tokens, found)


def _steps(prompt: Prompt, step: int) -> Iterator[tuple[tuple[int, int, int], ...]]:
    """For each run of ``step`` tokens: the parts of segments that it is made of, by name, begin and end."""
    pieces, room = list[tuple[int, int, int]](), step
    for name, tokens in prompt:
        begins = 0
        while begins < tokens:
            ends = min(tokens, begins + room)
            pieces.append((name, begins, ends))
            room -= ends - begins
            begins = ends
            if not room:
                yield tuple(pieces)
                pieces, room = [], step


def without_sessions(trace: Trace) -> Trace:
    """The same, of clients that name no session."""
    return Trace(trace.name, tuple(dataclasses.replace(request, session=None) for request in trace.requests))


def from_arrivals(name: str, requests: Sequence[Request]) -> Trace:
    """A trace of requests of which none waits for another, in the order of their times."""
    return Trace(name, tuple(sorted(requests, key=lambda request: request.at)))
