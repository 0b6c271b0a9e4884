"""A resumed request on a node with a tier beside: its order is carried out once, before any connector sees it."""

from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request

from connector.resume_order import KEY, sign
from tests.connector.harness import BLOCK, Node, make_node, prompt, take_ticket
from tests.connector.tiers.harness import Several, loaded, make_several, pull, shelve, tier

pytestmark = pytest.mark.usefixtures("every_pace")

TOKENS = prompt(10 * BLOCK + 5)
OLD = [21] * (BLOCK + 3)


@pytest.fixture
def prefill() -> Node:
    return make_node("kv_producer", engine_id="engine-p")


@pytest.fixture(params=["tier first", "tier last"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Several:
    children = [tier(tmp_path), pull()]
    return make_several(children if request.param == "tier first" else children[::-1])


def resume(node: Several, params: Any = None) -> Request:
    order = {KEY: sign(node.side.resumed.secret, "d", OLD)}
    return node.add("d", TOKENS, {**(params or {}), **order}, max_tokens=len(OLD) + 2)


def test_its_ticket_is_read_and_its_tokens_are_there_once(prefill: Node, node: Several) -> None:
    request = resume(node, take_ticket(prefill, TOKENS))
    assert KEY not in request.kv_transfer_params
    node.step()
    assert node.reads() == {"d": len(TOKENS) - 1}
    node.step(node.pulled("d"))
    assert len(node.run_out("d")) == 2
    assert list(request.output_token_ids) == [*OLD, 7, 7]
    assert node.counts("resumed_requests") == {"": 1}


def test_a_tier_may_bring_it_too(node: Several, tmp_path: Path) -> None:
    shelve(tmp_path, TOKENS, 5)
    request = resume(node)
    node.step()
    assert node.loads() == ["d"]
    node.step(loaded("d"))
    assert len(node.run_out("d")) == 2
    assert list(request.output_token_ids) == [*OLD, 7, 7]
    assert node.counts("prompt_tokens") == {}


def test_a_refused_order_ends_it_here_too(prefill: Node, node: Several) -> None:
    node.add("d", TOKENS, {**take_ticket(prefill, TOKENS), KEY: 7})
    outputs = node.run_out("d")
    assert [(each.finish_reason, each.new_token_ids) for each in outputs] == [(FinishReason.ERROR, [])]
    assert node.counts("resumes_refused") == {"not_an_object": 1}
    node.step()
    assert "d" not in node.scheduler.requests
