"""A prompt's token ids: from the request, from an equal prompt before, or from a node; never waited for in vain."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from pdproxy.errors import Fault
from pdproxy.events import token_ids
from pdproxy.events.token_ids import MOST_AT_ONCE, SHUT_SECONDS, TokenIds, tokenize_body
from pdproxy.nodes.node import Role
from pdproxy.request import Endpoint
from tests.events.feeds import Caches
from tests.nodes.fake_pool import FakeNodeInfo, FakePoolTransport, settle

PATH = "/tokenize"
TEXT = {"model": "tiny", "prompt": "a b c"}


class Asked:
    """One node that renders prompts, and what became of asking it."""

    def __init__(self) -> None:
        self.caches = Caches()
        self.info = FakeNodeInfo(Role.PREFILL)
        self.answers(1, 2, 3)
        self.transport = FakePoolTransport(p=self.info)
        self.node = self.transport.node("p")
        self.token_ids = TokenIds(self.transport, self.caches.clock, self.caches.metrics, 0.05)

    def answers(self, *ids: int) -> None:
        self.info.paths[PATH] = 200, json.dumps({"count": len(ids), "tokens": ids, "token_strs": None}).encode()

    async def of(self, body: dict[str, Any], endpoint: Endpoint = Endpoint.COMPLETIONS) -> Sequence[int] | None:
        ids = await self.token_ids.of(endpoint, body, self.node)
        return None if ids is None else list(ids)

    def count(self, outcome: str) -> float:
        return self.caches.count("token_ids_total", outcome=outcome)


async def test_a_text_is_rendered_by_the_node_once() -> None:
    asked = Asked()
    assert [await asked.of(TEXT) for _ in range(3)] == [[1, 2, 3]] * 3
    assert asked.info.asked == [(PATH, TEXT)]
    assert (asked.count("fetched"), asked.count("kept")) == (1, 2)


async def test_ids_that_the_request_has_are_taken_as_they_are() -> None:
    asked = Asked()
    assert await asked.of({"prompt": [7, 8]}) == [7, 8]
    continued = {"messages": [], "kv_transfer_params": {"prompt_token_ids": [5, 6]}}
    assert await asked.of(continued, Endpoint.CHAT) == [5, 6]
    assert asked.info.asked == []


async def test_a_chat_is_rendered_with_all_that_decides_its_ids() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = [{"role": "user", "content": "hi"}]
    body = {
        "model": "tiny", "messages": messages, "tools": tools, "add_generation_prompt": False,
        "chat_template_kwargs": {"style": "plain"}, "documents": [{"text": "d"}], "reasoning_effort": "low",
        "temperature": 0, "max_tokens": 9, "stream": True,
    }  # fmt: skip
    assert tokenize_body(Endpoint.CHAT, body) == {
        "model": "tiny", "messages": messages, "tools": tools, "add_generation_prompt": False,
        "chat_template_kwargs": {
            "style": "plain", "documents": [{"text": "d"}], "reasoning_effort": "low", "enable_thinking": True
        },
    }  # fmt: skip


def test_thinking_is_the_clients_own_choice_where_it_made_one() -> None:
    body = {"messages": [], "reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    assert tokenize_body(Endpoint.CHAT, body) == {
        "messages": [],
        "chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": "none"},
    }


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (Endpoint.COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 3}),
        (Endpoint.COMPLETIONS, {"prompt": "a", "suffix": "b"}),
        (Endpoint.COMPLETIONS, {"prompt": "a", "prompt_embeds": "x"}),
        (Endpoint.COMPLETIONS, {"prompt": ["a", "b"]}),
        (Endpoint.COMPLETIONS, {}),
        (Endpoint.CHAT, {"messages": [{"content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]}),
        (Endpoint.RESPONSES, {"input": "a"}),
        (Endpoint.MESSAGES, {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
async def test_what_a_node_would_render_otherwise_is_not_asked_for(endpoint: Endpoint, body: dict[str, Any]) -> None:
    asked = Asked()
    assert await asked.of(body, endpoint) is None
    assert asked.info.asked == []
    assert asked.count("unsuitable") == 1


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (Fault.HEADERS_TIMEOUT, "late"),
        (Fault.STALL, "late"),
        (Fault.REFUSED, "failed"),
        ((500, b""), "failed"),
        ((200, b"no json"), "failed"),
        ((200, b'{"tokens": ["a"]}'), "failed"),
        ((200, b'{"tokens": [-1]}'), "failed"),
        ((200, b"{}"), "failed"),
        ((200, b'{"tokens": []}'), "failed"),
    ],
)
async def test_the_request_goes_on_without_ids(answer: Fault | tuple[int, bytes], outcome: str) -> None:
    asked = Asked()
    asked.info.paths[PATH] = answer
    assert await asked.of(TEXT) is None
    assert asked.count(outcome) == 1
    asked.answers(4)
    assert await asked.of(TEXT) == [4]


async def test_a_node_that_cannot_render_is_left_in_peace_for_a_while() -> None:
    asked = Asked()
    asked.info.paths[PATH] = 404, b""
    assert [await asked.of({"prompt": str(number)}) for number in range(3)] == [None] * 3
    assert len(asked.info.asked) == 1
    asked.answers(4)
    asked.caches.clock.advance(SHUT_SECONDS)
    assert await asked.of(TEXT) == [4]


async def test_only_so_many_are_asked_for_at_once() -> None:
    asked = Asked()
    asked.info.held.clear()
    asking = [asyncio.create_task(asked.of({"prompt": str(number)})) for number in range(MOST_AT_ONCE)]
    await settle()
    assert await asked.of(TEXT) is None
    assert asked.count("busy") == 1
    asked.info.held.set()
    assert await asyncio.gather(*asking) == [[1, 2, 3]] * MOST_AT_ONCE
    assert await asked.of(TEXT) == [1, 2, 3]


async def test_what_is_kept_is_bounded_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_ids, "KEPT_TOKENS", 7)
    asked = Asked()
    for prompt in ("a", "b", "a", "c"):  # three ids each: of the three prompts two fit, and "a" was used after "b"
        await asked.of({"prompt": prompt})
    assert [body["prompt"] for _, body in asked.info.asked] == ["a", "b", "c"]
    await asked.of({"prompt": "a"})
    await asked.of({"prompt": "b"})
    assert [body["prompt"] for _, body in asked.info.asked] == ["a", "b", "c", "b"]


async def slow(asked: Asked, seconds: float) -> None:
    """A node takes so long for a prompt that was not seen before."""
    asked.info.held.clear()
    waiting = asyncio.create_task(asked.of({"model": "tiny", "prompt": f"takes {seconds}"}))
    await settle()
    asked.caches.clock.advance(seconds)
    asked.info.held.set()
    assert await waiting == [1, 2, 3]


async def test_no_node_is_asked_where_it_takes_longer_than_ids_can_save() -> None:
    asked = Asked()
    await slow(asked, 0.02)
    assert await asked.token_ids.of(Endpoint.COMPLETIONS, TEXT, asked.node, 0.01) is None
    assert asked.count("not_worth") == 1
    assert await asked.token_ids.of(Endpoint.COMPLETIONS, TEXT, asked.node, 0.03) is not None
    assert await asked.token_ids.of(Endpoint.COMPLETIONS, TEXT, asked.node, 0.0) is not None, "these are kept"


async def test_one_slow_answer_is_not_believed_for_ever() -> None:
    asked = Asked()
    await slow(asked, 0.04)
    for _ in range(100):
        if await asked.token_ids.of(Endpoint.COMPLETIONS, TEXT, asked.node, 0.01) is not None:
            break
    assert 0 < asked.count("not_worth") < 100
