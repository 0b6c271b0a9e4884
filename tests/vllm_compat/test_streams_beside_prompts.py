"""Streams beside prompts, by vLLM's own scheduler: what `LocalPrice.stall` takes from it."""

import pytest

from tests.connector.harness import BLOCK, DENSE, HYBRID, make_node

LONG = 5 * BLOCK + 3


@pytest.mark.parametrize("groups", [DENSE, HYBRID], ids=["attention", "hybrid"])
def test_a_stream_gets_a_token_in_every_step_in_which_prompts_are_computed(groups: list[object]) -> None:
    """And so between two prompts of which the second came while the first was computed."""
    node = make_node("kv_consumer", groups)
    node.add("stream", [1] * 3, max_tokens=100)
    node.step()
    node.add("first", [2] * LONG, max_tokens=1)
    ended = list[set[str]]()
    while len(ended) < 20 and not any("second" in each for each in ended):
        ended.append({output.request_id for output in node.step()})
        if len(ended) == 1:
            node.add("second", [3] * LONG, max_tokens=1)
    assert all("stream" in each for each in ended)
    first, second = (next(at for at, each in enumerate(ended) if name in each) for name in ("first", "second"))
    assert first < second
