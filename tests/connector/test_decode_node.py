"""A decode node on vLLM's real scheduler: tickets accepted and refused, reads failed and given up."""

from typing import Any

import pytest
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from connector.counters import ReadOutcome
from connector.metadata import ReadEnd, WorkerReport
from tests.connector.harness import DENSE, Node, lost, make_node, nonce_of, probed, prompt, received, sent, take_ticket

pytestmark = pytest.mark.usefixtures("every_pace")

WAITING = RequestStatus.WAITING_FOR_REMOTE_KVS


@pytest.fixture
def prefill() -> Node:
    return make_node("kv_producer", engine_id="engine-p")


@pytest.fixture
def node() -> Node:
    return make_node("kv_consumer", engine_id="engine-d")


def test_a_good_ticket_is_read_and_the_request_runs(prefill: Node, node: Node) -> None:
    free = node.free_blocks
    request = node.add("d", prompt(100), take_ticket(prefill, prompt(100)))
    node.step()
    assert request.status is WAITING
    order = node.metas[-1].reads["d"]
    assert (order.hit_tokens, order.pull_tokens) == (0, 99)
    node.step(received(node, "d"))
    assert len(node.run_out("d")) == 4
    assert node.free_blocks == free
    assert node.counts("prompt_tokens") == {"pulled": 99, "computed": 1}


def test_the_workers_know_whether_a_step_computes_anything(prefill: Node, node: Node) -> None:
    node.add("d", prompt(100), take_ticket(prefill, prompt(100)))
    node.step()
    node.add("local", prompt(20))
    node.step()
    assert [meta.idle for meta in node.metas] == [True, False]


def test_the_workers_get_clean_params_only(prefill: Node, node: Node) -> None:
    ticket = take_ticket(prefill, prompt(100))
    request = node.add("d", prompt(100), {**ticket, "_remote_blocks_processed": True, "x": "y"})
    assert request.kv_transfer_params is not None
    assert set(request.kv_transfer_params) <= set(ticket)


def test_another_prompt_s_ticket_is_refused_before_anything_is_dialled(prefill: Node, node: Node) -> None:
    request = node.add("d", prompt(100, seed=1), take_ticket(prefill, prompt(100)))
    assert request.kv_transfer_params is None
    assert len(node.run_out("d")) == 4
    assert all(not meta.heartbeat_by_engine and not meta.reqs_to_recv for meta in node.metas)
    assert node.counts("refused") == {"digest": 1}
    assert node.counts("prompt_tokens") == {"computed": 100}


@pytest.mark.parametrize("more", [{"cache_salt": "pepper"}, {"resumable": True}])
def test_what_else_shapes_the_prompt_counts(prefill: Node, node: Node, more: dict[str, Any]) -> None:
    request = node.add("d", prompt(100), take_ticket(prefill, prompt(100)), **more)
    assert request.kv_transfer_params is None


def test_prompt_logprobs_are_computed_here(prefill: Node, node: Node) -> None:
    request = node.add("d", prompt(100), take_ticket(prefill, prompt(100)), sampling={"prompt_logprobs": 1})
    assert request.kv_transfer_params is None
    assert node.counts("refused") == {"unsuitable_request": 1}


def test_heartbeats_end_with_a_read_that_failed(prefill: Node, node: Node) -> None:
    node.add("d", prompt(100), take_ticket(prefill, prompt(100)))
    node.step()
    assert node.side._heartbeat_by_engine
    node.step(lost(node, ReadOutcome.TRANSFER_FAILED, "d"))
    assert not node.side._heartbeat_by_engine


@pytest.mark.parametrize("outcome", [each for each in ReadOutcome if each is not ReadOutcome.VERIFIED])
def test_a_failed_read_is_computed_in_the_next_step(prefill: Node, node: Node, outcome: ReadOutcome) -> None:
    request = node.add("d", prompt(100), take_ticket(prefill, prompt(100)))
    node.step()
    node.step(lost(node, outcome, "d"))
    node.step()
    assert request.status is RequestStatus.RUNNING
    node.run_out("d")
    assert node.counts("prompt_tokens") == {"computed": 100}


def returned(*nonces: str) -> KVConnectorOutput:
    """The workers say: these notices without a read are given."""
    return KVConnectorOutput(kv_connector_worker_meta=WorkerReport(returned=dict.fromkeys(nonces, 1)))


def drained(nonce: str, *, broken: bool = False) -> KVConnectorOutput:
    """The workers say: a transfer that was given up has ended, well or in an error."""
    report = WorkerReport(drained={nonce: 1}, broken={nonce: 1} if broken else {})
    return KVConnectorOutput(kv_connector_worker_meta=report)


