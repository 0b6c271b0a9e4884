"""Seeded random requests, and the check of what came back."""

import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from pdproxy.request import ClientRequest, Endpoint, HeldBody, Json
from tests.fakes.fake_model import generate, tokenize
from tests.orchestration.answers import read_answer, text_of
from tests.orchestration.cluster import MODEL

VOCABULARY = ("red", "green", "blue", "fish", "bird", "tree", "stone", "river", "cloud", "salt", "iron", "glass")
PATIENT = 120.0


@dataclasses.dataclass(frozen=True, slots=True)
class Asking:
    """One request, and what its answer must be.

    Attributes:
        right: the texts by choice index.
        leaves: pieces after which the client goes; None for a client that stays.
    """

    endpoint: Endpoint
    body: dict[str, Any]
    right: dict[int, str]
    leaves: int | None

    def request(self, name: str, now: float) -> ClientRequest:
        """The request as intake makes it."""
        stream = bool(self.body["stream"])
        held, until = HeldBody[Json](self.body), now + PATIENT
        return ClientRequest(name, self.endpoint, held, (), MODEL, stream, 0, now, until, lambda: True)

    def judge(self, body: bytes) -> bool:
        """Whether the answer is complete. What there is of it must be right, and end properly.

        Raises:
            AssertionError: a wrong token, or a broken stream.
        """
        if not self.body["stream"]:
            assert self._whole(json.loads(body)) == self.right
            return True
        answer = read_answer(self.endpoint, body)
        assert answer.ended, "the stream did not end properly"
        if answer.error is None:
            assert answer.texts == self.right
            return True
        assert all(self.right[index].startswith(text) for index, text in answer.texts.items()), "a wrong token"
        return False

    def _whole(self, answer: dict[str, Any]) -> dict[int, str]:
        if self.endpoint is Endpoint.COMPLETIONS:
            return {choice["index"]: choice["text"] for choice in answer["choices"]}
        if self.endpoint is Endpoint.CHAT:
            return {choice["index"]: choice["message"]["content"] for choice in answer["choices"]}
        return {0: text_of(self.endpoint, answer)}


def words(dice: random.Random) -> str:
    """A prompt."""
    return " ".join(dice.choices(VOCABULARY, k=dice.randint(2, 60)))


def asking(dice: random.Random, prompt: Callable[[random.Random], str] = words) -> Asking:
    """Any request: endpoint, stream or not, several prompts or choices, stop strings, a client that leaves."""
    endpoint = dice.choice((Endpoint.COMPLETIONS, Endpoint.CHAT, Endpoint.CHAT, *Endpoint))
    tokens = dice.randint(2, 40)
    stops = [dice.choice(("nowhere", "t1", "t42 t"))] if dice.random() < 0.3 and endpoint in _PLAIN else []
    choices = dice.choice((1, 1, 1, 2)) if endpoint in _PLAIN else 1
    prompts = [prompt(dice) for _ in range(dice.choice((1, 1, 2, 3)) if endpoint is Endpoint.COMPLETIONS else 1)]
    body: dict[str, Any] = {"model": MODEL, "stream": dice.random() < 0.6, "temperature": 0}
    body |= {"stop": stops} if stops else {}
    body |= {"n": choices} if choices > 1 else {}
    body |= _prompt(endpoint, prompts, tokens)
    if body["stream"] and endpoint in _PLAIN and dice.random() < 0.5:
        body["stream_options"] = {"include_usage": True}
    right = _right(endpoint, prompts, tokens, stops, choices)
    return Asking(endpoint, body, right, dice.randint(0, tokens) if dice.random() < 0.2 else None)


_PLAIN = (Endpoint.COMPLETIONS, Endpoint.CHAT)


def _messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def _prompt(endpoint: Endpoint, prompts: Sequence[str], tokens: int) -> dict[str, Any]:
    match endpoint:
        case Endpoint.COMPLETIONS:
            return {"prompt": list(prompts) if len(prompts) > 1 else prompts[0], "max_tokens": tokens}
        case Endpoint.RESPONSES:
            return {"input": prompts[0], "max_output_tokens": tokens}
        case _:
            return {"messages": _messages(prompts[0]), "max_tokens": tokens}


def _right(
    endpoint: Endpoint, prompts: Sequence[str], tokens: int, stops: Sequence[str], choices: int
) -> dict[int, str]:
    texts = {}
    for number, prompt in enumerate(prompts):
        input_text = prompt if endpoint is Endpoint.COMPLETIONS else json.dumps(_as_input(endpoint, prompt))
        for choice in range(choices):
            steps = generate(tokenize(input_text), tokens, stops, choice=choice)
            texts[number * choices + choice] = "".join(step.text for step in steps)
    return texts


def _as_input(endpoint: Endpoint, prompt: str) -> object:
    return prompt if endpoint is Endpoint.RESPONSES else _messages(prompt)
