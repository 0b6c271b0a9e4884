"""A small engine that streams as vLLM 0.32 does."""

import dataclasses
import json

from pdproxy.request import Endpoint
from pdproxy.stream.sse import Event, Framer, event_of


@dataclasses.dataclass(frozen=True)
class Engine:
    """Says ``pieces``, one with each token; with ``ids`` their token ids too, and those of the prompt."""

    pieces: tuple[str, ...]
    prompt: tuple[int, ...] = (7, 8, 9)
    endpoint: Endpoint = Endpoint.COMPLETIONS
    ids: bool = False
    usage: bool = True

    def stream(self, name: str = "one") -> list[bytes]:
        """The events of an answer of this name."""
        chat = self.endpoint is Endpoint.CHAT
        prompt = [*self.prompt]
        events = [self._event(name, {"delta": {"role": "assistant", "content": ""}}, prompt=prompt)] if chat else []
        for at, piece in enumerate(self.pieces):
            finish = "length" if at == len(self.pieces) - 1 else None
            first = prompt if at == 0 and not chat else None
            events.append(self._event(name, self._choice(piece, [100 + at], finish), prompt=first))
        tail = [self._usage(name, len(prompt), len(self.pieces))] if self.usage else []
        return [*events, *tail, b"data: [DONE]\n\n"]

    def _choice(self, text: str, ids: list[int], finish: str | None) -> dict[str, object]:
        chat = self.endpoint is Endpoint.CHAT
        said: dict[str, object] = {"delta": {"content": text}} if chat else {"text": text}
        stop = {} if chat else {"stop_reason": None}
        return {**said, "logprobs": None, "finish_reason": finish, **stop, "token_ids": ids if self.ids else None}

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


def events(raw: bytes) -> list[Event]:
    """The events in whole bytes."""
    return [event_of(each) for each in Framer().feed(raw)]


def heard(raw: bytes) -> tuple[str, str | None, dict[str, object] | None, set[str]]:
    """A stream as a client reads it: text, finish reason, usage, and the answer's ids."""
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
