"""Traces made from a seed: chats, agents, documents, one hot prefix, no reuse. Lengths in tokens, times in seconds."""

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from deploy.bench.traces import Prompt, Request, Segment, Trace, from_arrivals


class _Writer:
    """Collects requests; gives each new text a name of its own."""

    def __init__(self, name: str, seed: int) -> None:
        self.dice = random.Random(f"{name} {seed}")
        self._name = name
        self._names = itertools.count(self.dice.getrandbits(40) << 20)
        self._requests: list[Request] = []

    def text(self, tokens: float) -> Segment:
        """New text."""
        return Segment(next(self._names), max(1, round(tokens)))

    def about(self, tokens: float) -> Segment:
        """New text of some length around that."""
        return self.text(self.dice.uniform(0.5, 1.5) * tokens)

    def add_request(self, at: float, after: int | None, session: int | None, prompt: Prompt, output: int) -> int:
        """Add a request; its number."""
        self._requests.append(Request(at, after, session, prompt, output))
        return len(self._requests) - 1

    def trace(self) -> Trace:
        """All of it."""
        return Trace(self._name, tuple(self._requests))


@dataclasses.dataclass(frozen=True, slots=True)
class Chat:
    """Conversations over shared system prompts, which begin within a time, each with its pauses."""

    conversations: int = 36
    turns: int = 6
    systems: int = 4
    system: int = 1300
    question: int = 300
    answer: int = 150
    within: float = 20.0
    pause: float = 3.0


def chat(shape: Chat = Chat(), seed: int = 1, name: str = "chat") -> Trace:
    """Each turn repeats all before it."""
    writer = _Writer(name, seed)
    systems = [writer.text(shape.system) for _ in range(shape.systems)]
    for number in range(shape.conversations):
        prompt: Prompt = (systems[number % shape.systems],)
        at, last = writer.dice.uniform(0, shape.within), None
        for _ in range(shape.turns):
            answer = writer.about(shape.answer)
            prompt = (*prompt, writer.about(shape.question))
            last = writer.add_request(at, last, number, prompt, answer.tokens)
            prompt, at = (*prompt, answer), writer.dice.expovariate(1 / shape.pause)
    return writer.trace()


@dataclasses.dataclass(frozen=True, slots=True)
class Agents:
    """Agents with tools: a call's result is added to the context; some calls start sub-agents, which go on from it."""

    agents: int = 16
    calls: int = 14
    system: int = 4000
    kinds: int = 2
    task: int = 600
    result: int = 900
    output: int = 120
    within: float = 30.0
    tool: float = 1.0
    tools: tuple[float, float] | None = None
    """The least and the most seconds of a tool, all lengths between them as likely on a logarithmic scale; None: around
    ``tool``."""
    sub_agents: float = 0.12
    """The chance of a call to start two of them."""
    sub_calls: int = 4
    abandoned: float = 0.0
    """The chance of an agent to be left alone at some call."""


def agents(shape: Agents = Agents(), seed: int = 1, name: str = "agents") -> Trace:
    """A sub-agent is of its parent's session, as its client's header would say, and is not waited for."""
    writer = _Writer(name, seed)
    systems = [writer.text(shape.system) for _ in range(shape.kinds)]
    for number in range(shape.agents):
        prompt: Prompt = (systems[number % shape.kinds], writer.about(shape.task))
        first, calls = writer.dice.uniform(0, shape.within), shape.calls
        if shape.abandoned and writer.dice.random() < shape.abandoned:
            calls = writer.dice.randrange(1, calls)
        for call, context in _calls(writer, shape, number, prompt, first, None, calls):
            if writer.dice.random() < shape.sub_agents:
                for _ in range(2):
                    task = (*context, writer.about(shape.task))
                    wait = _pause(writer, shape)
                    for _ in _calls(writer, shape, number, task, wait, call, shape.sub_calls):
                        pass
    return writer.trace()


def _calls(
    writer: _Writer, shape: Agents, session: int, prompt: Prompt, at: float, last: int | None, calls: int
) -> Iterator[tuple[int, Prompt]]:
    """One call after the other; the number of each, and the context after its result."""
    for _ in range(calls):
        said = writer.about(shape.output)
        last = writer.add_request(at, last, session, prompt, said.tokens)
        prompt = (*prompt, said, writer.about(shape.result))
        at = _pause(writer, shape)
        yield last, prompt


