"""The writing of a fake node: questions read from bodies, answers and events in vLLM's shapes."""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tests.fakes.fake_model import Generated, generate, tokenize

_names = itertools.count()
FINGERPRINT = {"system_fingerprint": "vllm-0.32.0-fake"}


@dataclasses.dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request as the engine sees it."""

    path: str
    name: str
    model: str
    prompt: list[int]
    count: int
    n: int
    stops: list[str]
    stream: bool
    usage: bool
    continuous: bool
    ids: bool
    burst: int
    hides_reasoning: bool = False
    """The first tokens are reasoning, which is not shown."""
    created: int = 1_790_000_000
    logprobs: int = 0
    """How many of the likeliest tokens come with each token of a completion that is not streamed."""
    wrong: int = 0
    """By how many nats the model is off, because its cache does not hold the prompt."""

    @classmethod
    def of(cls, path: str, body: Mapping[str, Any], burst: int) -> "ParsedRequest":
        """Read a body."""
        most = body.get("max_completion_tokens") or body.get("max_output_tokens") or body.get("max_tokens") or 16
        stop = body.get("stop") or body.get("stop_sequences") or []
        options = body.get("stream_options") or {}
        return cls(
            path=path,
            name=f"{'chatcmpl' if 'chat' in path else 'cmpl'}-{next(_names)}",
            model=str(body.get("model")),
            prompt=_prompt(path, body),
            count=int(most),
            n=int(body.get("n") or 1) if path in ("/v1/completions", "/v1/chat/completions") else 1,
            stops=[stop] if isinstance(stop, str) else list(stop),
            stream=bool(body.get("stream")),
            usage=bool(options.get("include_usage")),
            continuous=bool(options.get("continuous_usage_stats")),
            ids=bool(body.get("return_token_ids")),
            burst=burst,
            hides_reasoning=body.get("include_reasoning") is False,
            created=1_790_000_000 + next(_names) % 1000,
            logprobs=int(body.get("logprobs") or 0),
        )

    def chat(self) -> bool:
        return self.path == "/v1/chat/completions"

    def head(self) -> dict[str, Any]:
        """The fields that every answer and event begin with."""
        kind = ("chat.completion.chunk" if self.stream else "chat.completion") if self.chat() else "text_completion"
        return {"id": self.name, "object": kind, "created": self.created, "model": self.model}

    def steps(self, choice: int) -> Iterator[Generated]:
        return generate(self.prompt, self.count, self.stops, self.burst, choice)

    def tally(self, cached: int, completion: int) -> dict[str, Any]:
        """vLLM's usage, with prompt tokens details."""
        total = len(self.prompt) + completion
        return {"prompt_tokens": len(self.prompt), "total_tokens": total, "completion_tokens": completion,
                "prompt_tokens_details": {"cached_tokens": cached}}  # fmt: skip

    def tally_messages(self, cached: int, completion: int) -> dict[str, Any]:
        """The same for /v1/messages, where what was cached is counted apart."""
        fresh = len(self.prompt) - cached
        return {"input_tokens": fresh, "output_tokens": completion, "cache_read_input_tokens": cached}

    def tally_responses(self, cached: int, completion: int) -> dict[str, Any]:
        """The same for /v1/responses."""
        details = {"cached_tokens": cached, "cache_write_tokens": 0}
        total = len(self.prompt) + completion
        return {"input_tokens": len(self.prompt), "input_tokens_details": details,
                "output_tokens": completion, "total_tokens": total}  # fmt: skip


def error(status: int, message: str, kind: str = "FakeError") -> bytes:
    """vLLM's error body."""
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}}).encode()


def answer(question: ParsedRequest, cached: int, ticket: dict[str, Any] | None) -> bytes:
    """A whole answer."""
    choices, completion = [], 0
    for index in range(question.n):
        steps = list(question.steps(index))
        tokens = [token for step in steps for token in step.tokens]
        completion += len(tokens)
        choices.append(_choice(question, index, "".join(step.text for step in steps), tokens, steps[-1]))
    whole: dict[str, Any] = {
        **question.head(),
        "usage": question.tally(cached, completion),
        "kv_transfer_params": ticket,
    }
    match question.path:
        case "/v1/messages":
            whole |= {"type": "message", "role": "assistant", "stop_reason": "max_tokens"}
            whole["content"] = [{"type": "text", "text": choices[0]["message"]["content"]}]
            whole["usage"] = question.tally_messages(cached, completion)
        case "/v1/responses":
            whole |= {"object": "response", "status": "completed"}
            whole["output"] = [
                {"type": "message", "content": [{"type": "output_text", "text": choices[0]["message"]["content"]}]}
            ]
            whole["usage"] = question.tally_responses(cached, completion)
        case _:
            whole["choices"] = choices
    if question.ids and question.chat():
        whole["prompt_token_ids"] = question.prompt
    return json.dumps(whole, ensure_ascii=False).encode()


def _choice(question: ParsedRequest, index: int, text: str, tokens: list[int], last: Generated) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": last.finish, "stop_reason": last.stop}
    if question.path == "/v1/completions":
        choice["text"] = text
        choice["prompt_token_ids"] = question.prompt if question.ids else None
        if question.logprobs:
            choice["logprobs"] = {"top_logprobs": [_likeliest(question, token) for token in tokens]}
    else:
        choice["message"] = {"role": "assistant", "content": text}
    choice["token_ids"] = tokens if question.ids else None
    return choice


def _likeliest(question: ParsedRequest, token: int) -> dict[str, float]:
    """Falling from the token that was sampled; every other one is off by ``wrong`` nats."""
    return {f"token_id:{token + rank}": -0.01 - rank - question.wrong * (rank % 2) for rank in range(question.logprobs)}


