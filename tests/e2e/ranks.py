"""Nodes of a dense model with several data-parallel ranks, and requests to one of these ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from deploy.local.node import SERVED_NAME, Node
from tests.e2e.dense import Dense, Said, tokens
from tests.e2e.legs import TO_HAND_OVER, Params
from tests.e2e.metrics_reader import PATIENCE_S, Watch, watch

TELLING = 6
"""Tokens of an answer: enough that two prompts never have the same one by chance."""
SURE = 0.01
"""The least lead in logits of each token over the next one: about a hundred times the rounding of a float32."""


@dataclass(frozen=True)
class Question:
    """A prompt, and the model's answer."""

    prompt: list[int]
    answer: list[int]

    def then(self, model: Dense, more: list[int]) -> Question:
        """The next turn: the prompt, the answer and more tokens."""
        return question(model, [*self.prompt, *self.answer, *more])


def complete_ids(
    url: str, prompt: Sequence[int], most: int = TELLING, headers: Mapping[str, str] | None = None, **more: Any
) -> Any:
    """The answer to a greedy completion, with its tokens. Raises httpx.HTTPError."""
    body = {"model": SERVED_NAME, "prompt": list(prompt), "max_tokens": most, "temperature": 0, **more}
    body["return_token_ids"] = True
    got = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S, trust_env=False)
    return got.raise_for_status().json()


@dataclass(frozen=True)
class Rank:
    """One data-parallel rank of a node."""

    node: Node
    rank: int

    def asks(self, prompt: Sequence[int], most: int, params: Params) -> Any:
        """Send a completion to this rank. Raises httpx.HTTPError."""
        rank = {"X-data-parallel-rank": str(self.rank)}
        return complete_ids(self.node.url, prompt, most, rank, kv_transfer_params=params)

    def prefill(self, asked: Question, **more: Any) -> Params:
        """Send the prefill leg. Returns its ticket."""
        ticket: Params = self.asks(asked.prompt, 1, {**TO_HAND_OVER, **more})["kv_transfer_params"]
        return ticket

    def answers(self, asked: Question, ticket: Params | None = None) -> list[int]:
        """Send the decode leg, or without a ticket the whole request. Returns the tokens."""
        ids: list[int] = self.asks(asked.prompt, TELLING, ticket or {})["choices"][0]["token_ids"]
        return ids

    def release(self, hand_over: str) -> None:
        """Release a hand-over at this rank alone."""
        self.asks([0], 1, {"pdproxy_release": hand_over})

    def watch(self, name: str, **labels: str) -> Watch:
        """Watch a counter of this rank from now on."""
        return watch(self.node.url, name, engine=str(self.rank), **labels)


def question(model: Dense, prompt: list[int]) -> Question:
    """The question of this prompt. Raises AssertionError if the answer depends on rounding: take another seed."""
    said: Said = model.says(prompt, TELLING)
    assert said.margin > SURE
    return Question(prompt, said.ids)


def draw(model: Dense, seed: int, count: int = 700) -> Question:
    """A question with a random prompt."""
    return question(model, tokens(seed, count))