def notices(node: Node) -> list[str]:
    """The nonces of the notices without a read that the last step orders."""
    meta = node.metas[-1]
    return [meta.reads[name].nonce for name, order in meta.reqs_to_recv.items() if not order.awaiting_kvs]


@pytest.mark.parametrize(
    "outcome",
    [
        ReadOutcome.TRANSFER_FAILED,
        ReadOutcome.UNVERIFIED,
        ReadOutcome.PEER_UNREACHABLE,
        ReadOutcome.NO_PROGRESS,
        ReadOutcome.NOT_HELD,
    ],
)
def test_after_a_failure_the_ticket_is_given_back_under_the_failed_nonce(
    prefill: Node, node: Node, outcome: ReadOutcome
) -> None:
    """Not a new one: the failed read's own notice may have counted. Where nothing is held there is nothing to give."""
    node.add("d", prompt(100), take_ticket(prefill, prompt(100)))
    node.step()
    failed = nonce_of(node, "d")
    node.step(lost(node, outcome, "d"))
    node.step()
    assert notices(node) == ([] if outcome is ReadOutcome.NOT_HELD else [failed])


def test_an_engine_steps_on_until_its_notices_are_given(prefill: Node, node: Node) -> None:
    """The request is gone by then: nothing else would have the workers carry the order out, or say that they have."""
    node.add("d", prompt(100), take_ticket(prefill, prompt(100)))
    node.step()
    node.abort("d")
    node.step(lost(node, ReadOutcome.PEER_UNREACHABLE, "d"))
    assert node.scheduler.requests == {}
    assert node.scheduler.has_requests()
    node.step()
    (nonce,) = notices(node)
    node.step()
    assert node.scheduler.has_requests()
    node.step(returned("another", nonce))
    node.step(probed(node))
    assert not node.scheduler.has_requests()


def test_an_engine_steps_on_while_a_rejected_request_s_ticket_goes_back(prefill: Node, node: Node) -> None:
    request = node.add("d", [0], take_ticket(prefill, prompt(100)), abort_immediately=True)
    node.abort(request.request_id)
    node.step()
    node.step()
    assert node.scheduler.has_requests()
    node.step(returned(*(order.nonce for meta in node.metas for order in meta.reads.values())))
    assert not node.scheduler.has_requests()


def test_nothing_of_a_bad_read_is_cached(prefill: Node, node: Node) -> None:
    node.add("d", prompt(100), take_ticket(prefill, prompt(100)))
    node.step()
    node.step(lost(node, ReadOutcome.NOT_HELD, "d"))
    node.abort("d")
    node.step()
    node.add("again", prompt(100))
    node.run_out("again")
    assert node.counts("prompt_tokens") == {"computed": 100}


def test_one_rank_s_word_is_kept_until_all_have_spoken(prefill: Node, node: Node) -> None:
    request = node.add("d", prompt(100), take_ticket(prefill, prompt(100)))
    node.step()
    bad = ReadEnd(nonce_of(node, "d"), ReadOutcome.NOT_HELD)
    node.step(KVConnectorOutput(kv_connector_worker_meta=WorkerReport(reads_ended={"d": bad})))
    assert request.status is WAITING
    node.step(lost(node, ReadOutcome.TRANSFER_FAILED, "d"))
    node.step()
    assert request.status is RequestStatus.RUNNING


def test_blocks_under_a_live_read_are_not_given_to_anybody(prefill: Node, node: Node) -> None:
    free = node.free_blocks
    node.add("d", prompt(100), take_ticket(prefill, prompt(100)))
    node.step()
    nonce = nonce_of(node, "d")
    node.step(lost(node, ReadOutcome.NO_PROGRESS, "d", stalled=[nonce]))
    node.run_out("d")
    node.step()
    assert node.scheduler.requests == {}
    assert node.free_blocks == free - 8
    assert node.scheduler.has_requests(), "an idle engine steps on, or the end would never be reported"
    assert notices(node) == []
    node.step(drained(nonce))
    assert node.free_blocks == free
    node.step(probed(node))
    assert not node.scheduler.has_requests()
    node.step()
    assert notices(node) == [], "the transfer's end was the notice"


def test_a_transfer_that_was_given_up_and_ends_in_an_error_gives_its_ticket_back(prefill: Node, node: Node) -> None:
    node.add("d", prompt(100), take_ticket(prefill, prompt(100)))
    node.step()
    nonce = nonce_of(node, "d")
    node.step(lost(node, ReadOutcome.NO_PROGRESS, "d", stalled=[nonce]))
    node.run_out("d")
    node.step(drained(nonce, broken=True))
    assert node.scheduler.has_requests()
    node.step()
    assert notices(node) == [nonce]
    node.step(returned(nonce))
    node.step(probed(node))
    assert not node.scheduler.has_requests()


