"""Ask the proxy one question and show the answer as it comes."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import httpx

from deploy.local.node import SERVED_NAME

Messages = Sequence[dict[str, str]]

END = "[DONE]"
TIMELINE = "server-timing"
OWN_HEADERS = "x-pdproxy-"


class AnswerError(Exception):
    """The proxy answered with an error; the message holds what it said."""


@dataclass(frozen=True)
class Answer:
    """An answer. Times are seconds since the request was sent; headers are in lower case."""

    text: str
    first_token: float
    whole: float
    headers: dict[str, str]

    def told(self) -> list[str]:
        """The way of the request as the proxy tells it, one line each."""
        return [
            f"{name}: {value}"
            for name, value in sorted(self.headers.items())
            if name == TIMELINE or name.startswith(OWN_HEADERS)
        ]


def body(messages: Messages, max_tokens: int = 64) -> dict[str, object]:
    return {
        "model": SERVED_NAME,
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }


def pieces(lines: Iterator[str]) -> Iterator[str]:
    """Yield the text of each chunk of an event stream; an error in the stream raises AnswerError."""
    for line in lines:
        if not line.startswith("data:") or line.removeprefix("data:").strip() == END:
            continue
        chunk = json.loads(line.removeprefix("data:"))
        if "error" in chunk:
            raise AnswerError(json.dumps(chunk["error"]))
        for choice in chunk["choices"]:
            if text := choice["delta"].get("content"):
                yield text


def ask(client: httpx.Client, url: str, messages: Messages) -> Answer:
    """Send a chat request and print the answer as it streams in. Raises AnswerError and httpx.HTTPError."""
    began, firsts, texts = time.monotonic(), list[float](), list[str]()
    with client.stream("POST", f"{url}/v1/chat/completions", json=body(messages)) as response:
        if response.is_error:
            raise AnswerError(f"{response.status_code}: {response.read().decode(errors='replace')}")
        for text in pieces(response.iter_lines()):
            firsts.append(time.monotonic() - began)
            texts.append(text)
            print(text, end="", flush=True)
    print(flush=True)
    if not texts:
        raise AnswerError("the answer held no text")
    return Answer("".join(texts), firsts[0], time.monotonic() - began, dict(response.headers))


def curl_line(url: str, messages: Messages) -> str:
    """Return a command to try in a shell."""
    quoted = json.dumps(body(messages)).replace("'", r"'\''")
    return f"curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d '{quoted}'"
