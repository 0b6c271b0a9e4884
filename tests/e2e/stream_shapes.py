"""The shapes of streams that must continue when their node dies: the requests, and the properties of an uncut answer.

The tiny model recites a list from a name on, five tokens a line, with high confidence. All shapes build on that. Names
in the list end its reasoning, and begin and end its tool calls (quiz_parsers.py). A grammar makes it produce other
text; penalties and temperature make it leave the list. Each answer has 70 to 300 tokens.

Answers can be compared only if rounding cannot change them. A node that takes a stream over computes the tokens so far
as one prompt, whose logits differ in the last bits of a bfloat16. Where the model recites, its best token leads by
several nats. For other shapes, greedy or seeded, a seed was chosen whose answer stays the same when each logit is moved
at random by up to NUDGE (`nudged`; a test checks it).
"""

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deploy.local.model.quiz import NAMES, RECITE, VOCABULARY, Question, Quiz
from deploy.local.node import SERVED_NAME
from tests.e2e.quiz_parsers import CALL_BEGINS, CALL_ENDS, FLAGS, THINKING_END
from tests.e2e.stream_contents import Contents

Json = dict[str, Any]
Check = Callable[[Contents], bool]

LINES = 60
RECITED = 28
LAST = RECITED - 1
MOST_TOKENS = 400
NUDGE = 0.2
"""The largest shift of a logit. Two ways to compute one differed by 0.125, the last bit of a bfloat16 above 16."""
RESERVED = frozenset({THINKING_END, CALL_BEGINS, CALL_ENDS})
PLAIN_NAMES = [name for name in NAMES if name not in RESERVED]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"

NODE_FLAGS = (
    *FLAGS,
    *("--structured-outputs-config.backend", "xgrammar"),
    *("--structured-outputs-config.disable_any_whitespace", "true"),
)
"""Flags of every node. A schema allows white space anywhere, and the model produces many newlines."""


@dataclass(frozen=True)
class Shape:
    """One shape of stream.

    `shows`: the kinds of content (`Contents.kinds`) that an uncut answer must have. `holds`: more conditions, so that
    the feature of the shape had an effect. `choices`: how many.
    """

    name: str
    path: str
    body: Mapping[str, Any]
    shows: frozenset[str]
    holds: Check = lambda _: True
    choices: int = 1

    def why_not(self, uncut: Contents) -> str:
        """Why this answer does not show the shape; empty where it does."""
        if missing := self.shows - uncut.kinds:
            return f"{self.name}: no {', '.join(sorted(missing))} in {uncut.places}"
        if "errors" in uncut.places or not self.holds(uncut):
            return f"{self.name}: does not hold for {uncut.places}"
        if self.path in {COMPLETIONS, CHAT} and any(
            f"choice {index} finish_reason" not in uncut.places for index in range(self.choices)
        ):
            return f"{self.name}: not {self.choices} choices"
        return ""


def nudged(body: Mapping[str, Any], seed: int) -> Json:
    """The same request with every logit moved a little at random. Not for messages, which have no `logit_bias`."""
    source = random.Random(seed)
    asked = body.get("logit_bias", {})
    moved = {str(token): asked.get(str(token), 0) + source.uniform(-NUDGE, NUDGE) for token in range(VOCABULARY)}
    return {**body, "logit_bias": moved}


def recital(seed: int, marks: Mapping[int, str] | None = None) -> Quiz:
    """Ask for the last RECITED lines of a list of LINES. `marks`: names at places counted from the first of them."""
    source = random.Random(seed)
    names = source.sample(PLAIN_NAMES, LINES)
    for place, name in (marks or {}).items():
        names[LINES - RECITED + place] = name
    lines = tuple((name, f"{source.randrange(1000):03d}") for name in names)
    return Quiz(lines, (Question(RECITE, names[-RECITED]),), tuple(names))


def thinking(seed: int) -> Quiz:
    """A request whose answer is half reasoning."""
    return recital(seed, {13: THINKING_END})


def calling(seed: int) -> Quiz:
    """A request whose answer has content and then a tool call."""
    return recital(seed, {4: CALL_BEGINS, LAST: CALL_ENDS})