def _pause(writer: _Writer, shape: Agents) -> float:
    """Seconds until a tool has its result."""
    if shape.tools is None:
        return writer.dice.expovariate(1 / shape.tool)
    least, most = shape.tools
    return math.exp(writer.dice.uniform(math.log(least), math.log(most)))


@dataclasses.dataclass(frozen=True, slots=True)
class Documents:
    """Long texts, each followed by questions of several users."""

    documents: int = 24
    document: int = 6000
    questions: int = 6
    question: int = 80
    output: int = 80
    within: float = 45.0
    gap: float = 4.0


def documents(shape: Documents = Documents(), seed: int = 1, name: str = "documents") -> Trace:
    """Each question is asked by another user, so that no session says which belong together."""
    writer = _Writer(name, seed)
    users, asked = itertools.count(), list[Request]()
    for _ in range(shape.documents):
        document, at = writer.about(shape.document), writer.dice.uniform(0, shape.within)
        for _ in range(shape.questions):
            asked.append(Request(at, None, next(users), (document, writer.about(shape.question)), shape.output))
            at += writer.dice.expovariate(1 / shape.gap)
    return from_arrivals(name, asked)


@dataclasses.dataclass(frozen=True, slots=True)
class Single:
    """Prompts that come one by one, after a prefix that all of them share; 0 tokens for none."""

    prefix: int
    requests: int
    prompt: int
    output: int = 60
    within: float = 30.0


def single(shape: Single, seed: int = 1, name: str = "single") -> Trace:
    """Each of another user."""
    writer = _Writer(name, seed)
    shared = (writer.text(shape.prefix),) if shape.prefix else ()
    times = sorted(writer.dice.uniform(0, shape.within) for _ in range(shape.requests))
    for number, at in enumerate(times):
        writer.add_request(at, None, number, (*shared, writer.about(shape.prompt)), shape.output)
    return writer.trace()


@dataclasses.dataclass(frozen=True, slots=True)
class Turning:
    """Two kinds of requests by turns, each for a while: long prompts with short answers, and the reverse. Nothing is
    shared.

    Attributes:
        rates: requests in a second, of each kind.
        prompts, outputs: tokens, of each kind.
        seconds: that a kind lasts.
        turns: kinds in all.
    """

    rates: tuple[float, float]
    prompts: tuple[int, int] = (4000, 200)
    outputs: tuple[int, int] = (40, 500)
    seconds: float = 60.0
    turns: int = 4


def turning(shape: Turning, seed: int = 1, name: str = "turning") -> Trace:
    """Requests come at random moments."""
    writer = _Writer(name, seed)
    for turn in range(shape.turns):
        kind, at = turn % 2, turn * shape.seconds
        while (at := at + writer.dice.expovariate(shape.rates[kind])) < (turn + 1) * shape.seconds:
            output = max(2, round(writer.dice.uniform(0.5, 1.5) * shape.outputs[kind]))
            writer.add_request(at, None, None, (writer.about(shape.prompts[kind]),), output)
    return writer.trace()


TOOLS = Agents(agents=24, calls=10, within=60.0, tools=(1.0, 120.0), sub_agents=0.15, abandoned=0.25)
"""Tools that take up to two minutes, sub-agents beside each other, and one agent in four that is left alone: more than
the caches hold."""
ALL: Mapping[str, Callable[[int], Trace]] = MappingProxyType(
    {
        "chat": lambda seed: chat(seed=seed),
        "chat-busy": lambda seed: chat(Chat(200, systems=12, within=60.0), seed, "chat-busy"),
        "agents": lambda seed: agents(seed=seed),
        "agents-tools": lambda seed: agents(TOOLS, seed, "agents-tools"),
        "documents": lambda seed: documents(seed=seed),
        "hot-prefix": lambda seed: single(Single(4000, 300, 400), seed, "hot-prefix"),
        "no-reuse": lambda seed: single(Single(0, 200, 1800), seed, "no-reuse"),
    }
)
"""The traces of the report for 3 + 2 nodes, each made from a seed."""

LARGE: Mapping[str, Callable[[int], Trace]] = MappingProxyType(
    {
        "chat-large": lambda seed: chat(Chat(1500, systems=24, within=20.0), seed, "chat-large"),
        "agents-large": lambda seed: agents(Agents(200, kinds=6), seed, "agents-large"),
    }
)
"""The traces for 64 + 64 nodes."""
