"""A decode node on vLLM's real scheduler: requests that wait for their ticket."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.request import Request, RequestStatus

from connector import idle_rest
from connector.counters import ReadOutcome
from connector.direct_tickets import write_address
from connector.messages import encode_ticket
from connector.side_channel import Listener
from tests.connector.harness import Node, lost, make_node, prompt, received, take_ticket

pytestmark = [pytest.mark.usefixtures("every_pace"), pytest.mark.timeout(60)]

ID = "wait-0123456789abcdef"
ORDER = {"pdproxy_wait": {"id": ID, "seconds": 60}, "prompt_token_ids": [1, 2]}
READING = RequestStatus.WAITING_FOR_REMOTE_KVS


@pytest.fixture
def prefill() -> Node:
    return make_node("kv_producer", engine_id="engine-p")


@pytest.fixture
def node() -> Node:
    return make_node("kv_consumer", engine_id="engine-d")


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let so many seconds pass."""
    clock, passed = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock() + passed[0])
    return lambda seconds: passed.__setitem__(0, passed[0] + seconds)


def deliver(node: Node, ticket: Any, wait: str = ID, name: str = "pdproxy-delivery-1") -> Request:
    """As the node's route does it: a stand-in for a request, which vLLM ends at once."""
    request = node.add(name, [0], {"pdproxy_deliver": {"id": wait, "ticket": ticket}}, abort_immediately=True)
    node.abort(request.request_id)
    return request


def waits(node: Node) -> dict[str, int]:
    """How waits have ended."""
    return node.counts("ticket_waits")


def is_quiet(node: Node) -> bool:
    """Nothing is ordered, remembered of a request, or waiting to be sent."""
    side = node.side
    empty = not side._reads._reads and not side._heartbeat_by_engine and not len(side._token_accounting)
    return empty and not len(side._waiting) and not node.scheduler.requests


def test_it_waits_without_a_block_and_reads_when_the_ticket_comes(prefill: Node, node: Node) -> None:
    free = node.free_blocks
    request = node.add("d", prompt(100), ORDER)
    for _ in range(3):
        node.step()
    assert request.status is RequestStatus.WAITING
    assert node.free_blocks == free
    deliver(node, take_ticket(prefill, prompt(100)))
    node.step()
    assert request.status is READING
    order = node.metas[-1].reads["d"]
    assert (order.hit_tokens, order.pull_tokens) == (0, 99)
    node.step(received(node, "d"))
    assert len(node.run_out("d")) == 4
    assert (waits(node), node.counts("prompt_tokens")) == ({"ticket": 1}, {"pulled": 99, "computed": 1})
    assert node.free_blocks == free
    assert is_quiet(node)


def test_others_run_meanwhile(prefill: Node, node: Node) -> None:
    node.add("d", prompt(100), ORDER)
    node.add("other", prompt(50, seed=2))
    assert len(node.run_out("other")) == 4
    assert node.counts("prompt_tokens") == {"computed": 50}


def test_the_lease_is_renewed_from_the_delivery_on_even_if_no_place_is_free(prefill: Node, node: Node) -> None:
    node.add("d", prompt(100), ORDER)
    node.step()
    assert not node.side._heartbeat_by_engine
    node.scheduler.max_num_active_reqs = 0
    deliver(node, take_ticket(prefill, prompt(100)))
    node.step()
    assert node.side._heartbeat_by_engine


def test_a_delivery_may_overtake_its_request(prefill: Node, node: Node) -> None:
    deliver(node, take_ticket(prefill, prompt(100)))
    request = node.add("d", prompt(100), ORDER)
    node.step()
    assert request.status is READING
    assert waits(node) == {"ticket": 1}


def test_all_samples_of_a_request_get_the_ticket(prefill: Node, node: Node) -> None:
    requests = [node.add(name, prompt(100), ORDER) for name in ("0_d", "1_d")]
    node.step()
    deliver(node, take_ticket(prefill, prompt(100), pdproxy_readers=3))
    requests.append(node.add("2_d", prompt(100), ORDER))
    node.step()
    assert {request.status for request in requests} == {READING}
    assert len({order.nonce for order in node.metas[-1].reads.values()}) == 3


