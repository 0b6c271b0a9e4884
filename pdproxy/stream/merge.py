"""Answers to several prompts as one answer, as a node gives it to a list of prompts.

Choice indices count through: prompt i's choice j becomes ``i * n + j`` (vLLM 0.32, ``openai/completion/serving.py``).
"""

from collections.abc import Sequence

from pdproxy.request import Json
from pdproxy.stream.chunks import data_event, parse_object
from pdproxy.stream.sse import SseParser

DONE = b"[DONE]"
END = b"data: [DONE]\n\n"
COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")


def merge_answers(answers: Sequence[Json]) -> dict[str, object]:
    """Non-streamed completions answers, in the order of their prompts, as one.

    Everything but choices and usage is the first one's; ``metrics`` belongs to a single answer and is left out.
    """
    merged = dict(answers[0])
    choices = [dict(choice) for answer in answers for choice in _choices(answer)]
    merged["choices"] = [{**choice, "index": index} for index, choice in enumerate(choices)]
    merged["usage"] = sum_usage([usage for answer in answers if isinstance(usage := answer.get("usage"), dict)])
    if "metrics" in merged:
        merged["metrics"] = None
    return merged


def sum_usage(usages: Sequence[Json]) -> dict[str, object]:
    """Usage over all prompts; details are summed number by number."""
    total: dict[str, object] = {}
    for usage in usages:
        for key, value in usage.items():
            total[key] = _add(total.get(key), value)
    return total


def _add(left: object, right: object) -> object:
    if isinstance(right, dict):
        return sum_usage([left if isinstance(left, dict) else {}, right])
    if isinstance(left, int) and isinstance(right, int):
        return left + right
    return left if right is None else right


def _choices(answer: Json) -> list[dict[str, object]]:
    choices = answer.get("choices")
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []


class StreamMerge:
    """Streams of several prompts, taken as they come, as one stream.

    Args:
        choices: ``n`` of the request.
    """

    def __init__(self, choices: int) -> None:
        self._n = choices
        self._parsers: dict[int, SseParser] = {}
        self._usages: dict[int, dict[str, object]] = {}
        self._first: dict[str, object] = {}

    def take(self, prompt: int, piece: bytes) -> bytes:
        """What the client sees of a piece of one prompt's stream (as its transcript gave it).

        The stream's own end and final usage are kept for `ending`.

        Raises:
            NodeFault: INVALID_BODY where an event is no JSON object.
        """
        parser = self._parsers.setdefault(prompt, SseParser())
        events = parser.feed(piece)
        return b"".join(e.raw if e.data is None else self._take(prompt, e.data) for e in events)

    def ending(self) -> bytes:
        """The summed usage where the streams told it, and the end. Call it once every stream has ended."""
        usages = [self._usages[prompt] for prompt in sorted(self._usages)]
        final = data_event({**self._first, "choices": [], "usage": sum_usage(usages)}) if usages else b""
        return final + END

    def _take(self, prompt: int, data: bytes) -> bytes:
        if data == DONE:
            return b""
        payload = parse_object(data)
        for key in ("id", "object", "created", "model"):
            if key in payload:
                payload[key] = self._first.setdefault(key, payload[key])
        if payload.get("choices") == [] and isinstance(usage := payload.get("usage"), dict):
            self._usages[prompt] = usage
            return b""
        for choice in _choices(payload):
            index = choice.get("index")
            choice["index"] = prompt * self._n + (index if isinstance(index, int) else 0)
        return data_event(payload)