def test_blocks_of_an_aborted_request_under_a_live_read_are_kept_too(prefill: Node, node: Node) -> None:
    free = node.free_blocks
    node.add("d", prompt(100), take_ticket(prefill, prompt(100)))
    node.step()
    nonce = nonce_of(node, "d")
    node.abort("d")
    node.step(lost(node, ReadOutcome.NO_PROGRESS, "d", stalled=[nonce]))
    assert node.free_blocks == free - 8
    node.step(KVConnectorOutput(kv_connector_worker_meta=WorkerReport(drained={nonce: 1})))
    assert node.free_blocks == free


def test_an_abort_before_the_read_gives_the_ticket_back(prefill: Node, node: Node) -> None:
    node.add("d", prompt(100), take_ticket(prefill, prompt(100)))
    node.abort("d")
    node.step()
    assert not any(node.metas[-1].reqs_to_recv["d"].local_block_ids)
    assert node.metas[-1].reads["d"].nonce


def test_a_request_rejected_at_the_front_gives_its_ticket_back(prefill: Node, node: Node) -> None:
    """vLLM's API server sends a stand-in with the prompt [0] for it."""
    request = node.add("d", [0], take_ticket(prefill, prompt(100)), abort_immediately=True)
    node.abort(request.request_id)
    node.step()
    assert request.request_id in node.metas[-1].reqs_to_recv


def test_two_rejected_requests_with_one_id_both_give_their_tickets_back(prefill: Node, node: Node) -> None:
    tickets = [take_ticket(prefill, prompt(100, seed), f"p-{seed}") for seed in (0, 1)]
    for ticket in tickets:
        request = node.add("d", [0], ticket, abort_immediately=True)
        node.abort(request.request_id)
    node.step()
    given_back = {meta.remote.request_id for meta in node.metas[-1].reqs_to_recv.values() if meta.remote}
    assert given_back == {ticket["remote_request_id"] for ticket in tickets}


def test_a_ticket_that_leaves_nothing_to_pull_is_given_back_and_counted(prefill: Node, node: Node) -> None:
    """The local attention hit is all that the ticket covers, and no state is cached there."""
    first = prompt(97)
    node.add("first", first[:80] + first[80:96] + [5], None, max_tokens=1)
    node.run_out("first")
    request = node.add("d", first, take_ticket(prefill, first))
    node.step()
    assert request.status is RequestStatus.RUNNING
    assert not node.metas[-1].reqs_to_recv["d"].awaiting_kvs
    assert node.counts("unused_tickets") == {"": 1}


def test_a_ticket_may_be_used_on_another_node_while_it_is_held(prefill: Node, node: Node) -> None:
    ticket = take_ticket(prefill, prompt(100))
    other = make_node("kv_consumer", engine_id="engine-e")
    for each in (node, other):
        request = each.add("d", prompt(100), ticket)
        each.step()
        assert request.status is WAITING


def test_each_sample_of_one_ticket_reads_with_its_own_nonce(prefill: Node, node: Node) -> None:
    ticket = take_ticket(prefill, prompt(100), pdproxy_readers=2)
    for name in ("d-0", "d-1"):
        node.add(name, prompt(100), ticket)
    node.step()
    assert node.metas[-1].reads["d-0"].nonce != node.metas[-1].reads["d-1"].nonce


def test_a_dense_model_recomputes_only_the_last_token(prefill: Node) -> None:
    give, take = make_node("kv_producer", DENSE), make_node("kv_consumer", DENSE)
    take.add("d", prompt(100), take_ticket(give, prompt(100)))
    take.step()
    take.step(received(take, "d"))
    assert len(take.run_out("d")) == 4
    assert take.counts("prompt_tokens") == {"pulled": 100}


def test_the_second_turn_hits_attention_and_pulls_the_rest(prefill: Node, node: Node) -> None:
    first = prompt(100)
    node.add("d-0", first, take_ticket(prefill, first, "p-0"))
    node.step()
    node.step(received(node, "d-0"))
    node.run_out("d-0")
    prefill.step(sent("p-0"))
    second = [*first, 7, 7, 7, *prompt(30, seed=3)]
    node.add("d-1", second, take_ticket(prefill, second, "p-1"))
    node.step()
    assert node.metas[-1].reads["d-1"].hit_tokens == 96
    node.step(received(node, "d-1"))
    node.run_out("d-1")
    assert node.counts("prompt_tokens") == {"hit": 96, "pulled": 99 + 36, "computed": 2}
    assert node.counts("blocks")["attention/hit"] == 6
