"""The questions of the bench, and what must come back."""

import enum
import json
from typing import Any

from tests.fakes.vllm_answers import ParsedRequest

TOKENS = 32
MODEL = "bench"
KEY = "sk-bench"
"""Asked for by none but a proxy that counts by keys."""
PROMPT = " ".join(f"word{number}" for number in range(250))


class Line(enum.StrEnum):
    """A kind of request; one line of the report."""

    COMPLETIONS = "completions, streamed"
    CHAT = "chat, streamed"
    WHOLE = "completions, whole"

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self is Line.CHAT else "/v1/completions"

    @property
    def streamed(self) -> bool:
        return self is not Line.WHOLE


def body(line: Line) -> dict[str, Any]:
    """The request that a client sends."""
    chat = {"messages": [{"role": "user", "content": PROMPT}]}
    asked: dict[str, Any] = chat if line is Line.CHAT else {"prompt": PROMPT}
    return {"model": MODEL, **asked, "max_tokens": TOKENS, "temperature": 0, "stream": line.streamed}


def request(line: Line) -> bytes:
    """The same as HTTP/1.1."""
    sent = json.dumps(body(line)).encode()
    return post(line.path, sent)


def post(path: str, sent: bytes) -> bytes:
    """A request with a JSON body, as HTTP/1.1."""
    head = f"POST {path} HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {KEY}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(sent)}\r\n\r\n".encode() + sent


def prompt_of(path: str, asked: dict[str, Any]) -> object:
    """The prompt in a body."""
    if path == Line.CHAT.path:
        return [message.get("content") for message in asked.get("messages", [])]
    return [asked.get("prompt")]


def expected(line: Line) -> str:
    """The text that the fake model generates."""
    return "".join(step.text for step in ParsedRequest.of(line.path, body(line), 1).steps(0))


def flaw(line: Line, wanted: str, status: int, answer: bytes) -> str | None:
    """The fault of an answer; None if there is none.

    Args:
        wanted: see `expected`.
    """
    if status != 200:
        return f"status {status}: {answer[:200]!r}"
    try:
        texts = _streamed(answer) if line.streamed else _texts(json.loads(answer))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error} in {answer[:200]!r}"
    if line.streamed and len(texts) != TOKENS:
        return f"{len(texts)} tokens"
    return None if "".join(texts) == wanted else f"another text: {''.join(texts)[:200]!r}"


def _streamed(answer: bytes) -> list[str]:
    """The text of each event that has a token."""
    events = answer.split(b"\n\n")
    if events[-2:] != [b"data: [DONE]", b""]:
        raise ValueError("the stream has no end")
    return [text for event in events[:-2] for text in _texts(json.loads(event.removeprefix(b"data: ")))]


def _texts(payload: dict[str, Any]) -> list[str]:
    return [text for choice in payload["choices"] for text in _text(choice)]


def _text(choice: dict[str, Any]) -> list[str]:
    """The text of one choice, in a list; an empty one for the event that only names the role."""
    if "delta" in choice:
        return [] if "role" in choice["delta"] else [choice["delta"]["content"]]
    return [choice["text"]]
