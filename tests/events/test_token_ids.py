"""A prompt's token ids: from the request, or from a node; never waited for in vain."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from pdproxy.errors import Fault
from pdproxy.events.token_ids import (
    BEHIND_SECONDS,
    MOST_AT_ONCE,
    SHUT_SECONDS,
    TokenIds,
    Waiting,
    given_ids,
    tokenize_body,
)
from pdproxy.nodes.node import Role
from pdproxy.request import Endpoint
from tests.events.feeds import Caches
from tests.events.prompts import sub_request
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

    async def of(self, body: dict[str, Any], waits: Waiting = Waiting.PLAN) -> Sequence[int] | None:
        ids = await self.token_ids.fetch(body, self.node, waits)
        return None if ids is None else list(ids)

    def count(self, outcome: str) -> float:
        return self.caches.count("token_ids_total", outcome=outcome)


async def test_a_text_is_rendered_by_the_node() -> None:
    asked = Asked()
    assert await asked.of(TEXT) == [1, 2, 3]
    assert asked.info.asked == [(PATH, TEXT)]
    assert asked.count("fetched") == 1


def test_ids_that_the_request_has_are_taken_as_they_are() -> None:
    assert given_ids(sub_request(Endpoint.COMPLETIONS, {"prompt": [7, 8]})) == [7, 8]
    assert given_ids(sub_request(Endpoint.COMPLETIONS, TEXT)) is None


async def test_a_chat_is_rendered_with_all_that_decides_its_ids() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = [{"role": "user", "content": "hi"}]
    body = {
        "model": "tiny", "messages": messages, "tools": tools, "add_generation_prompt": False,
        "chat_template_kwargs": {"style": "plain"}, "documents": [{"text": "d"}], "reasoning_effort": "low",
        "temperature": 0, "max_tokens": 9, "stream": True,
    }  # fmt: skip
    assert tokenize_body(sub_request(Endpoint.CHAT, body)) == {
        "model": "tiny", "messages": messages, "tools": tools, "add_generation_prompt": False,
        "chat_template_kwargs": {
            "style": "plain", "documents": [{"text": "d"}], "reasoning_effort": "low", "enable_thinking": True
        },
    }  # fmt: skip


def test_thinking_is_the_clients_own_choice_where_it_made_one() -> None:
    body = {"messages": [], "reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    assert tokenize_body(sub_request(Endpoint.CHAT, body)) == {
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
def test_what_a_node_would_render_otherwise_is_not_asked_for(endpoint: Endpoint, body: dict[str, Any]) -> None:
    assert tokenize_body(sub_request(endpoint, body)) is None


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


@pytest.mark.parametrize(("waits", "most"), [(Waiting.PLAN, MOST_AT_ONCE), (Waiting.NOTHING, MOST_AT_ONCE // 2)])
async def test_only_so_many_are_asked_for_at_once(waits: Waiting, most: int) -> None:
    asked = Asked()
    asked.info.held.clear()
    asking = [asyncio.create_task(asked.of({"prompt": str(number)}, waits)) for number in range(most)]
    await settle()
    assert await asked.of(TEXT, waits) is None
    assert asked.count("busy") == 1
    asked.info.held.set()
    assert await asyncio.gather(*asking) == [[1, 2, 3]] * most
    assert await asked.of(TEXT, waits) == [1, 2, 3]


async def slow(asked: Asked, seconds: float) -> None:
    """A node takes so long for a prompt."""
    asked.info.held.clear()
    waiting = asyncio.create_task(asked.of(TEXT))
    await settle()
    asked.caches.clock.advance(seconds)
    asked.info.held.set()
    assert await waiting == [1, 2, 3]


async def test_it_pays_to_wait_where_ids_save_more_than_nodes_take() -> None:
    asked = Asked()
    assert asked.token_ids.pays(0.001)
    await slow(asked, 0.02)
    assert not asked.token_ids.pays(0.01)
    assert asked.token_ids.pays(0.03)


async def test_it_does_not_pay_to_wait_for_nodes_that_take_longer_than_they_may() -> None:
    """Which shows where nothing waits for them: a node has more time there."""
    asked = Asked()
    asked.info.paths[PATH] = Fault.HEADERS_TIMEOUT
    assert await asked.of(TEXT, Waiting.NOTHING) is None
    assert not asked.token_ids.pays(10 * BEHIND_SECONDS)
    asked.answers(4)
    for _ in range(40):
        await asked.of(TEXT, Waiting.NOTHING)
    assert asked.token_ids.pays(0.05), "one slow answer is not believed for ever"