def test_a_second_delivery_changes_nothing(prefill: Node, node: Node) -> None:
    node.add("d", prompt(100), ORDER)
    ticket = take_ticket(prefill, prompt(100))
    for number in range(2):
        deliver(node, ticket, name=f"pdproxy-delivery-{number}")
    node.step()
    node.step(received(node, "d"))
    deliver(node, ticket, name="pdproxy-delivery-3")
    node.run_out("d")
    assert node.counts("prompt_tokens") == {"pulled": 99, "computed": 1}
    assert [name for meta in node.metas for name in meta.reads] == ["d"]


def test_it_computes_when_there_is_no_ticket(node: Node) -> None:
    node.add("d", prompt(100), ORDER)
    node.step()
    deliver(node, None)
    assert len(node.run_out("d")) == 4
    assert (waits(node), node.counts("prompt_tokens")) == ({"no_ticket": 1}, {"computed": 100})
    assert is_quiet(node)


@pytest.mark.parametrize("ticket", ["a ticket", {}, {"do_remote_prefill": True}, {"pdproxy_release": ID}])
def test_it_computes_when_what_comes_is_no_ticket(node: Node, ticket: Any) -> None:
    node.add("d", prompt(100), ORDER)
    deliver(node, ticket)
    assert len(node.run_out("d")) == 4
    assert waits(node) == {"refused": 1}
    assert sum(node.counts("refused").values()) == 1


def test_another_prompt_s_ticket_is_refused_before_anything_is_dialled(prefill: Node, node: Node) -> None:
    node.add("d", prompt(100, seed=1), ORDER)
    deliver(node, take_ticket(prefill, prompt(100)))
    node.run_out("d")
    assert all(not meta.heartbeat_by_engine and not meta.reqs_to_recv for meta in node.metas)
    assert (waits(node), node.counts("refused")) == ({"refused": 1}, {"digest": 1})


def test_it_computes_at_its_deadline_and_a_late_ticket_is_given_back(
    prefill: Node, node: Node, pass_time: Callable[[float], None]
) -> None:
    request = node.add("d", prompt(100), ORDER)
    node.step()
    pass_time(60)
    for _ in range(2):
        node.step()
    assert request.status is RequestStatus.RUNNING
    ticket = take_ticket(prefill, prompt(100))
    deliver(node, ticket)
    node.step()
    [given_back] = [meta.remote.request_id for meta in node.metas[-1].reqs_to_recv.values() if meta.remote]
    assert given_back == ticket["remote_request_id"]
    assert all(not any(meta.local_block_ids) for meta in node.metas[-1].reqs_to_recv.values())
    node.run_out("d")
    assert (waits(node), node.counts("prompt_tokens")) == ({"deadline": 1}, {"computed": 100})


def test_its_own_cache_counts_whether_the_ticket_comes_or_not(
    prefill: Node, node: Node, pass_time: Callable[[float], None]
) -> None:
    """Though it is not looked up while it waits."""
    node.add("before", prompt(200), max_tokens=1)
    node.run_out("before")
    before = node.counts("prompt_tokens")
    requests = [node.add(f"d-{number}", prompt(200), ORDER) for number in range(2)]
    node.step()
    node.step()
    assert all(request.skip_reading_prefix_cache for request in requests)
    node.abort("d-1")
    deliver(node, take_ticket(prefill, prompt(200)))
    node.step()
    assert node.metas[-1].reads["d-0"].hit_tokens == 192
    node.step(received(node, "d-0"))
    node.run_out("d-0")
    node.add("d-2", prompt(200), {"pdproxy_wait": {"id": f"{ID}-2", "seconds": 1}})
    node.step()
    pass_time(1)
    node.run_out("d-2")
    after = node.counts("prompt_tokens")
    added = {source: after[source] - before.get(source, 0) for source in after}
    assert added == {"hit": 192 + 192, "pulled": 7, "computed": 1 + 8}


