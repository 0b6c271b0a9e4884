"""A prefill node on vLLM's real scheduler: tickets, leases and releases."""

import json
from typing import Any

import pytest
from vllm.v1.request import Request

from connector.messages import Verdict
from connector.metadata import WorkerReport
from connector.ticket_fields import is_usable_name
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
    assert node.side.verify("engine-p", ticket["remote_request_id"], "any") is Verdict.HELD


def test_a_read_frees_the_blocks_and_stays_good(node: Node) -> None:
    free = node.free_blocks
    alias = take_ticket(node, prompt(100))["remote_request_id"]
    node.step(sent("p-0", report=WorkerReport(reads_seen={"p-0": {"n": 1}})))
    assert node.free_blocks == free
    assert node.side.verify("engine-p", alias, "n") is Verdict.RELEASED_BY_YOU
    assert node.side.verify("engine-p", alias, "m") is Verdict.RELEASED_BY_ANOTHER
    assert node.counts("leases_ended") == {"read": 1}


def test_a_lease_that_expires_is_counted(node: Node) -> None:
    alias = take_ticket(node, prompt(100))["remote_request_id"]
    node.step(sent("p-0"))
    assert node.side.verify("engine-p", alias, "n") is Verdict.EXPIRED
    assert node.counts("leases_ended") == {"expired": 1}


def test_another_engine_s_question_is_unknown(node: Node) -> None:
    alias = take_ticket(node, prompt(100))["remote_request_id"]
    assert node.side.verify("engine-q", alias, "n") is Verdict.UNKNOWN


def test_the_workers_get_the_number_of_readers(node: Node) -> None:
    take_ticket(node, prompt(100), pdproxy_readers=3)
    node.step()
    leased = [meta for meta in node.metas if meta.reqs_to_send]
    assert [meta.readers for meta in leased] == [{"p-0": 3}]


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


# ---- what a ticket calls its request


def names_sent(node: Node) -> dict[str, str]:
    """Alias → request id, as the workers know it by now."""
    known: dict[str, str] = {}
    for meta in node.metas:
        known |= meta.aliases
        known = {alias: name for alias, name in known.items() if name not in meta.retired}
    return known


def test_a_ticket_names_an_alias_and_never_the_request(node: Node) -> None:
    one, other = (take_ticket(node, prompt(100, seed), f"p-{seed}") for seed in (0, 1))
    assert one["remote_request_id"] != other["remote_request_id"]
    assert len(one["remote_request_id"]) == 24
    assert is_usable_name(one["remote_request_id"])
    assert "p-0" not in json.dumps(one)
    assert node.side.verify("engine-p", "p-0", "any") is Verdict.UNKNOWN


def test_the_workers_know_the_alias_before_there_is_a_ticket() -> None:
    """A prompt of several steps, behind another one: the alias goes out with the first step after its arrival."""
    node = make_node("kv_producer", engine_id="engine-p", num_blocks=800)
    node.add("before", prompt(4000), max_tokens=1)
    node.add("p-0", prompt(4000, seed=1), dict(LEG), max_tokens=1)
    ended = node.step()
    assert not ended or ended[-1].request_id == "before"
    assert list(names_sent(node).values()) == ["p-0"]
    ticket = node.run_out("p-0")[-1].kv_transfer_params
    assert ticket is not None
    assert list(names_sent(node)) == [ticket["remote_request_id"]]


def test_a_preempted_prefill_keeps_its_alias() -> None:
    node = make_node("kv_producer", engine_id="engine-p")
    node.add("p-0", prompt(4000), dict(LEG), max_tokens=1)
    node.add("p-1", prompt(2000, seed=1), dict(LEG), max_tokens=1)
    node.step()
    known = names_sent(node)
    preempted = node.scheduler.running.pop()
    node.scheduler._preempt_request(preempted, 0.0)
    ticket = node.run_out(preempted.request_id)[-1].kv_transfer_params
    assert ticket is not None
    assert known[ticket["remote_request_id"]] == preempted.request_id


@pytest.mark.parametrize("end", ["read", "abort", "abort before a step", "release"])
def test_an_alias_is_forgotten_with_what_it_named(node: Node, end: str) -> None:
    if end == "read":
        take_ticket(node, prompt(100))
        node.step(sent("p-0"))
    elif end == "release":
        release(node)
        node.add("p-0", prompt(100), {**LEG, "pdproxy_hand_over": ID}, max_tokens=1)
        node.run_out("p-0")
    else:
        node.add("p-0", prompt(4300 if end == "abort" else 100), dict(LEG), max_tokens=1)
        if end == "abort":
            node.step()
        node.abort("p-0")
    node.step()
    assert names_sent(node) == {}
    assert len(node.side._tickets._aliases) == 0


def test_a_refused_prefill_leg_has_no_alias(node: Node) -> None:
    node.add("p-0", prompt(100), {**LEG, "remote_host": "10.6.6.6"}, max_tokens=1)
    node.run_out("p-0")
    assert names_sent(node) == {}


