"""Questions with known answers: asked of one engine, and compared with what comes by way of the proxy.

A long list of names and numbers, whose last lines are to be recited: the tiny model was trained on it, and others copy
well. What counts is not that an answer is right, but that it is the same: a lost state or block changes it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import httpx

from deploy.local.model.quiz import MOST_LINES, TOKENS_PER_LINE, quiz, recite

TIMEOUT_S = 300.0
AT_ONCE = 8
DECISIVE = 0.5
"""Nats by which the best token led: two ways to compute the same differ by less, and may then choose otherwise."""
LONGEST_LIST = MOST_LINES * TOKENS_PER_LINE
Params = dict[str, Any]


class Verdict(StrEnum):
    """How an answer compares with the known one."""

    SAME = "same"
    UNDECIDED = "undecided"
    """It differs first where the one engine itself was not certain; what follows says nothing."""
    WRONG = "wrong"


@dataclass(frozen=True)
class Answer:
    """A greedy answer, token by token; `leads`: nats by which each token led the next best one."""

    text: str
    tokens: tuple[str, ...] = ()
    leads: tuple[float, ...] = ()
    ticket: Params | None = None


@dataclass(frozen=True)
class Known:
    """A question, and what one engine answers to it undisturbed."""

    prompt: str
    text: str
    tokens: tuple[str, ...]
    leads: tuple[float, ...]

    @property
    def margin(self) -> float:
        """By how much its least certain token led."""
        return min(self.leads, default=0.0)

    def compare(self, text: str) -> Verdict:
        """An answer in place of the known one."""
        if text == self.text:
            return Verdict.SAME
        common = next((at for at, pair in enumerate(zip(text, self.text, strict=False)) if pair[0] != pair[1]), None)
        differs_at = min(len(text), len(self.text)) if common is None else common
        return Verdict.UNDECIDED if self._lead_at(differs_at) < DECISIVE else Verdict.WRONG

    def _lead_at(self, character: int) -> float:
        """Of the token that the character belongs to; the last one's beyond the end."""
        end = 0
        for token, lead in zip(self.tokens, self.leads, strict=True):
            end += len(token)
            if character < end:
                return lead
        return self.leads[-1] if self.leads else 0.0


def long_prompt(seed: int, tokens: int, lines: int) -> str:
    """About so many tokens of the tiny model, which ask for the last `lines` lines; longer ones have several lists."""
    whole = [quiz(seed + 10_000 * (at + 1), LONGEST_LIST).listing for at in range(max(0, tokens - 1) // LONGEST_LIST)]
    rest = tokens - LONGEST_LIST * len(whole)
    smallest = (lines + 1) * TOKENS_PER_LINE + TOKENS_PER_LINE
    last = recite(seed, max(rest, smallest), lines)
    return "\n".join([*whole, last.prompt()])


def complete(
    url: str, model: str, prompt: str, max_tokens: int, params: Params | None = None, **more: object
) -> Answer:
    """A completion at temperature 0. Raises httpx.HTTPError."""
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 2}
    body |= {} if params is None else {"kv_transfer_params": params}
    answer = httpx.post(f"{url}/v1/completions", json=body | more, timeout=TIMEOUT_S, trust_env=False)
    got = answer.raise_for_status().json()
    [choice] = got["choices"]
    told = choice.get("logprobs") or {}
    best = [sorted(top.values(), reverse=True) for top in told.get("top_logprobs") or []]
    leads = tuple(two[0] - two[1] if len(two) > 1 else 0.0 for two in best)
    return Answer(choice["text"], tuple(told.get("tokens") or ()), leads, got.get("kv_transfer_params"))


def learn(url: str, model: str, prompts: Sequence[str], count: int, max_tokens: int) -> list[Known]:
    """Ask one engine, and keep the answers of which it is most certain. Raises httpx.HTTPError."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        answers = threads.map(lambda prompt: complete(url, model, prompt, max_tokens), prompts)
        known = [Known(prompt, one.text, one.tokens, one.leads) for prompt, one in zip(prompts, answers, strict=True)]
    return sorted(known, key=lambda each: each.margin, reverse=True)[:count]


def streamed(url: str, model: str, prompt: str, max_tokens: int) -> str:
    """The text of a streamed completion at temperature 0. Raises httpx.HTTPError; ValueError for an error in it."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    with (
        httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as answer,
    ):
        if answer.is_error:
            raise ValueError(f"{answer.status_code}: {answer.read().decode(errors='replace')[:300]}")
        return "".join(text for line in answer.iter_lines() for text in texts(line))


def texts(line: str) -> Iterator[str]:
    """The text of each choice in a line of a stream, which may be empty. Raises ValueError for an error."""
    if not line.startswith("data: {"):
        return
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        raise ValueError(str(event["error"]))
    for choice in event["choices"]:
        yield choice["text"]


def to_json(known: Sequence[Known]) -> list[dict[str, Any]]:
    """For a file."""
    return [asdict(each) for each in known]


def from_json(stored: Sequence[Mapping[str, Any]]) -> list[Known]:
    """From that file."""
    return [Known(each["prompt"], each["text"], tuple(each["tokens"]), tuple(each["leads"])) for each in stored]


def prefill(url: str, model: str, prompt: str, **more: object) -> Params:
    """The prefill leg, sent by hand: its ticket. Raises httpx.HTTPError; ValueError where there is none."""
    asked: Params = {"do_remote_decode": True, "do_remote_prefill": False, **more}
    ticket = complete(url, model, prompt, 1, asked).ticket
    if ticket is None:
        raise ValueError("the prefill node answered without a ticket")
    return ticket


def release(url: str, model: str, hand_over: str) -> None:
    """Tell a prefill node to let go of a hand-over. Raises httpx.HTTPError."""
    complete(url, model, "?", 1, {"pdproxy_release": hand_over})
