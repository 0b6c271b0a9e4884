"""A client asks for a keep: a real prefill node keeps the conversation, and usage shows the hits."""

import pytest
from openai import OpenAI

from deploy.local.model.quiz import quiz
from deploy.local.node import SERVED_NAME
from deploy.local.stack import Proxy
from tests.e2e.conftest import Pair
from tests.e2e.metrics_reader import read, watch

pytestmark = pytest.mark.e2e

TOKENS = 900
ENOUGH = 0.8
"""The share of a first turn's prompt that the second turn hits at least: whole blocks of 256 tokens."""


def ask(client: OpenAI, prompt: str, **more: object) -> tuple[str, int, int]:
    """The answer, the tokens of the prompt, and those that its prefill node had cached."""
    got = client.completions.create(model=SERVED_NAME, prompt=prompt, max_tokens=8, temperature=0, extra_body=more)
    assert got.usage is not None
    details = got.usage.prompt_tokens_details
    return got.choices[0].text, got.usage.prompt_tokens, (details.cached_tokens or 0) if details is not None else 0


def test_a_conversation_is_kept_on_the_prefill_node_until_its_next_turn(
    proxy: Proxy, pair: Pair, sync_client: OpenAI
) -> None:
    talk, node = quiz(47_001, TOKENS), pair.prefill.url
    begun, hits = watch(node, "keeps_begun"), watch(node, "keeps_ended", reason="hit")
    text, tokens, _ = ask(sync_client, talk.at_turn(1).prompt(), prompt_cache_options={"ttl": "5m"})
    assert text == talk.at_turn(1).answer
    begun.reaches(1)
    assert read(node, "pdproxy_connector_keeps") >= 1
    text, _, cached = ask(sync_client, talk.at_turn(2).prompt(), prompt_cache_options={"mode": "explicit"})
    assert text == talk.at_turn(2).answer
    assert cached >= ENOUGH * tokens
    hits.reaches(1)
    assert begun.grown() == 1, "the second turn asks for nothing to be kept"
    assert read(proxy.admin_url, "pdproxy_keep_tokens_total", kind="hit") >= ENOUGH * tokens
    assert read(proxy.admin_url, "pdproxy_keep_turns_total", outcome="there") >= 1
