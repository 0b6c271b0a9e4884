"""A small engine that streams as vLLM 0.32 does: fixed tokens, text that lags behind them, stop strings."""

import dataclasses
import functools
import json

from pdproxy.request import Endpoint
from pdproxy.stream.sse import Event, SseParser


@dataclasses.dataclass(frozen=True)
class Engine:
    """Greedy: ``pieces[i]`` is what token i adds to the text; "" where a character is not whole yet (the
    next one is not ASCII then), or where a special token is skipped.

    A run that begins inside a character loses it, as a detokenizer does that never saw its first bytes.
    """

    pieces: tuple[str, ...]
    prompt: tuple[int, ...] = (7, 8, 9)
    stops: tuple[str, ...] = ()
    endpoint: Endpoint = Endpoint.COMPLETIONS
    per_event: int = 1
    ids: bool = True
    usage: bool = True
    details: bool = False

    @property
    def held_back(self) -> int:
        return max((len(stop) for stop in self.stops), default=1) - 1

    def answer(self) -> tuple[str, int, str]:
        """The whole text, the number of tokens and the finish reason of an unbroken run."""
        return self._run(0)

    def stream(self, produced: int = 0, name: str = "one") -> list[bytes]:
        """The events of a run whose prompt already holds ``produced`` of the tokens."""
        return list(_streamed(self, produced, name))

    def run(self, produced: int, name: str) -> list[bytes]:
        """The same, written anew."""
        chat = self.endpoint is Endpoint.CHAT
        prompt = [*self.prompt, *range(100, 100 + produced)]
        events = [self._event(name, {"delta": {"role": "assistant", "content": ""}}, prompt=prompt)] if chat else []
        text, count, finish = self._run(produced)
        sent = 0
        for start in range(0, count, self.per_event):
            end = min(count, start + self.per_event)
            last = end == count
            said = "".join(self._pieces(produced)[:end])
            upto = len(text) if last else min(len(text), max(sent, len(said) - self.held_back))
            ids = list(range(100 + produced + start, 100 + produced + end))
            first = prompt if start == 0 and not chat else None
            events.append(self._event(name, self._choice(text[sent:upto], ids, finish if last else None), prompt=first))
            sent = upto
        tail = [self._usage(name, len(prompt), count)] if self.usage else []
        return [*events, *tail, b"data: [DONE]\n\n"]

    def _run(self, produced: int) -> tuple[str, int, str]:
        text = ""
        for count, piece in enumerate(self._pieces(produced), 1):
            text += piece
            found = [text.find(stop) for stop in self.stops if stop in text]
            if found:
                return text[: min(found)], count, "stop"
        return text, len(self.pieces) - produced, "length"

    def _pieces(self, produced: int) -> list[str]:
        rest = list(self.pieces[produced:])
        at = next((at for at, piece in enumerate(rest) if piece), 0)
        torn = produced > 0 and self.pieces[produced - 1] == "" and not rest[at][:1].isascii()
        return [*rest[:at], rest[at][1:], *rest[at + 1 :]] if torn else rest

    def _choice(self, text: str, ids: list[int], finish: str | None) -> dict[str, object]:
        said: dict[str, object] = {"delta": {"content": text}} if self.endpoint is Endpoint.CHAT else {"text": text}
        logprobs = {"text_offset": [0] * len(ids), "tokens": ["x"] * len(ids)} if self.details else None
        chat = self.endpoint is Endpoint.CHAT
        stop = {} if chat else {"stop_reason": None}
        return {**said, "logprobs": logprobs, "finish_reason": finish, **stop, "token_ids": ids if self.ids else None}

    def _event(self, name: str, choice: dict[str, object], prompt: list[int] | None) -> bytes:
        chat = self.endpoint is Endpoint.CHAT
        shown = prompt if self.ids else None
        head = {"id": f"cmpl-{name}", "object": "text_completion", "created": len(name), "model": "m"}
        inner = {"index": 0, **choice}
        if not chat:
            ids = inner.pop("token_ids")
            inner |= {"prompt_token_ids": shown, "token_ids": ids}
        outer = {"prompt_token_ids": shown} if chat and prompt is not None else {}
        return self._data({**head, "choices": [inner], **outer})

    def _usage(self, name: str, prompt: int, count: int) -> bytes:
        usage = {"prompt_tokens": prompt, "total_tokens": prompt + count, "completion_tokens": count}
        head = {"id": f"cmpl-{name}", "object": "text_completion", "created": len(name), "model": "m"}
        return self._data({**head, "choices": [], "usage": usage})

    def _data(self, payload: dict[str, object]) -> bytes:
        return b"data: " + json.dumps(payload, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


@functools.cache
def _streamed(engine: Engine, produced: int, name: str) -> tuple[bytes, ...]:
    """Kept, since a stream that is cut everywhere is asked for thousands of times."""
    return tuple(engine.run(produced, name))


def events(raw: bytes) -> list[Event]:
    """The events in whole bytes."""
    return SseParser().feed(raw)


def heard(raw: bytes) -> tuple[str, str | None, dict[str, object] | None, set[str]]:
    """What a client makes of a stream: text, finish reason, usage, and the answer's ids."""
    text, finish, usage, names = "", None, None, set()
    for event in events(raw):
        if event.data is None or event.data == b"[DONE]":
            continue
        payload = json.loads(event.data)
        names.add(payload["id"])
        usage = payload.get("usage") or usage
        for choice in payload["choices"]:
            text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            finish = choice["finish_reason"] if choice.get("finish_reason") else finish
    return text, finish, usage, names
