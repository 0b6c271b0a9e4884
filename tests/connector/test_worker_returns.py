"""Tickets given back while handshakes are made: each notif goes out once, to the run of the node with the lease."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("vllm")


from connector import pending_reads
from connector.counters import ReadOutcome
from connector.messages import Verdict
from connector.metadata import ConnectorMetadata
from connector.notifs import ReadDone, parse_notif
from connector.worker import ConnectorWorker
from deploy.local.ports import free_ports
from tests.connector.rank import PEER, read_step
from tests.connector.worker import (
    NEW,
    PATIENCE,
    MakeRank,
    Prefill,
    agent,
    counts,
    handshakes,
    report,
    step,
    until,
    until_received,
)

NONCES = ("a" * 16, "b" * 16)


def return_step(request_id: str, nonce: str, port: int, engine: str = NEW) -> ConnectorMetadata:
    return read_step(request_id, nonce, port, local=[], remote=[7], engine=engine)


def read(worker: ConnectorWorker, request_id: str, nonce: str, port: int) -> ReadOutcome:
    """One read of NEW from its order to its end."""
    step(worker, read_step(request_id, nonce, port, local=[3], remote=[7], engine=NEW))
    posted = len(agent(worker).blocks) + 1
    until(lambda: step(worker) and len(agent(worker).blocks), lambda count: count >= posted)
    agent(worker).end(posted - 1)
    until_received(worker)
    return report(worker).reads_ended[request_id].outcome


def until_reported(worker: ConnectorWorker, *nonces: str) -> dict[str, int]:
    """Step until these returns are over; how many came to each outcome."""
    over: set[str] = set()
    deadline = time.monotonic() + PATIENCE
    while not set(nonces) <= over:
        assert time.monotonic() < deadline, f"only {over} are over"
        step(worker)
        over |= report(worker).returned.keys()
        time.sleep(0.002)
    return {labels[-1]: count for labels, count in counts(worker).items() if labels[0] == "tickets_returned"}


def test_no_handshake_is_made_for_a_lease_that_is_not_held(make: MakeRank, new_node: Prefill) -> None:
    new_node.verdict = Verdict.UNKNOWN
    worker = make()
    step(worker, return_step("r", NONCES[0], new_node.port))
    assert until_reported(worker, NONCES[0]) == {"not_held": 1}
    for _ in range(20):
        step(worker)
        time.sleep(0.005)
    assert handshakes(worker) == []
    assert agent(worker).sent == []


def test_a_ticket_of_another_run_of_a_known_node_goes_back_after_a_new_handshake(
    make: MakeRank, new_node: Prefill
) -> None:
    """The agents of the earlier run lead nowhere: a notice to them would be lost, and the lease kept to its expiry."""
    worker = make()
    assert read(worker, "first", NONCES[1], new_node.port) is ReadOutcome.VERIFIED
    new_node.listener.stop()
    new_node.restart()
    until(lambda: step(worker) and worker._peer_engines._known[NEW].stale, bool)
    agent(worker).sent.clear()
    step(worker, return_step("r", NONCES[0], new_node.port))
    assert agent(worker).sent == []
    assert until_reported(worker, NONCES[0]) == {"sent": 1}
    assert handshakes(worker) == [NEW, NEW]
    assert [parse_notif(notif) for notif in agent(worker).sent] == [ReadDone("remote-r", NONCES[0], 1)]


def test_a_ticket_of_a_node_that_moved_goes_back_to_where_it_is_now(make: MakeRank, new_node: Prefill) -> None:
    worker = make()
    assert read(worker, "first", NONCES[1], new_node.port) is ReadOutcome.VERIFIED
    new_node.listener.stop()
    new_node.restart(port=free_ports(1)[0])
    agent(worker).sent.clear()
    step(worker, return_step("r", NONCES[0], new_node.port))
    assert agent(worker).sent == []
    assert until_reported(worker, NONCES[0]) == {"sent": 1}
    assert handshakes(worker) == [NEW, NEW]


def test_two_tickets_of_one_request_both_go_back_at_once(
    make: MakeRank, new_node: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_reads, "ASK_EVERY", 10 * PATIENCE)
    worker = make()
    step(worker, return_step("r", NONCES[0], new_node.port))
    step(worker, return_step("r", NONCES[1], new_node.port))
    assert until_reported(worker, *NONCES) == {"sent": 2}
    assert {parse_notif(notif) for notif in agent(worker).sent} == {ReadDone("remote-r", nonce, 1) for nonce in NONCES}


def test_a_return_and_a_read_of_one_request_do_not_displace_each_other(
    make: MakeRank, new_node: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_reads, "ASK_EVERY", 10 * PATIENCE)
    worker = make()
    step(worker, return_step("r", NONCES[0], new_node.port))
    assert read(worker, "r", NONCES[1], new_node.port) is ReadOutcome.VERIFIED
    returned = f"remote-r#{NONCES[0]}:1".encode()
    until(lambda: step(worker) and returned in agent(worker).sent, bool)
    assert agent(worker).sent.count(returned) == 1


def test_a_failed_handshake_for_a_return_does_not_fail_a_read_of_the_same_request(
    make: MakeRank, prefill: Prefill
) -> None:
    worker = make(lease_duration=0.5)
    other = Prefill(NEW, compatible=False)
    try:
        step(worker, read_step("r", NONCES[1], prefill.port, local=[3], remote=[7], engine=PEER))
        step(worker, return_step("r", NONCES[0], other.port))
        assert until_reported(worker, NONCES[0]) == {"unreachable": 1}
        agent(worker).end(0)
        assert until_received(worker).failed_recving == set()
    finally:
        other.listener.stop()


def test_a_return_whose_handshake_fails_is_given_up_when_the_lease_is_over(make: MakeRank) -> None:
    worker = make(lease_duration=0.5)
    other = Prefill(NEW, compatible=False)
    try:
        step(worker, return_step("r", NONCES[0], other.port))
        assert until_reported(worker, NONCES[0]) == {"unreachable": 1}
    finally:
        other.listener.stop()
    assert agent(worker).sent == []


def test_a_notif_that_nixl_does_not_send_is_tried_again(
    make: MakeRank, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_reads, "ASK_EVERY", 0.02)
    worker = make()
    send, failures = agent(worker).send_notif, [OSError("no route"), OSError("no route")]

    def fail_twice(agent: str, notif_msg: bytes) -> None:
        if failures:
            raise failures.pop()
        send(agent, notif_msg)

    agent(worker).send_notif = fail_twice  # type: ignore[method-assign]
    step(worker, return_step("r", NONCES[0], prefill.port, PEER))
    assert report(worker).returned == {}
    assert until_reported(worker, NONCES[0]) == {"sent": 1}
    assert [parse_notif(notif) for notif in agent(worker).sent] == [ReadDone("remote-r", NONCES[0], 1)]
