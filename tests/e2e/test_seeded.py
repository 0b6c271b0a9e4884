"""One client's seed must not end a node, nor give other tokens when the prompt is cached.

On a CPU, a seeded request whose prompt was computed in chunks used to end vLLM's engine.
"""

from typing import Any

import httpx
import pytest

from deploy.local.model.quiz import quiz
from deploy.local.node import SERVED_NAME
from tests.e2e.conftest import Pair

pytestmark = pytest.mark.e2e

LONGER_THAN_A_BLOCK = quiz(seed=4711, tokens=1700)


async def sampled(url: str, seed: int) -> tuple[str, int]:
    """The text, and how many prompt tokens were cached. The temperature gives every seed a text of its own."""
    body: dict[str, Any] = {"model": SERVED_NAME, "prompt": LONGER_THAN_A_BLOCK.prompt(), "max_tokens": 24}
    body |= {"seed": seed, "temperature": 2.0, "ignore_eos": True}
    async with httpx.AsyncClient(trust_env=False, timeout=120) as client:
        answer = await client.post(f"{url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    return whole["choices"][0]["text"], (whole["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0)


async def test_a_seed_means_the_same_with_and_without_a_cached_prompt(pair: Pair) -> None:
    """vLLM keeps the state at the prompt's last boundary, so that the second and third request hit the cache."""
    told = [await sampled(pair.decode.url, 3) for _ in range(3)]
    assert [bool(cached) for _, cached in told] == [False, True, True]
    assert len({text for text, _ in told}) == 1
    other, _ = await sampled(pair.decode.url, 4)
    assert other != told[0][0]
