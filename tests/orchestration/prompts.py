"""Bodies for each endpoint, and what the fake model must say to them."""

import json
from typing import Any

from pdproxy.request import Endpoint
from tests.fakes.fake_model import generate, tokenize

WORDS = "one two three four five six seven eight nine ten eleven twelve thirteen"
MESSAGES = [{"role": "user", "content": WORDS}]


def body_for(endpoint: Endpoint, *, stream: bool, tokens: int = 8, **more: object) -> dict[str, Any]:
    """A greedy request of ``tokens`` tokens."""
    common: dict[str, Any] = {"stream": stream, "temperature": 0, **more}
    match endpoint:
        case Endpoint.COMPLETIONS:
            return {"prompt": WORDS, "max_tokens": tokens, **common}
        case Endpoint.RESPONSES:
            return {"input": WORDS, "max_output_tokens": tokens, **common}
        case _:
            return {"messages": MESSAGES, "max_tokens": tokens, **common}


def prompt_ids(endpoint: Endpoint) -> list[int]:
    """The prompt's tokens."""
    match endpoint:
        case Endpoint.COMPLETIONS:
            return tokenize(WORDS)
        case Endpoint.RESPONSES:
            return tokenize(json.dumps(WORDS))
        case _:
            return tokenize(json.dumps(MESSAGES))


def right(endpoint: Endpoint, tokens: int = 8, stops: tuple[str, ...] = ()) -> str:
    """The text that the fake model generates."""
    return "".join(said.text for said in generate(prompt_ids(endpoint), tokens, stops))