Group = tuple[tuple[int, Generated], ...]
"""Outputs that the engine hands over at once: steps of choices, by index; none before the first and after the last."""
REASONING = 3
"""Tokens of each choice that are reasoning where it is hidden."""


class Batch(NamedTuple):
    """A group and the events that come of it, which may be none."""

    group: Group
    events: tuple[bytes, ...]


def events(question: ParsedRequest, cached: int) -> tuple[bytes, ...]:
    """A streamed answer, one piece an event."""
    return tuple(event for batch in batches(question, cached, groups(question)) for event in batch.events)


def groups(question: ParsedRequest) -> Iterator[Group]:
    """One step of each choice in turn."""
    for steps in itertools.zip_longest(*(question.steps(index) for index in range(question.n))):
        for index, step in enumerate(steps):
            if step is not None:
                yield ((index, step),)


def batches(question: ParsedRequest, cached: int, outputs: Iterator[Group]) -> Iterator[Batch]:
    """A streamed answer, made of what the engine gives; one batch for each group, and what comes before and after."""
    match question.path:
        case "/v1/messages":
            return _messages(question, cached, outputs)
        case "/v1/responses":
            return _responses(question, cached, outputs)
        case _:
            return _chunks(question, cached, outputs)


def _chunks(question: ParsedRequest, cached: int, outputs: Iterator[Group]) -> Iterator[Batch]:
    counts = [0] * question.n
    opening = tuple(_roles(question, cached)) if question.chat() else ()
    for group in outputs:
        yield Batch(group, (*opening, *_steps(question, group, cached, counts)))
        opening = ()
    usage = {**question.head(), "choices": [], "usage": question.tally(cached, sum(counts)), **FINGERPRINT}
    yield Batch((), (*opening, *([data_event(usage)] if question.usage else []), b"data: [DONE]\n\n"))


def _roles(question: ParsedRequest, cached: int) -> Iterator[bytes]:
    for index in range(question.n):
        role = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        opening = {**question.head(), "choices": [role]}
        if question.continuous:
            opening["usage"] = question.tally(cached, 0)
        if question.ids:
            opening["prompt_token_ids"] = question.prompt
        yield data_event(opening)


def _steps(question: ParsedRequest, group: Group, cached: int, counts: list[int]) -> Iterator[bytes]:
    for index, step in group:
        first, counts[index] = counts[index] == 0, counts[index] + len(step.tokens)
        if not question.hides_reasoning or counts[index] > REASONING or step.finish:
            yield data_event(_chunk(question, question.head(), index, step, first, cached, counts[index]))


def _chunk(
    question: ParsedRequest, head: dict[str, Any], index: int, step: Generated, first: bool, cached: int, count: int
) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index}
    if question.chat():
        choice["delta"] = {"content": step.text}
    else:
        choice["text"] = step.text
    choice |= {"logprobs": None, "finish_reason": step.finish, "stop_reason": step.stop}
    if question.path == "/v1/completions":
        choice["prompt_token_ids"] = question.prompt if question.ids and first else None
    choice["token_ids"] = step.tokens if question.ids else None
    chunk = {**head, "choices": [choice]}
    if step.finish and not question.usage:
        chunk |= FINGERPRINT
    if question.continuous:
        chunk["usage"] = question.tally(cached, count)
    return chunk


def _messages(question: ParsedRequest, cached: int, outputs: Iterator[Group]) -> Iterator[Batch]:
    """Only the last event's usage has the cached tokens."""
    begun = {"input_tokens": len(question.prompt), "output_tokens": 0}
    message = {"id": question.name, "type": "message", "role": "assistant", "content": [], "model": question.model}
    start = {"type": "message_start", "message": {**message, "usage": begun}}
    opening: tuple[bytes, ...] = (named_event("message_start", start),)
    count = 0
    for group in outputs:
        ((_, step),) = group
        count += len(step.tokens)
        delta = {"type": "text_delta", "text": step.text}
        event = named_event("content_block_delta", {"type": "content_block_delta", "index": 0, "delta": delta})
        yield Batch(group, (*opening, event))
        opening = ()
    usage = question.tally_messages(cached, count)
    stopped = {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": usage}
    yield Batch(
        (), (*opening, named_event("message_delta", stopped), named_event("message_stop", {"type": "message_stop"}))
    )


def _responses(question: ParsedRequest, cached: int, outputs: Iterator[Group]) -> Iterator[Batch]:
    begun = {"id": question.name, "model": question.model, "usage": None}
    yield Batch((), (named_event("response.created", {"type": "response.created", "response": begun}),))
    count = 0
    for group in outputs:
        ((_, step),) = group
        count += len(step.tokens)
        delta = {"type": "response.output_text.delta", "delta": step.text}
        yield Batch(group, (named_event("response.output_text.delta", delta),))
    ended = {**begun, "usage": question.tally_responses(cached, count)}
    yield Batch((), (named_event("response.completed", {"type": "response.completed", "response": ended}),))


def data_event(value: Mapping[str, Any]) -> bytes:
    """An event of one data line, as vLLM writes JSON."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def named_event(name: str, value: Mapping[str, Any]) -> bytes:
    """One with a name."""
    return b"event: " + name.encode() + b"\n" + data_event(value)


def _prompt(path: str, body: Mapping[str, Any]) -> list[int]:
    if path == "/v1/completions":
        prompt = body["prompt"]
        while isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            prompt = prompt[0]
        return list(prompt) if isinstance(prompt, list) else tokenize(str(prompt))
    return tokenize(json.dumps(body.get("messages") or body.get("input")))
