"""Shared by the scripts of Python clients: read the questions from standard input, print one JSON line per check.

A script runs in an environment of its own, which has the clients and nothing of this project.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """One prompt, as chat and as text. `then`: the tool's result, another question; mostly empty."""

    name: str
    messages: Any
    prompt: str
    then: str


class Task:
    """The server and the questions for one script."""

    def __init__(self) -> None:
        asked = json.load(sys.stdin)
        self.url: str = asked["url"]
        self.model: str = asked["model"]
        self.tools: Any = asked["tools"]
        """The tools that the model calls unasked, in OpenAI's shape. `forced`: the tool that a request forces."""
        self.forced: Any = asked["forced"]
        self.schema: Json = asked["forced"]["function"]["parameters"]
        self._questions: dict[str, Iterator[Json]] = {kind: iter(each) for kind, each in asked["questions"].items()}

    def next_question(self, kind: str) -> Question:
        """The next question of a kind; no two checks share a prompt."""
        return Question(**next(self._questions[kind]))


def tell(check: str, question: Question | None = None, **got: Any) -> None:
    """Print what a check got."""
    line = {"check": check, "question": question.name if question else None, "got": got}
    print(json.dumps(line, sort_keys=True), flush=True)


def refused(check: str, error: Exception) -> None:
    """Print the exception that the client raised."""
    tell(check, error=type(error).__name__, status=getattr(error, "status_code", None))


def usage(counted: Any, prompt: str = "prompt_tokens", completion: str = "completion_tokens") -> list[int]:
    """Token counts of prompt and answer."""
    return [getattr(counted, prompt), getattr(counted, completion)]


@dataclass
class Said:
    """One answer of the chat API. It is whole, or put together from deltas, which are objects of any client."""

    text: str = ""
    reasoning: str = ""
    finish: str | None = None
    usage: list[int] | None = None
    _calls: dict[int, Json] = field(default_factory=dict)

    def add(self, said: Any) -> None:
        """Add a message, or a delta."""
        self.text += said.content or ""
        self.reasoning += getattr(said, "reasoning", None) or getattr(said, "reasoning_content", None) or ""
        for place, call in enumerate(said.tool_calls or []):
            known = self._calls.setdefault(getattr(call, "index", None) or place, {"name": "", "arguments": ""})
            known["name"] += call.function.name or ""
            known["arguments"] += call.function.arguments or ""

    def got(self) -> Json:
        """The answer as arguments for `tell`."""
        calls = [{**call, "arguments": json.loads(call["arguments"])} for call in self._calls.values()]
        told = {"text": self.text, "reasoning": self.reasoning, "finish": self.finish, "usage": self.usage}
        return {**told, "calls": calls}


def whole(answer: Any) -> Json:
    """The parts of a whole chat answer."""
    said = Said(finish=answer.choices[0].finish_reason, usage=usage(answer.usage))
    said.add(answer.choices[0].message)
    return said.got()


def streamed(chunks: Iterable[Any]) -> Json:
    """The parts of a streamed chat answer."""
    said = Said()
    for chunk in chunks:
        for choice in chunk.choices:
            said.add(choice.delta)
            said.finish = choice.finish_reason or said.finish
        if getattr(chunk, "usage", None):
            said.usage = usage(chunk.usage)
    return said.got()


def named(tool: Mapping[str, Any]) -> Json:
    """Force this tool, in OpenAI's shape."""
    return {"type": "function", "function": {"name": tool["function"]["name"]}}
