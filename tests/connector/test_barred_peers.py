"""A decode node whose reads from a prefill engine fail computes that engine's prompts until its probes pass."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from vllm.v1.request import RequestStatus

from connector.counters import PATH_FAILURES, ReadOutcome
from connector.transfer_params import HAND_OVER
from tests.connector.harness import Node, lost, make_node, probed, prompt, received, take_ticket

pytestmark = pytest.mark.usefixtures("every_pace")


@pytest.fixture
def prefill() -> Node:
    return make_node("kv_producer", engine_id="P")


@pytest.fixture
def decode() -> Node:
    return make_node("kv_consumer", extra={"pdproxy_read_retries": 0})


def ask(prefill: Node, decode: Node, seed: int) -> str:
    """A request with its ticket."""
    name = f"d-{seed}"
    decode.add(name, prompt(100, seed), take_ticket(prefill, prompt(100, seed), f"p-{seed}"))
    return name


def until_idle(node: Node) -> None:
    """Step until no request is left."""
    for _ in range(50):
        node.step()
        if not node.scheduler.requests:
            return
    raise AssertionError("requests are left")


def bar(prefill: Node, decode: Node, outcome: ReadOutcome = ReadOutcome.NO_PROGRESS) -> None:
    """A read that ends so."""
    name = ask(prefill, decode, 0)
    decode.step()
    decode.step(lost(decode, outcome, name))
    decode.run_out(name)


@pytest.mark.parametrize("outcome", list(PATH_FAILURES))
def test_the_next_requests_are_computed_at_once_and_their_tickets_go_back(
    prefill: Node, decode: Node, outcome: ReadOutcome
) -> None:
    bar(prefill, decode, outcome)
    free = decode.free_blocks
    names = [ask(prefill, decode, seed) for seed in (1, 2, 3)]
    aliases = set()
    decode.step()
    for name in names:
        assert decode.scheduler.requests[name].status is RequestStatus.RUNNING
        order = decode.metas[-1].reqs_to_recv[name]
        assert not order.awaiting_kvs
        assert not any(order.local_block_ids)
        aliases.add(order.remote.request_id)
    assert len(aliases) == 3
    assert not decode.side._heartbeat_by_engine, "nothing prolongs leases that are not read"
    until_idle(decode)
    assert decode.free_blocks == free
    assert decode.counts("barred_tickets") == {outcome: 3}
    assert decode.counts("prompt_tokens") == {"computed": 400}


@pytest.mark.parametrize("outcome", [ReadOutcome.NOT_HELD, ReadOutcome.INCOMPATIBLE])
def test_what_says_nothing_of_the_path_bars_nobody(prefill: Node, decode: Node, outcome: ReadOutcome) -> None:
    bar(prefill, decode, outcome)
    name = ask(prefill, decode, 1)
    decode.step()
    assert decode.metas[-1].reqs_to_recv[name].awaiting_kvs


def test_requests_that_queued_before_are_computed_too(prefill: Node) -> None:
    decode = make_node("kv_consumer", num_blocks=12, extra={"pdproxy_read_retries": 0})
    first, second = ask(prefill, decode, 0), ask(prefill, decode, 1)
    decode.step()
    assert second not in decode.metas[-1].reqs_to_recv, "there are no blocks for it"
    assert decode.side._heartbeat_by_engine["P"].req_ids
    decode.step(lost(decode, ReadOutcome.NO_PROGRESS, first))
    until_idle(decode)
    assert not any(meta.reqs_to_recv[second].awaiting_kvs for meta in decode.metas if second in meta.reqs_to_recv)
    assert decode.counts("barred_tickets") == {"no_progress": 1}


def test_tickets_are_read_again_once_a_probe_has_passed(prefill: Node, decode: Node) -> None:
    bar(prefill, decode)
    assert sum(bool(meta.probes) for meta in decode.metas) == 1
    decode.step(probed(decode))
    decode.step()
    name = ask(prefill, decode, 1)
    decode.step()
    assert decode.metas[-1].reqs_to_recv[name].awaiting_kvs
    decode.step(received(decode, name))
    decode.run_out(name)
    assert decode.counts("path_probes") == {"passed": 1}


def test_an_idle_engine_steps_on_for_its_probes_and_rests_in_between(prefill: Node, decode: Node) -> None:
    bar(prefill, decode)
    decode.step(probed(decode, passed=False))
    assert decode.scheduler.has_requests()
    assert decode.side.rest._paths is decode.side._paths


def test_an_engine_that_restarted_is_read_at_once(prefill: Node, decode: Node) -> None:
    bar(prefill, decode)
    restarted = make_node("kv_producer", engine_id="P2")
    name = ask(restarted, decode, 1)
    decode.step()
    assert decode.metas[-1].reqs_to_recv[name].awaiting_kvs


def test_a_ticket_that_came_back_ends_its_lease(prefill: Node) -> None:
    """On the prefill node, over the side channel: the workers are told with the next step."""
    ticket = take_ticket(prefill, prompt(100), **{HAND_OVER: "h" * 16})
    engine, alias = ticket["remote_engine_id"], ticket["remote_request_id"]
    assert prefill.side.take_back(engine, alias, "nonce-of-a-read").value == "held"
    assert prefill.side.take_back(engine, "another", "nonce").value == "unknown"
    assert prefill.side.take_back("another", alias, "nonce").value == "unknown"
    prefill.step()
    assert prefill.metas[-1].returned == {"p-0": {"nonce-of-a-read"}}
    prefill.step()
    assert not prefill.metas[-1].returned
