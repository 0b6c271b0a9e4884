"""The parts of an answer that must be the same from a single engine and through the proxy. Pure."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

OWN = frozenset({"id", "created", "created_at", "completed_at", "system_fingerprint", "request_id", "item_id"})
"""Fields that differ between two requests to one engine."""
CACHED = frozenset({"prompt_tokens_details", "input_tokens_details", "cache_read_input_tokens"})
"""How much of the prompt was cached depends on what the node was asked before."""
NATS = 0.05
"""By which log-probabilities may differ: bfloat16, and prompts computed in other pieces."""
Aspects = Mapping[str, Any]


def aspects(status: int, content_type: str, body: bytes) -> Aspects:
    """The parts that are compared, by name. An answer that is not understood is compared whole."""
    media_type = content_type.partition(";")[0].strip().lower()
    found: dict[str, Any] = {"status": status, "content type": media_type}
    try:
        parts = list(_events(body)) if media_type == "text/event-stream" else [json.loads(body)]
    except ValueError:
        return {**found, "body": body}
    if media_type == "text/event-stream":
        found["end"] = body.endswith(b"data: [DONE]\n\n")
    errors = [part for part in parts if isinstance(part, dict) and (part.get("error") or part.get("type") == "error")]
    if errors:
        return {**found, "error": [_error_shape(each) for each in errors]}
    return {**found, **_contents(parts)}


def differences(alone: Aspects, proxied: Aspects) -> tuple[str, ...]:
    """Names of the aspects that differ."""
    names = dict.fromkeys((*alone, *proxied))
    return tuple(name for name in names if not _same(name, alone.get(name), proxied.get(name)))


def _same(name: str, one: Any, other: Any) -> bool:
    if name != "logprobs" or one is None or other is None:
        return bool(one == other)
    return len(one) == len(other) and all(abs(left - right) <= NATS for left, right in zip(one, other, strict=True))


def _events(body: bytes) -> Iterator[Any]:
    for line in body.decode().split("\n"):
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


def _error_shape(answer: dict[str, Any]) -> Any:
    """Everything but the sentence."""
    error = answer.get("error")
    if not isinstance(error, dict):
        return sorted(answer)
    return {**{name: error[name] for name in error if name != "message"}, "beside": sorted(answer)}


def _contents(parts: list[Any]) -> dict[str, Any]:
    texts: dict[Any, str] = {}
    finishes, logprobs, usage, fields = list[Any](), list[float](), None, set[str]()
    for part in parts:
        for path, value in _leaves(part, ()):
            name = path[-1]
            fields.add(".".join(step for step in path if isinstance(step, str)))
            if name in ("text", "content", "reasoning", "arguments", "delta", "thinking", "partial_json"):
                if isinstance(value, str):
                    texts[path[:-1]] = texts.get(path[:-1], "") + value
            elif name in ("finish_reason", "stop_reason", "status") and value is not None:
                finishes.append(value)
            elif name == "logprob" or "token_logprobs" in path:
                logprobs += [value] if isinstance(value, (int, float)) else []
        usage = part.get("usage") or usage if isinstance(part, dict) else usage
    return {
        "text": [text for text in texts.values() if text],
        "finish reason": finishes,
        "usage": _usage(usage),
        "logprobs": logprobs,
        "fields": sorted(fields),
    }


def _leaves(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            if name not in OWN and name not in CACHED and name != "usage":
                yield from _leaves(inner, (*path, name))
    elif isinstance(value, list) and value:
        for number, inner in enumerate(value):
            yield from _leaves(inner, (*path, number))
    elif path:
        yield path, value


def _usage(usage: Any) -> Any:
    """Without what was cached. Anthropic's input tokens are those that were not."""
    if isinstance(usage, dict) and isinstance(usage.get("cache_read_input_tokens"), int):
        usage = {**usage, "input_tokens": usage.get("input_tokens", 0) + usage["cache_read_input_tokens"]}
    return _without(usage, CACHED)


def _without(value: Any, names: frozenset[str]) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: _without(inner, names) for name, inner in value.items() if name not in names}