# ---- what a ticket's holder may do, and who knows a hand-over id


def test_an_alias_releases_nothing(node: Node) -> None:
    alias = take_ticket(node, prompt(100), pdproxy_hand_over=ID)["remote_request_id"]
    for guess in (alias, "engine-p-0123456789", ID[:-1] + "x"):
        release(node, guess)
        assert not node.metas[-1].releases
    assert node.side.verify("engine-p", alias, "any") is Verdict.HELD


def test_a_ticket_does_not_tell_its_hand_over_and_a_hand_over_is_not_in_what_the_workers_get(node: Node) -> None:
    ticket = take_ticket(node, prompt(100), pdproxy_hand_over=ID)
    assert ID not in json.dumps(ticket)
    assert not any(ID in str(vars(meta)) for meta in node.metas)
    assert node.side.verify("engine-p", ID, "any") is Verdict.UNKNOWN


def test_a_second_leg_under_a_hand_over_gets_its_own_ticket_and_ends_with_it(node: Node) -> None:
    """Who names another's hand-over knows it; he gains no more than its owner: to release what is held under it."""
    mine = take_ticket(node, prompt(100), "p-0", pdproxy_hand_over=ID)
    theirs = take_ticket(node, prompt(100), "p-1", pdproxy_hand_over=ID)
    assert mine["remote_request_id"] != theirs["remote_request_id"]
    node.step(sent("p-1", report=WorkerReport(reads_seen={"p-1": {"n": 1}})))
    assert node.side.verify("engine-p", mine["remote_request_id"], "any") is Verdict.HELD
    assert node.side.verify("engine-p", theirs["remote_request_id"], "m") is Verdict.RELEASED_BY_ANOTHER
    release(node)
    assert node.metas[-1].releases == {"p-0"}


def test_a_release_cannot_be_made_in_advance_by_a_ticket_s_holder(node: Node) -> None:
    """An alias that was 'released' stays without meaning: the next leg with a hand-over of its own is held."""
    alias = take_ticket(node, prompt(100))["remote_request_id"]
    release(node, alias)
    again = take_ticket(node, prompt(100), "p-1", pdproxy_hand_over=ID)
    assert node.side.verify("engine-p", again["remote_request_id"], "any") is Verdict.HELD


# ---- a request is announced


def test_a_request_that_is_announced_twice_is_truncated_once(node: Node) -> None:
    request = node.add("p-0", prompt(100), {**LEG, "pdproxy_hand_over": ID}, max_tokens=1)
    assert request.num_prompt_tokens == 99
    node.side.on_new_request(request)
    assert request.num_prompt_tokens == 99
    ticket = node.run_out("p-0")[-1].kv_transfer_params
    assert ticket is not None
    assert ticket["remote_num_tokens"] == 99
    assert list(names_sent(node)) == [ticket["remote_request_id"]]


def stand_in(node: Node, request_id: str, params: dict[str, Any]) -> Request:
    """The stand-in that vLLM's API server sends the engine for a request that it rejects."""
    request = node.add(request_id, [0], params, max_tokens=1, abort_immediately=True)
    node.abort(request.request_id)
    return request


def test_a_stand_in_for_a_rejected_request_never_has_a_running_one_s_id(node: Node) -> None:
    ticket = take_ticket(node, prompt(100))
    for _ in range(2):
        assert stand_in(node, "p-0", {"do_remote_prefill": True}).request_id.startswith("p-0-rejected-")
    assert node.side.verify("engine-p", ticket["remote_request_id"], "any") is Verdict.HELD
    node.step()
    assert list(node.scheduler.requests) == ["p-0"]


def test_a_running_request_s_id_ends_nothing(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    """Two requests whose random parts are the same by chance: the second is dropped, with a log line."""
    first = node.add("r", prompt(100))
    with caplog.at_level("ERROR", "vllm.pdproxy.scheduler"):
        node.add("r", prompt(100, seed=1))
    assert node.scheduler.requests["r"] is first
    assert "Request r is dropped" in caplog.text
    assert len(node.run_out("r")) == 4


def test_a_dropped_duplicate_is_counted_on_its_own_engine(node: Node) -> None:
    other = make_node(engine_id="engine-o")
    node.add("r", prompt(100))
    other.add("r", prompt(100))
    node.add("r", prompt(100, seed=1))
    assert node.counts("duplicate_requests") == {"": 1}
    assert other.counts("duplicate_requests") == {}


def test_the_workers_forget_a_request_whose_hand_over_was_released_while_it_ran(node: Node) -> None:
    node.add("p", prompt(100), {**LEG, "pdproxy_hand_over": ID}, max_tokens=1)
    release(node)
    assert node.run_out("p")[-1].kv_transfer_params is None
    for _ in range(2):
        node.step()
    assert [name for meta in node.metas for name in meta.reqs_not_processed] == ["p"]
    assert not any(meta.reqs_to_send for meta in node.metas)
