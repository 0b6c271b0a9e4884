"""Chats on a decode node that resumes by itself: the time saved, and right answers under any eviction.

Long. The first test prints the cost of a later turn with and without a hand-over. The second holds many conversations
of random turns, with and without tickets, on caches that overflow, so that requests are preempted.
"""

import random
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest

from deploy.local.model.quiz import Quiz, quiz, recite
from deploy.local.node import SERVED_NAME, Node, NodeSpec, Role
from deploy.local.stack import logs_of, start_nodes
from deploy.local.supervise import Supervisor
from tests.e2e.conftest import REQUEST_TIMEOUT_S
from tests.e2e.legs import Params, complete, prefill
from tests.e2e.metrics_reader import read, watch

pytestmark = [pytest.mark.e2e, pytest.mark.own_engines, pytest.mark.long, pytest.mark.timeout(1800)]

TURNS = 6
CHATS = 12
CONVERSATIONS = 200
AT_ONCE = 8
BLOCKS = 56
"""Blocks of 256 tokens. Three long conversations overflow them: each takes up to eight, and as many states."""


@dataclass(frozen=True)
class Trio:
    """A prefill and a decode node with small caches, and a plain engine for the expected answers."""

    prefill: Node
    decode: Node
    plain: Node


@pytest.fixture(scope="module")
def trio() -> Iterator[Trio]:
    """Logs: `.run/e2e-resumed`."""
    with Supervisor(logs_of("e2e-resumed")) as supervisor:
        specs = [
            NodeSpec("prefill", Role.PREFILL, 0, 0, gpu_blocks=4 * BLOCKS),
            NodeSpec("decode", Role.DECODE, 0, 0, gpu_blocks=BLOCKS),
            NodeSpec("plain", Role.PLAIN, 0, 0),
        ]
        yield Trio(*start_nodes(supervisor, specs, print))


def first_token(url: str, prompt: str, params: Params | None = None) -> float:
    """Seconds until the first event of a stream."""
    body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": 4, "temperature": 0, "stream": True}
    body |= {"kv_transfer_params": params} if params is not None else {}
    began = time.monotonic()
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=REQUEST_TIMEOUT_S, trust_env=False) as answer:
        events = answer.raise_for_status().iter_lines()
        assert next(events).startswith("data: ")
        took = time.monotonic() - began
        assert all("error" not in event for event in events)
    return took


def handed_over(trio: Trio, prompt: str) -> float:
    """Seconds until the first event of a request with a hand-over, including the prefill leg."""
    began = time.monotonic()
    ticket = prefill(trio.prefill.url, prompt)
    return time.monotonic() - began + first_token(trio.decode.url, prompt, ticket)


def test_a_later_turn_is_quicker_without_a_hand_over(trio: Trio) -> None:
    """Six short turns, alternately all handed over and only the first."""
    with_tickets, without = [], []
    computed, asked = watch(trio.decode.url, "prompt_tokens", source="computed"), 0
    for chat in range(CHATS):
        talk = quiz(5000 + chat, 650)
        handed_over(trio, talk.at_turn(1).prompt())
        before = computed.grown()
        for turn in range(2, TURNS + 1):
            prompt = talk.at_turn(turn).prompt()
            if chat % 2:
                with_tickets.append(handed_over(trio, prompt))
            else:
                without.append(first_token(trio.decode.url, prompt))
                asked += 650 + 5 * (turn - 1)
        if chat % 2 == 0:
            print(f"chat {chat}: {computed.grown() - before:g} tokens computed in turns 2 to {TURNS}")
    told = [f"{statistics.median(each):.3f} s (median of {len(each)})" for each in (with_tickets, without)]
    ratio = statistics.median(without) / statistics.median(with_tickets)
    mean = statistics.fmean(without) / statistics.fmean(with_tickets)
    print(f"first token of turns 2 to {TURNS}: with a hand-over {told[0]}, without {told[1]}: {ratio:.2f} x, ", end="")
    print(f"means {mean:.2f} x; prompt tokens asked without: {asked}")
    assert ratio <= 0.8


@dataclass(frozen=True)
class Conversation:
    """Turns over one list. `handed`: the turns with a ticket."""

    turns: tuple[Quiz, ...]
    handed: tuple[bool, ...]
    tokens: int


def conversation(seed: int) -> Conversation:
    """Two to five turns. Every third conversation ends with a long recital, whose blocks evict others."""
    source = random.Random(seed)
    length, turns = source.randrange(300, 1700), source.randrange(2, 6)
    talk = quiz(seed, length)
    asked = [talk.at_turn(turn) for turn in range(1, turns + 1)]
    if seed % 3 == 0:
        asked.append(recite(seed, length, lines=20))
    handed = tuple(at == 0 or source.random() < 0.4 for at in range(len(asked)))
    return Conversation(tuple(asked), handed, 128)


def hold(trio: Trio, talk: Conversation) -> list[str]:
    """Answers that differ from one engine's."""
    wrong = []
    for question, handed in zip(talk.turns, talk.handed, strict=True):
        prompt = question.prompt()
        params = prefill(trio.prefill.url, prompt) if handed else None
        said = complete(trio.decode.url, prompt, talk.tokens, params).text
        right = complete(trio.plain.url, prompt, talk.tokens).text
        if said != right:
            wrong.append(f"{'with' if handed else 'without'} a ticket: {said!r} instead of {right!r}")
    return wrong


def test_conversations_stay_right_on_caches_that_overflow(trio: Trio) -> None:
    hit = watch(trio.decode.url, "prompt_tokens", source="hit")
    refused = watch(trio.decode.url, "refused")
    preemptions = read(trio.decode.url, "vllm:num_preemptions_total")
    with ThreadPoolExecutor(AT_ONCE) as threads:
        talks = [conversation(seed) for seed in range(7000, 7000 + CONVERSATIONS)]
        wrong = [each for found in threads.map(lambda talk: hold(trio, talk), talks) for each in found]
    preempted = read(trio.decode.url, "vllm:num_preemptions_total") - preemptions
    turns = sum(len(talk.turns) for talk in talks)
    handed = sum(sum(talk.handed) for talk in talks)
    print(f"{CONVERSATIONS} conversations, {turns} turns, {handed} handed over: {len(wrong)} wrong; ", end="")
    print(
        f"{preempted:g} preemptions, {hit.grown():g} prompt tokens hit on the decode node, {refused.grown():g} refused"
    )
    assert not wrong, "\n".join(wrong)
    assert preempted > 0
    assert hit.grown() > 0
    assert refused.grown() == 0