def test_a_node_cuts_the_time_and_bounds_the_number(node: Node, pass_time: Callable[[float], None]) -> None:
    node = make_node("kv_consumer", extra={"pdproxy_waiting_requests": 1, "pdproxy_longest_ticket_wait": 5})
    waiting = node.add("d-0", prompt(100), ORDER)
    node.add("d-1", prompt(100, seed=1), {"pdproxy_wait": {"id": f"{ID}-1", "seconds": 60}})
    node.run_out("d-1")
    assert (waiting.status, waits(node)) == (RequestStatus.WAITING, {"too_many": 1})
    pass_time(5)
    assert len(node.run_out("d-0")) == 4


def test_nothing_is_held_for_a_request_that_is_gone(prefill: Node, node: Node) -> None:
    free = node.free_blocks
    node.add("d", prompt(100), ORDER)
    node.step()
    node.abort("d")
    node.step()
    assert (waits(node), node.free_blocks) == ({"gone": 1}, free)
    assert is_quiet(node)
    deliver(node, take_ticket(prefill, prompt(100)))
    assert node.side.has_pending_push_work(), "an idle engine must step to give the ticket back"
    node.step()
    assert len(node.metas[-1].reqs_to_recv) == 1
    assert is_quiet(node)


def test_a_ticket_that_came_and_was_not_read_is_given_back(prefill: Node, node: Node) -> None:
    node.add("d", prompt(100), ORDER)
    node.step()
    deliver(node, take_ticket(prefill, prompt(100)))
    node.abort("d")
    node.step()
    assert list(node.metas[-1].reqs_to_recv) == ["d"]
    assert not any(node.metas[-1].reqs_to_recv["d"].local_block_ids)


def test_its_read_may_fail_as_any_other(prefill: Node, node: Node) -> None:
    node.add("d", prompt(100), ORDER)
    node.step()
    deliver(node, take_ticket(prefill, prompt(100)))
    node.step()
    node.step(lost(node, ReadOutcome.TRANSFER_FAILED, "d"))
    assert len(node.run_out("d")) == 4
    assert node.counts("prompt_tokens") == {"computed": 100}


def test_after_a_preemption_it_does_not_wait_again(prefill: Node, node: Node) -> None:
    request = node.add("d", prompt(100), ORDER, max_tokens=8)
    node.step()
    deliver(node, take_ticket(prefill, prompt(100)))
    node.step()
    node.step(received(node, "d"))
    node.step()
    node.scheduler.running.remove(request)
    node.scheduler._preempt_request(request, 0.0)
    node.run_out("d")
    assert request.num_preemptions == 1
    assert (waits(node), node.counts("prompt_tokens")) == ({"ticket": 1}, {"pulled": 99, "computed": 1})


def test_vllm_s_own_statistics_count_its_prompt_once(prefill: Node, node: Node) -> None:
    request = node.add("d", prompt(100), ORDER)
    for _ in range(3):
        node.step()
    deliver(node, take_ticket(prefill, prompt(100)))
    node.step()
    stats = request.prefill_stats
    assert stats is not None
    assert (stats.num_local_cached_tokens, stats.num_external_cached_tokens) == (0, 99)


def test_a_client_s_own_request_delivers_nothing(prefill: Node, node: Node) -> None:
    waiting = node.add("d", prompt(100), ORDER)
    node.add("client", prompt(20), {"pdproxy_deliver": {"id": ID, "ticket": None}})
    node.run_out("client")
    assert waiting.status is RequestStatus.WAITING
    assert node.counts("refused") == {"unsuitable_request": 1}


def test_nor_does_one_that_the_api_server_rejects(prefill: Node, node: Node) -> None:
    """Its stand-in has `do_remote_prefill`, without which vLLM makes none."""
    waiting = node.add("d", prompt(100), ORDER)
    forged = {"do_remote_prefill": True, "pdproxy_deliver": {"id": ID, "ticket": None}}
    stand_in = node.add("client", [0], forged, abort_immediately=True)
    node.abort(stand_in.request_id)
    node.step()
    assert waiting.status is RequestStatus.WAITING
    assert stand_in.request_id != "client", "its name may be a running request's"
    assert waits(node) == {}


