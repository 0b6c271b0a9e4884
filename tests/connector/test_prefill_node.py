"""A prefill node on vLLM's real scheduler: tickets, leases and releases."""

from typing import Any

import pytest

from connector.lease import Verdict
from connector.metadata import WorkerReport
from tests.connector.harness import DENSE, Node, make_node, prompt, sent, take_ticket

pytestmark = pytest.mark.usefixtures("every_pace")

ID = "hand-over-0123456789"
LEG = {"do_remote_decode": True}


@pytest.fixture
def node() -> Node:
    return make_node("kv_producer", engine_id="engine-p")


def release(node: Node, name: str = ID) -> None:
    node.add(f"release-{len(node.metas)}", [5], {"pdproxy_release": name}, max_tokens=1)
    node.step()


def test_a_ticket_names_the_blocks_and_holds_them(node: Node) -> None:
    free = node.free_blocks
    ticket = take_ticket(node, prompt(100))
    assert [len(ids) for ids in ticket["remote_block_ids"]] == [7, 1]
    assert ticket["remote_num_tokens"] == 99
    assert node.free_blocks == free - 8
    assert node.side.judge("engine-p", "p-0", "any") is Verdict.HELD


def test_a_read_frees_the_blocks_and_stays_good(node: Node) -> None:
    free = node.free_blocks
    take_ticket(node, prompt(100))
    node.step(sent("p-0", report=WorkerReport(reads_seen={"p-0": {"n": 1}})))
    assert node.free_blocks == free
    assert node.side.judge("engine-p", "p-0", "n") is Verdict.RELEASED_BY_YOU
    assert node.side.judge("engine-p", "p-0", "m") is Verdict.RELEASED_BY_ANOTHER
    assert node.counts("leases_ended") == {"read": 1}


def test_a_lease_that_runs_out_is_told(node: Node) -> None:
    take_ticket(node, prompt(100))
    node.step(sent("p-0"))
    assert node.side.judge("engine-p", "p-0", "n") is Verdict.EXPIRED
    assert node.counts("leases_ended") == {"expired": 1}


def test_another_engine_s_question_is_unknown(node: Node) -> None:
    take_ticket(node, prompt(100))
    assert node.side.judge("engine-q", "p-0", "n") is Verdict.UNKNOWN


def test_the_workers_hear_of_readers(node: Node) -> None:
    take_ticket(node, prompt(100), pdproxy_readers=3)
    node.step()
    told = [meta for meta in node.metas if meta.reqs_to_send]
    assert [meta.readers for meta in told] == [{"p-0": 3}]


def test_a_release_after_the_prefill_reaches_the_workers_at_once(node: Node) -> None:
    take_ticket(node, prompt(100), pdproxy_hand_over=ID)
    release(node)
    assert node.metas[-1].releases == {"p-0"}
    node.step(sent("p-0"))
    assert node.counts("leases_ended") == {"released": 1}
    release(node)
    assert not node.metas[-1].releases


def test_a_release_before_the_prefill_means_that_nothing_is_held(node: Node) -> None:
    free = node.free_blocks
    release(node)
    node.add("p-0", prompt(100), {**LEG, "pdproxy_hand_over": ID}, max_tokens=1)
    assert node.run_out("p-0")[-1].kv_transfer_params is None
    assert node.free_blocks == free


def test_a_release_during_the_prefill_frees_at_its_end() -> None:
    node = make_node("kv_producer", engine_id="engine-p", num_blocks=800)
    free = node.free_blocks
    for name in ("p-0", "p-1"):
        node.add(name, prompt(4000, seed=len(name)), {**LEG, "pdproxy_hand_over": ID}, max_tokens=1)
    node.add("late", prompt(100), max_tokens=1)
    node.add("release", [5], {"pdproxy_release": ID}, max_tokens=1)
    ended: dict[str, Any] = {}
    for _ in range(10):
        ended |= {output.request_id: output.kv_transfer_params for output in node.step()}
    assert ended["p-0"] is None
    assert ended["p-1"] is None
    assert node.free_blocks == free


def test_two_prompts_may_share_a_hand_over(node: Node) -> None:
    take_ticket(node, prompt(100), "p-0", pdproxy_hand_over=ID)
    take_ticket(node, prompt(100, seed=1), "p-1", pdproxy_hand_over=ID)
    release(node)
    assert node.metas[-1].releases == {"p-0", "p-1"}


def test_an_aborted_prefill_holds_nothing(node: Node) -> None:
    free = node.free_blocks
    node.add("p-0", prompt(100), {**LEG, "pdproxy_hand_over": ID}, max_tokens=1)
    node.abort("p-0")
    node.step()
    assert node.free_blocks == free
    release(node)
    assert not node.metas[-1].releases


@pytest.mark.parametrize("length", [1, 2])
def test_the_shortest_prompts(node: Node, length: int) -> None:
    """One token leaves no state to hand over: a decode node would start from the wrong one."""
    node.add("p-0", prompt(length), dict(LEG), max_tokens=1)
    assert (node.run_out("p-0")[-1].kv_transfer_params is None) == (length == 1)


def test_a_sender_cannot_keep_the_last_token_in(node: Node) -> None:
    """With vLLM's own marker set, its prefill would answer with the state after the last token."""
    assert take_ticket(node, prompt(100), _p_side_truncated=True)["remote_num_tokens"] == 99


def test_remote_fields_on_a_prefill_leg_are_refused_and_computed(node: Node) -> None:
    node.add("p-0", prompt(100), {**LEG, "remote_block_ids": [[1], [2]], "remote_host": "10.6.6.6"}, max_tokens=1)
    assert node.run_out("p-0")[-1].kv_transfer_params is None
    assert node.counts("refused") == {"remote_fields_on_prefill": 1}


def test_a_dense_model_hands_over_the_whole_prompt() -> None:
    node = make_node("kv_producer", DENSE)
    ticket = take_ticket(node, prompt(100))
    assert ticket["remote_num_tokens"] == 100
    assert [len(ids) for ids in ticket["remote_block_ids"]] == [7]


def test_the_accounts_add_up(node: Node) -> None:
    take_ticket(node, prompt(100), "p-0")
    take_ticket(node, prompt(150), "p-1")
    assert sum(node.counts("prompt_tokens").values()) == 99 + 149
