"""Send the two legs of a request by hand, as a proxy does, and hand over prompts that must be read and verified."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from deploy.local.model.quiz import Quiz, quiz
from deploy.local.node import SERVED_NAME, Node
from tests.e2e.conftest import REQUEST_TIMEOUT_S
from tests.e2e.metrics_reader import watch

Params = dict[str, Any]
AT_ONCE = 8
LENGTH = 800
"""Tokens of a prompt: three blocks and a part of one."""
TO_HAND_OVER: Params = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass(frozen=True)
class Completion:
    """A node's answer. `prompt`, `cached`: tokens of the prompt, and those of them that the node had cached."""

    text: str
    ticket: Params | None
    prompt: int
    cached: int
    logprobs: tuple[float, ...]


def complete(url: str, prompt: str, max_tokens: int = 8, params: Params | None = None) -> Completion:
    """A completion at temperature 0, with the log-probability of each token. Raises httpx.HTTPError."""
    body: dict[str, Any] = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    body |= {"logprobs": 1} | ({"kv_transfer_params": params} if params is not None else {})
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=REQUEST_TIMEOUT_S, trust_env=False)
    answer.raise_for_status()
    got = answer.json()
    choice, details = got["choices"][0], got["usage"].get("prompt_tokens_details") or {}
    return Completion(
        choice["text"],
        got.get("kv_transfer_params"),
        got["usage"]["prompt_tokens"],
        details.get("cached_tokens") or 0,
        tuple(choice["logprobs"]["token_logprobs"]),
    )


def prefill(url: str, prompt: str, **more: Any) -> Params:
    """Send the prefill leg. Returns its ticket."""
    ticket = complete(url, prompt, 1, {**TO_HAND_OVER, **more}).ticket
    assert ticket is not None, "the prefill node gave no ticket"
    return ticket


def release(url: str, hand_over: str) -> None:
    """Release a hand-over at a prefill node."""
    complete(url, "?", 1, {"pdproxy_release": hand_over})


def hand_over(give: str, take: str, question: Quiz) -> None:
    """Prefill on one node and decode on the other. The answer must be right, and the read verified."""
    verified, ended = watch(take, "reads", outcome="verified"), watch(take, "reads")
    assert complete(take, question.prompt(), params=prefill(give, question.prompt())).text == question.answer
    ended.reaches(1)
    assert verified.grown() == 1


def hand_all_over(give: Node, take: Node, seeds: Sequence[int]) -> None:
    """Hand over prompts, `AT_ONCE` at a time. Every answer must be right, every read verified, no ticket refused."""
    refused, ended = watch(take.url, "refused"), watch(take.url, "reads")
    verified = watch(take.url, "reads", outcome="verified")

    def answered_right(seed: int) -> bool:
        question = quiz(seed, LENGTH)
        return (
            complete(take.url, question.prompt(), params=prefill(give.url, question.prompt())).text == question.answer
        )

    with ThreadPoolExecutor(AT_ONCE) as threads:
        right = sum(threads.map(answered_right, seeds))
    reads = len(seeds) * take.spec.tensor_parallel_size
    ended.reaches(reads)
    counts = f"{verified.grown():g} of {reads} reads verified, {refused.grown():g} tickets refused"
    print(f"{give.spec.name} to {take.spec.name}: {right} of {len(seeds)} right, {counts}")
    assert right == len(seeds)
    assert (verified.grown(), ended.grown(), refused.grown()) == (reads, reads, 0)