def test_a_delivery_keeps_its_name(node: Node) -> None:
    """The API server of several ranks forgets a request by it."""
    assert deliver(node, None).request_id == "pdproxy-delivery-1"


def test_prompt_logprobs_are_computed_here_at_once(node: Node) -> None:
    node.add("d", prompt(100), ORDER, sampling={"prompt_logprobs": 1})
    node.step()
    assert node.counts("refused") == {"unsuitable_request": 1}
    assert waits(node) == {}


# ---- a ticket that the prefill node sends itself


def send(node: Node, ticket: Any, wait: str = ID) -> bool:
    """As the side channel's thread does it."""
    assert node.side._inbox is not None
    return node.side._inbox.put(wait, encode_ticket(ticket))


def test_a_ticket_that_comes_directly_is_read_at_once(prefill: Node, node: Node) -> None:
    free = node.free_blocks
    request = node.add("d", prompt(100), ORDER)
    node.step()
    ticket = take_ticket(prefill, prompt(100))
    assert send(node, ticket)
    node.step()
    assert not node.side._waiting.must_wait("d", time.monotonic())
    node.step()
    assert request.status is READING
    deliver(node, ticket)
    node.step(received(node, "d"))
    assert len(node.run_out("d")) == 4
    assert (waits(node), node.counts("prompt_tokens")) == ({"ticket": 1}, {"pulled": 99, "computed": 1})
    assert node.counts("ticket_deliveries") == {"direct/first": 1, "proxy/none": 1}
    assert [name for meta in node.metas for name in meta.reads] == ["d"]
    assert node.free_blocks == free
    assert is_quiet(node)


def test_a_direct_ticket_ends_the_rest_of_an_idle_engine(
    prefill: Node, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, ticket = node.add("d", prompt(100), ORDER), take_ticket(prefill, prompt(100))
    for _ in range(3):
        node.step()
    monkeypatch.setattr(idle_rest, "WAITING_REST", 60.0)
    arrives = threading.Timer(0.05, send, (node, ticket))
    arrives.start()
    node.step()
    arrives.join()
    assert not len(node.side._waiting)
    for _ in range(2):
        node.step()
    assert request.status is READING


def test_an_engine_that_keeps_step_with_others_waits_for_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_rest, "WAITING_REST", 60.0)
    node.side._keeps_step = True
    node.add("d", prompt(100), ORDER)
    for _ in range(4):
        node.step()
    assert not any(meta.idle for meta in node.metas)


def test_a_direct_ticket_counts_between_steps_too(prefill: Node, node: Node) -> None:
    """When vLLM asks for the stats of the step: the request is marked as one that is not looked up then."""
    request = node.add("d", prompt(100), ORDER)
    node.step()
    assert request.skip_reading_prefix_cache
    send(node, take_ticket(prefill, prompt(100)))
    node.scheduler.connector.get_kv_connector_stats()
    assert not request.skip_reading_prefix_cache
    node.step()
    assert request.status is READING


def test_one_for_another_prompt_leaves_the_request_waiting_as_before(prefill: Node, node: Node) -> None:
    request = node.add("d", prompt(100, seed=1), ORDER)
    node.step()
    send(node, take_ticket(prefill, prompt(100)))
    node.scheduler.connector.get_kv_connector_stats()
    assert request.skip_reading_prefix_cache
    node.step()
    assert (request.status, len(node.side._waiting)) == (RequestStatus.WAITING, 1)


def test_its_own_cache_counts_with_a_ticket_that_comes_directly(prefill: Node, node: Node) -> None:
    node.add("before", prompt(200), max_tokens=1)
    node.run_out("before")
    node.add("d", prompt(200), ORDER)
    node.step()
    send(node, take_ticket(prefill, prompt(200)))
    for _ in range(2):
        node.step()
    assert [meta.reads["d"].hit_tokens for meta in node.metas if "d" in meta.reads] == [192]


