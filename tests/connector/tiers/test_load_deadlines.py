"""A tier's load that takes too long, on vLLM's real scheduler: its request computes, its blocks wait for its end."""

import time
from pathlib import Path

import pytest
from vllm.v1.outputs import KVConnectorOutput

from connector.tiers.rank_loads import WeightedReport
from tests.connector.harness import BLOCK, DENSE, HYBRID, Node, make_node, prompt, take_ticket
from tests.connector.tiers.harness import Several, loaded, make_several, pull, shelve, tier

TOKENS = prompt(6 * BLOCK + 4)
DEADLINE = 0.05


@pytest.fixture(params=[HYBRID, DENSE], ids=["hybrid", "dense"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Several:
    made = make_several([tier(tmp_path), pull()], request.param, pdproxy_load_deadline=DEADLINE)
    made.step()
    shelve(tmp_path, TOKENS, 6)
    return made


def start_overdue_load(node: Several) -> None:
    """A load that is overdue when this returns; no child was called."""
    node.add("d", TOKENS)
    node.step()
    assert node.loads() == ["d"]
    assert node.plans[-1].overdue == frozenset()
    time.sleep(DEADLINE)


def given_up(ranks: int = 1) -> KVConnectorOutput:
    """The workers say: this load still runs on so many ranks, and has failed."""
    report = WeightedReport(None, {"d": ranks}, {})
    return KVConnectorOutput(finished_recving={"d"}, failed_recving={"d"}, kv_connector_worker_meta=report)


def drained() -> KVConnectorOutput:
    """The workers say: it has ended on one rank."""
    return KVConnectorOutput(kv_connector_worker_meta=WeightedReport(None, {}, {"d": 1}))


def is_clean(node: Several) -> bool:
    return not len(node.connector._loads) and not len(node.connector._deadlines) and not node.scheduler.has_requests()


def test_the_request_computes_and_its_blocks_come_back_with_the_loads_end(node: Several) -> None:
    free = node.free_blocks
    start_overdue_load(node)
    held = free - node.free_blocks
    node.step()
    assert node.plans[-1].overdue == {"d"}
    node.step(given_up())
    assert len(node.run_out("d")) == 4
    assert node.selected("disk") == {"queries": 1, "wins": 1, "tokens_won": 6 * BLOCK, "failed_loads": 1}
    assert node.counts("prompt_tokens") == {"computed": len(TOKENS)}
    assert node.pending["disk"] == 1
    assert "d received" not in node.disk().calls
    node.step()
    assert node.free_blocks == free - held
    assert node.scheduler.has_requests(), "an idle engine steps on, or the end would never be reported"
    node.step(drained())
    assert node.free_blocks == free
    assert node.disk().calls[-1] == "d received"
    node.step()
    assert node.pending["disk"] == 0
    assert is_clean(node)


def test_an_aborted_request_s_blocks_wait_too(node: Several) -> None:
    free = node.free_blocks
    start_overdue_load(node)
    held = free - node.free_blocks
    node.abort("d")
    node.step()
    assert node.plans[-1].overdue == {"d"}
    node.step(given_up())
    assert node.scheduler.requests == {}
    assert node.free_blocks == free - held
    node.step(drained())
    node.step()
    assert node.free_blocks == free
    assert is_clean(node)


def test_a_load_that_ends_when_it_is_overdue_is_good(node: Several) -> None:
    start_overdue_load(node)
    for overdue_now in ({"d"}, set()):
        node.step()
        assert node.plans[-1].overdue == overdue_now, "reported once"
    node.step(loaded("d"))
    assert len(node.run_out("d")) == 4
    assert node.counts("prompt_tokens") == {"loaded": 6 * BLOCK, "computed": 4}
    node.step()
    assert is_clean(node)


def test_every_rank_s_load_is_waited_for(node: Several) -> None:
    free = node.free_blocks
    start_overdue_load(node)
    node.step(given_up(ranks=2))
    node.run_out("d")
    node.step(drained())
    assert node.free_blocks < free
    node.step(drained())
    assert node.free_blocks == free


def test_nothing_is_remembered_of_an_aborted_request_whose_load_fails(node: Several) -> None:
    start_overdue_load(node)
    node.abort("d")
    node.step(loaded("d", failed=["d"]))
    node.step()
    assert is_clean(node)


def test_a_ticket_s_read_has_a_deadline_of_its_own(tmp_path: Path) -> None:
    prefill: Node = make_node("kv_producer", engine_id="engine-p")
    node = make_several([tier(tmp_path), pull()], pdproxy_load_deadline=DEADLINE)
    node.add("d", TOKENS, take_ticket(prefill, TOKENS))
    node.step()
    time.sleep(DEADLINE)
    node.step()
    assert node.plans[-1].overdue == frozenset()
    assert len(node.connector._deadlines) == 0
