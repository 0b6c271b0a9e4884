"""A request that waits for its ticket on a node with a tier beside: the tier may have as much, and else it waits on."""

from collections.abc import Callable
from pathlib import Path

import pytest
from vllm.v1.request import RequestStatus

from connector.tiers.pending_loads import AskAgain, LoadFrom, Offer, choose
from tests.connector.harness import BLOCK, Node, make_node, prompt, take_ticket
from tests.connector.test_rendezvous import ORDER, deliver, pass_time, waits
from tests.connector.tiers.harness import Several, loaded, make_several, pull, shelve, tier

pytestmark = pytest.mark.usefixtures("every_pace")

__all__ = ["pass_time"]

TOKENS = prompt(10 * BLOCK + 5)


@pytest.fixture
def prefill() -> Node:
    return make_node("kv_producer", engine_id="engine-p")


@pytest.fixture
def node(tmp_path: Path, pass_time: Callable[[float], None]) -> Several:
    """Made when the clock can be moved already: its parts keep it."""
    return make_several([tier(tmp_path), pull()])


def test_an_awaited_ticket_is_waited_for_when_a_tier_no_longer_is() -> None:
    undecided, awaited = Offer(0, 0, None), Offer(0, 0, None, awaited=True)
    some, as_much = Offer(1, 0, 50), Offer(1, 0, 100)
    assert choose([undecided, some], shared=0, prompt=100, late=True) == LoadFrom(some)
    assert choose([awaited, some], shared=0, prompt=100, late=True) == AskAgain()
    assert choose([as_much, Offer(1, 0, None, awaited=True)], shared=0, prompt=100, late=True) == LoadFrom(as_much)


def test_it_waits_longer_than_a_tier_may_take_and_the_ticket_still_wins(
    prefill: Node, node: Several, tmp_path: Path, pass_time: Callable[[float], None]
) -> None:
    shelve(tmp_path, TOKENS, 5)
    free = node.free_blocks
    request = node.add("d", TOKENS, ORDER)
    node.step()
    pass_time(30)
    node.step()
    assert (request.status, node.free_blocks, node.loads()) == (RequestStatus.WAITING, free, [])
    deliver(node, take_ticket(prefill, TOKENS))
    node.step()
    assert node.reads() == {"d": len(TOKENS) - 1}
    node.step(node.pulled("d"))
    assert len(node.run_out("d")) == 4
    assert node.counts("prompt_tokens") == {"pulled": len(TOKENS) - 1, "computed": 1}


def test_at_its_deadline_the_tier_loads(node: Several, tmp_path: Path, pass_time: Callable[[float], None]) -> None:
    shelve(tmp_path, TOKENS, 5)
    node.add("d", TOKENS, ORDER)
    node.step()
    pass_time(60)
    node.step()
    node.step()
    assert node.loads() == ["d"]
    node.step(loaded("d"))
    node.run_out("d")
    assert node.counts("prompt_tokens") == {"loaded": 5 * BLOCK, "computed": 5 * BLOCK + 5}
    assert waits(node) == {"deadline": 1}


def test_a_tier_that_has_as_much_loads_at_once_and_the_ticket_goes_back(prefill: Node, tmp_path: Path) -> None:
    node = make_several([tier(tmp_path, load_weight=9), pull()])
    shelve(tmp_path, TOKENS, 10)
    node.add("d", TOKENS, ORDER)
    node.step()
    assert node.loads() == ["d"]
    assert waits(node) == {"unneeded": 1}
    ticket = take_ticket(prefill, TOKENS)
    deliver(node, ticket)
    node.step(loaded("d"))
    assert list(node.reads().values()) == [0]
    assert len(node.run_out("d")) == 4
    assert node.counts("prompt_tokens") == {"loaded": 10 * BLOCK, "computed": 5}