def test_a_direct_ticket_may_come_before_the_request(prefill: Node, node: Node) -> None:
    send(node, take_ticket(prefill, prompt(100)))
    request = node.add("d", prompt(100), ORDER)
    node.step()
    assert request.status is READING


def test_a_direct_ticket_for_nobody_has_no_consequence(prefill: Node, node: Node) -> None:
    """It may be another node's by now: only the proxy's delivery gives it back."""
    node.add("d", prompt(100), ORDER)
    node.step()
    node.abort("d")
    ticket = take_ticket(prefill, prompt(100))
    send(node, ticket)
    node.step()
    assert all(not meta.reqs_to_recv for meta in node.metas)
    deliver(node, ticket)
    node.step()
    assert len(node.metas[-1].reqs_to_recv) == 1
    assert is_quiet(node)


def test_a_second_prefill_s_ticket_is_given_back(prefill: Node, node: Node) -> None:
    """The answer with the first one was lost on its way to the proxy."""
    node.add("d", prompt(100), ORDER)
    node.step()
    send(node, take_ticket(prefill, prompt(100)))
    node.step()
    second = take_ticket(prefill, prompt(100), request_id="p-1")
    deliver(node, second)
    node.step()
    returned = [
        meta.remote.request_id
        for each in node.metas
        for meta in each.reqs_to_recv.values()
        if meta.remote and not any(meta.local_block_ids)
    ]
    assert returned == [second["remote_request_id"]]


@pytest.mark.parametrize("change", [{"remote_block_ids": [[1]]}, {"pdproxy": None}, {"do_remote_prefill": False}])
def test_a_bad_direct_ticket_is_not_taken(prefill: Node, node: Node, change: dict[str, Any]) -> None:
    request = node.add("d", prompt(100), ORDER)
    assert not send(node, {**take_ticket(prefill, prompt(100)), **change})
    node.step()
    assert request.status is RequestStatus.WAITING
    assert (waits(node), node.counts("refused")) == ({}, {})


def test_a_prefill_node_sends_its_ticket_where_the_leg_says(prefill: Node, node: Node) -> None:
    inbox = node.side._inbox
    assert inbox is not None
    listener = Listener("127.0.0.1", 0, {}, node.side.verify, node.side.counters, take_ticket=inbox.put)
    listener.start()
    try:
        address = write_address("127.0.0.1", listener.port, ())
        request = node.add("d", prompt(100), ORDER)
        ticket = take_ticket(prefill, prompt(100), pdproxy_send_ticket={"id": ID, "addresses": [address]})
        deadline = time.monotonic() + 30
        while request.status is not READING:
            assert time.monotonic() < deadline
            node.step()
        [order] = [meta.reqs_to_recv["d"] for meta in node.metas if "d" in meta.reqs_to_recv]
        assert order.remote.request_id == ticket["remote_request_id"]
        while not (sent := prefill.counts("tickets_sent")):
            assert time.monotonic() < deadline
        assert sent == {"taken": 1}
    finally:
        prefill.side.shutdown()
        listener.stop()


@pytest.mark.parametrize(
    "waiter", ["there", {}, {"id": "short"}, {"id": ID}, {"id": ID, "addresses": [1]}, {"id": ID, "addresses": ["?"]}]
)
def test_a_waiter_that_makes_no_sense_gets_no_ticket_and_the_leg_does(prefill: Node, waiter: Any) -> None:
    assert take_ticket(prefill, prompt(100), pdproxy_send_ticket=waiter)["do_remote_prefill"]
    prefill.side.shutdown()


def test_nothing_is_sent_for_a_leg_without_a_ticket(prefill: Node) -> None:
    params = {"do_remote_decode": True, "pdproxy_send_ticket": {"id": ID, "addresses": ["5600 127.0.0.1"]}}
    prefill.add("p", prompt(100), params)
    prefill.step()
    prefill.abort("p")
    prefill.step()
    assert prefill.side._tickets._waiters == {}
    assert prefill.counts("tickets_sent") == {}