def thinking_and_calling(seed: int) -> Quiz:
    """A request whose answer has reasoning, content and a tool call."""
    return recital(seed, {7: THINKING_END, 11: CALL_BEGINS, LAST: CALL_ENDS})


def shapes() -> list[Shape]:
    """All shapes."""
    return [*_plain(), *_parsed(), *_constrained(), *_sampled(), *_other_apis()]


def _plain() -> Iterator[Shape]:
    text, content = frozenset({"text"}), frozenset({"content"})
    yield Shape("completion", COMPLETIONS, _completion(recital(1)), text, _says(recital(1)))
    yield Shape("chat", CHAT, _chat(recital(2)), content, _says(recital(2)))
    told = _completion(recital(3), echo=True)
    yield Shape("echo", COMPLETIONS, told, text, lambda said: said.text("text").startswith(recital(3).prompt()))
    ids = _chat(
        recital(4), return_token_ids=True, stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    yield Shape("token ids, usage in each chunk", CHAT, ids, content, _has("choice 0 token_ids"))
    likely = _chat(recital(5), logprobs=True, top_logprobs=3)
    yield Shape("log-probabilities, chat", CHAT, likely, content, _has("choice 0 logprobs"))
    likely = _completion(recital(6), logprobs=2)
    yield Shape("log-probabilities, completion", COMPLETIONS, likely, text, _has("choice 0 text_offset"))
    yield from _stopped()


def _stopped() -> Iterator[Shape]:
    """A stop string of three tokens' pieces near the end, and one that almost matches, so that text is held back."""
    asked = recital(7)
    end = len(asked.answer) * 4 // 5
    almost = asked.answer[end // 2 : end // 2 + 40] + "?"
    stopped = _completion(asked, stop=[asked.answer[end : end + 12], almost])
    yield Shape(
        "stop strings", COMPLETIONS, stopped, frozenset({"text"}), lambda said: said.text("text") == asked.answer[:end]
    )


def _parsed() -> Iterator[Shape]:
    both = frozenset({"reasoning", "content"})
    yield Shape("reasoning", CHAT, _chat(thinking(11)), both)
    hidden = _chat(thinking(12), include_reasoning=False)
    yield Shape("reasoning, hidden", CHAT, hidden, frozenset({"content"}), _begins_after_thinking(thinking(12)))
    call = _chat(calling(13), tools=_tools())
    yield Shape("tool call", CHAT, call, frozenset({"content", "tool"}), _calls(calling(13)))
    call = _chat(thinking_and_calling(14), tools=_tools())
    yield Shape("reasoning and a tool call", CHAT, call, both | {"tool"}, _calls(thinking_and_calling(14)))


def _constrained() -> Iterator[Shape]:
    asked = recital(40)
    body = _chat(asked, response_format=_json_schema(asked))
    yield Shape("json_schema", CHAT, body, frozenset({"content"}), _fits(asked, "content"))
    asked = thinking(40)
    body = _chat(asked, response_format=_json_schema(asked))
    yield Shape("reasoning, then json_schema", CHAT, body, frozenset({"reasoning", "content"}), _fits(asked, "content"))
    asked = recital(41)
    tool = {"type": "function", "function": {"name": "note", "parameters": _schema(asked)}}
    named = _chat(asked, tools=[tool], tool_choice={"type": "function", "function": {"name": "note"}})
    yield Shape("named tool", CHAT, named, frozenset({"tool"}), _fits(asked, "tool"))
    asked = recital(47)
    pattern = "( [0-4]{2}[5-9]\n(" + "|".join(name for name, _ in asked.lines) + ")){16} 000"
    body = _completion(asked, structured_outputs={"regex": pattern})
    yield Shape(
        "regex",
        COMPLETIONS,
        body,
        frozenset({"text"}),
        lambda said: re.fullmatch(pattern, said.text("text")) is not None,
    )


def _sampled() -> Iterator[Shape]:
    content = frozenset({"content"})
    asked = recital(80)
    body = _chat(asked, presence_penalty=1.0, frequency_penalty=-0.3, ignore_eos=True, max_tokens=170)
    yield Shape("penalties", CHAT, body, content, lambda said: said.text("content").endswith("\n" * 9))
    asked = recital(41)
    longer = _completion(asked, min_tokens=180, max_tokens=260, bad_words=[asked.lines[-10][0]])
    yield Shape("min_tokens and bad_words", COMPLETIONS, longer, frozenset({"text"}), _strays(asked))
    asked = recital(3)
    seeded = _chat(asked, temperature=1.5, seed=3, max_tokens=200)
    yield Shape("seeded", CHAT, seeded, content, _strays(asked))
    asked = recital(116)
    body = _chat(asked, n=3, temperature=1.4, seed=116, max_tokens=100)
    yield Shape(
        "three choices",
        CHAT,
        body,
        content,
        lambda said: len({said.text("content", choice=i) for i in range(3)}) == 3,
        3,
    )


def _other_apis() -> Iterator[Shape]:
    told = frozenset({"thinking_delta", "text_delta"})
    yield Shape("messages, reasoning", MESSAGES, _messages(thinking(31)), told)
    call = _messages(thinking_and_calling(32), tools=[{"name": name, "input_schema": {}} for name in TOOLS])
    yield Shape("messages, tool call", MESSAGES, call, told | {"input_json_delta"})
    told = frozenset({"response.reasoning_text.delta", "response.output_text.delta"})
    yield Shape("responses, reasoning", RESPONSES, _responses(thinking(33)), told)
    tools = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in TOOLS]
    call = _responses(thinking_and_calling(34), tools=tools)
    yield Shape("responses, tool call", RESPONSES, call, told | {"response.function_call_arguments.delta"})


TOOLS = ("note", "tally")


def _tools() -> list[Json]:
    return [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in TOOLS]


def _schema(asked: Quiz) -> Json:
    """A number for each of ten names, in order, so that each token has a place of its own in the grammar."""
    names = [name for name, _ in asked.lines[-RECITED:][:10]]
    number = {"type": "string", "pattern": "^[0-9]{3}$"}
    return {
        "type": "object",
        "properties": dict.fromkeys(names, number),
        "required": names,
        "additionalProperties": False,
    }


def _json_schema(asked: Quiz) -> Json:
    return {"type": "json_schema", "json_schema": {"name": "numbers", "schema": _schema(asked)}}


def _base() -> Json:
    return {"model": SERVED_NAME, "stream": True, "temperature": 0}


def _completion(asked: Quiz, **more: Any) -> Json:
    usage = {"include_usage": True}
    return {**_base(), "max_tokens": MOST_TOKENS, "stream_options": usage, "prompt": asked.prompt(), **more}


def _chat(asked: Quiz, **more: Any) -> Json:
    usage = {"include_usage": True}
    return {**_base(), "max_tokens": MOST_TOKENS, "stream_options": usage, "messages": asked.messages(), **more}


def _messages(asked: Quiz, **more: Any) -> Json:
    return {**_base(), "max_tokens": MOST_TOKENS, "messages": asked.messages(), **more}


def _responses(asked: Quiz, **more: Any) -> Json:
    return {**_base(), "max_output_tokens": MOST_TOKENS, "input": asked.messages(), "store": False, **more}


def _says(asked: Quiz) -> Check:
    return lambda said: said.text("text", "content") == asked.answer


def _strays(asked: Quiz) -> Check:
    """Check that the setting changed the answer."""
    return lambda said: asked.answer not in said.text("text", "content")


def _has(place: str) -> Check:
    return lambda said: len(said.places.get(place, [])) > 60


def _begins_after_thinking(asked: Quiz) -> Check:
    return lambda said: (
        said.text("content") == asked.answer.partition(THINKING_END)[2] and "reasoning" not in said.kinds
    )


def _calls(asked: Quiz) -> Check:
    """Check that the call's arguments are the lines between the two names."""
    names = [name for name, _ in asked.lines]
    inside = dict(asked.lines[names.index(CALL_BEGINS) + 1 : names.index(CALL_ENDS)])
    return lambda said: json.loads(said.text("tool")) == inside


def _fits(asked: Quiz, kind: str) -> Check:
    return lambda said: list(json.loads(said.text(kind))) == _schema(asked)["required"]
