"""A rank's reads and leases over vLLM's own worker code, a small NIXL agent, and a real side channel."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker

from connector.accounts import Accounts
from connector.lease import Verdict
from connector.metadata import ConnectorMetadata, ReadEnd, ReadOutcome, WorkerReport
from connector.notices import Done, parse
from connector.side_channel import Listener
from connector.worker_side import WorkerSide
from tests.connector.rank import HOST, PEER, Agent, cache_config, lease_step, read_step, settings, vllm_state

PATIENCE = 30.0
NONCE = "0123456789abcdef"
BLOCK_BYTES = 16 * 1 * 8 * 2 * 2
"""Tokens, heads, head size, bytes of bfloat16, key and value."""


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class Prefill:
    """A prefill node's side channel whose verdict the test sets, and who keeps what was asked."""

    def __init__(self) -> None:
        self.port = free_port()
        self.verdict = Verdict.HELD
        self.asked: list[tuple[str, str, str]] = []
        self.listener = Listener(HOST, self.port, {}, self._judge, Accounts())
        self.listener.start()

    def _judge(self, engine_id: str, request_id: str, nonce: str) -> Verdict:
        self.asked.append((engine_id, request_id, nonce))
        return self.verdict


@pytest.fixture
def prefill() -> Iterator[Prefill]:
    prefill = Prefill()
    yield prefill
    prefill.listener.stop()


MakeRank = Callable[..., WorkerSide]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRank]:
    monkeypatch.setattr(NixlBaseConnectorWorker, "__init__", lambda worker, *_: vllm_state(worker))
    made: list[WorkerSide] = []

    def build(**changes: Any) -> WorkerSide:
        config: Any = None
        made.append(WorkerSide(config, "D", cache_config(), settings(**changes)))
        return made[-1]

    yield build
    for worker in made:
        worker._stalled.clear()
        worker._recving_transfers.clear()
        worker.shutdown()


def agent(worker: WorkerSide) -> Agent:
    found = worker.nixl_wrapper
    assert isinstance(found, Agent)
    return found


def step(worker: WorkerSide, metadata: ConnectorMetadata | None = None) -> KVConnectorTransferResults:
    worker.start_load_kv(ConnectorMetadata() if metadata is None else metadata)
    return worker.get_transfer_results()


def until_received(worker: WorkerSide, metadata: ConnectorMetadata | None = None) -> KVConnectorTransferResults:
    """The first results with a read in them, from the very step that orders it (`metadata`) on."""
    deadline = time.monotonic() + PATIENCE
    while True:
        results = step(worker, metadata)
        if results.finished_recving:
            return results
        metadata = None
        assert time.monotonic() < deadline, "no read came to its end"
        time.sleep(0.005)


def report(worker: WorkerSide) -> WorkerReport:
    return worker.build_connector_worker_meta() or WorkerReport()


def counts(worker: WorkerSide) -> dict[tuple[str, ...], int]:
    stats = worker.get_kv_connector_stats()
    return {} if stats is None else {(name, *labels): value for name, labels, value in stats.data["pdproxy_counts"]}


def test_a_read_is_reported_only_after_its_verdict(make: MakeRank, prefill: Prefill) -> None:
    worker = make()
    assert not step(worker, read_step("r", NONCE, prefill.port, local=[3, 4], remote=[7, 8, 9])).finished_recving
    assert agent(worker).blocks[0] == ([3, 4], [8, 9])
    assert prefill.asked == []
    agent(worker).end(0)
    results = until_received(worker)
    assert results.finished_recving == {"r"}
    assert results.failed_recving == set()
    assert prefill.asked == [(PEER, "remote-r", NONCE)]
    assert [parse(notice) for notice in agent(worker).sent] == [Done("remote-r", NONCE, 1)]
    assert report(worker).reads_ended == {"r": ReadEnd(NONCE, ReadOutcome.VERIFIED, 2 * BLOCK_BYTES, 0)}
    assert worker.build_connector_worker_meta() is None
    assert counts(worker) == {
        ("reads", "verified"): 1,
        ("bytes", "attention", "pulled"): 2 * BLOCK_BYTES,
        ("bytes", "attention", "spared"): BLOCK_BYTES,
    }


@pytest.mark.parametrize("verdict", [Verdict.EXPIRED, Verdict.RELEASED_BY_ANOTHER, Verdict.UNKNOWN])
def test_a_read_of_blocks_that_were_not_held_fails(make: MakeRank, prefill: Prefill, verdict: Verdict) -> None:
    prefill.verdict = verdict
    worker = make()
    step(worker, read_step("r", NONCE, prefill.port, local=[3], remote=[7]))
    agent(worker).end(0)
    results = until_received(worker)
    assert results.failed_recving == results.finished_recving == {"r"}
    assert report(worker).reads_ended == {"r": ReadEnd(NONCE, ReadOutcome.NOT_HELD)}
    assert counts(worker) == {("reads", "not_held"): 1}


def test_a_read_that_nobody_vouches_for_fails(make: MakeRank, prefill: Prefill) -> None:
    worker = make()
    prefill.listener.stop()
    step(worker, read_step("r", NONCE, prefill.port, local=[3], remote=[7]))
    agent(worker).end(0)
    assert until_received(worker).failed_recving == {"r"}
    assert report(worker).reads_ended["r"].outcome is ReadOutcome.UNVERIFIED


def test_a_failed_transfer_is_not_asked_about(make: MakeRank, prefill: Prefill) -> None:
    worker = make()
    step(worker, read_step("r", NONCE, prefill.port, local=[3], remote=[7]))
    agent(worker).end(0, "ERR")
    assert until_received(worker).failed_recving == {"r"}
    assert report(worker).reads_ended["r"].outcome is ReadOutcome.TRANSFER_FAILED
    assert prefill.asked == []


def test_a_hanging_read_is_given_up_and_its_transfer_left_alone(make: MakeRank, prefill: Prefill) -> None:
    worker = make(read_deadline=0.05)
    assert until_received(worker, read_step("r", NONCE, prefill.port, local=[3], remote=[7])).failed_recving == {"r"}
    told = report(worker)
    assert told.reads_ended["r"].outcome is ReadOutcome.NO_PROGRESS
    assert (told.stalled, told.drained) == ({NONCE: 1}, {})
    assert agent(worker).states == {0: "PROC"}
    assert worker._engines_with_inflight_transfers() == {PEER}
    assert not step(worker).finished_recving
    agent(worker).end(0)
    assert not step(worker).finished_recving
    assert report(worker).drained == {NONCE: 1}
    assert worker._engines_with_inflight_transfers() == set()
    assert prefill.asked == []


def test_a_read_from_a_silent_peer_is_given_up_long_before_its_deadline(make: MakeRank, prefill: Prefill) -> None:
    worker = make(read_deadline=600.0, verify_timeout=0.2)
    step(worker, read_step("r", NONCE, prefill.port, local=[3], remote=[7]))
    prefill.listener.stop()
    assert until_received(worker).failed_recving == {"r"}
    assert report(worker).reads_ended["r"].outcome is ReadOutcome.NO_PROGRESS


def test_a_ticket_that_vllm_cannot_pair_fails_its_request_alone(make: MakeRank, prefill: Prefill) -> None:
    worker = make()
    results = step(worker, read_step("r", NONCE, prefill.port, local=[3, 4, 5], remote=[7]))
    assert results.failed_recving == {"r"}
    assert agent(worker).blocks == {}
    step(worker, read_step("s", NONCE, prefill.port, local=[3], remote=[7]))
    agent(worker).end(0)
    assert until_received(worker).failed_recving == set()


def test_a_port_that_nobody_listens_on_fails_the_read(make: MakeRank) -> None:
    worker = make()
    assert until_received(
        worker, read_step("r", NONCE, free_port(), local=[3], remote=[7], engine="gone")
    ).failed_recving == {"r"}
    assert report(worker).reads_ended["r"].outcome is ReadOutcome.PEER_UNREACHABLE


def test_a_ticket_with_another_address_than_its_engine_has_is_not_read(make: MakeRank, prefill: Prefill) -> None:
    worker = make()
    worker._addresses[PEER] = (HOST, prefill.port)
    results = step(worker, read_step("r", NONCE, prefill.port + 1, local=[3], remote=[7]))
    assert results.failed_recving == {"r"}
    assert agent(worker).blocks == {}
    assert report(worker).reads_ended["r"].outcome is ReadOutcome.PEER_UNREACHABLE


def test_a_read_given_up_during_its_handshake_never_touches_the_blocks(make: MakeRank, prefill: Prefill) -> None:
    worker = make(read_deadline=0.05)
    blocked, go = threading.Event(), threading.Event()

    def slow() -> None:
        blocked.set()
        go.wait(PATIENCE)

    worker._handshake_initiation_executor.submit(slow)
    assert blocked.wait(PATIENCE)
    metadata = read_step("r", NONCE, prefill.port, local=[3], remote=[7], engine="slow")
    meta = metadata.reqs_to_recv["r"]
    assert until_received(worker, metadata).failed_recving == {"r"}
    assert report(worker).stalled == {}
    # What the handshake's end does: the request comes up for its read, long after it was given up.
    worker._remote_agents["slow"] = {(0, 0): "peer"}
    worker._ready_requests.put(("r", meta))
    step(worker)
    assert agent(worker).blocks == {}
    go.set()


def test_without_blocks_to_read_only_a_notice_goes_out(make: MakeRank, prefill: Prefill) -> None:
    worker = make()
    assert not step(worker, read_step("r", NONCE, prefill.port, local=[], remote=[7])).finished_recving
    assert [parse(notice) for notice in agent(worker).sent] == [Done("remote-r", NONCE, 1)]
    assert not step(worker).finished_recving
    assert prefill.asked == []


def test_a_read_of_our_lease_ends_it_and_is_told_with_its_nonce(make: MakeRank) -> None:
    worker = make()
    assert step(worker, lease_step("p")).finished_sending == set()
    agent(worker).inbox = [f"p#{NONCE}:1".encode()]
    assert step(worker).finished_sending == {"p"}
    assert report(worker).reads_seen == {"p": {NONCE: 1}}
    agent(worker).inbox = [f"p#{NONCE}:1".encode()]
    assert step(worker).finished_sending == set()
    assert worker.build_connector_worker_meta() is None


def test_several_readers_each_tell(make: MakeRank) -> None:
    worker = make()
    step(worker, lease_step("p", readers=2))
    agent(worker).inbox = [b"p#aaaaaaaa:1"]
    assert step(worker).finished_sending == set()
    assert report(worker).reads_seen == {"p": {"aaaaaaaa": 1}}
    agent(worker).inbox = [b"p#bbbbbbbb:1"]
    assert step(worker).finished_sending == {"p"}
    assert report(worker).reads_seen == {"p": {"bbbbbbbb": 1}}


def test_a_notice_never_ends_a_request_that_still_runs(make: MakeRank) -> None:
    worker = make()
    running = ConnectorMetadata()
    running.reqs_in_batch = {"p"}
    step(worker, running)
    agent(worker).inbox = [f"p#{NONCE}:1".encode()]
    assert step(worker).finished_sending == set()
    assert step(worker, lease_step("p")).finished_sending == {"p"}
    assert report(worker).reads_seen == {"p": {NONCE: 1}}


def test_junk_and_forged_notices_are_counted_and_end_nothing(make: MakeRank) -> None:
    worker = make()
    step(worker, lease_step("p"))
    agent(worker).inbox = [b"", b"\xff", b"p", b"p:", b"p:0", b"p:x", b"HB:\xff", b"unknown#aaaaaaaa:1", b"HB:who,p"]
    assert step(worker).finished_sending == set()
    stats = worker.get_kv_connector_stats()
    assert stats is not None
    assert stats.data["pdproxy_counts"] == [["junk", ["notice"], 7]]
    assert len(stats.data["num_notifications_after_expiry"]) == 1


def test_a_release_on_demand_ends_the_lease_once(make: MakeRank) -> None:
    worker = make()
    step(worker, lease_step("p"))
    release = ConnectorMetadata()
    release.releases = frozenset({"p", "never"})
    assert step(worker, release).finished_sending == {"p"}
    assert step(worker, release).finished_sending == set()


def test_an_expired_lease_is_let_go_and_forgotten(make: MakeRank) -> None:
    worker = make()
    assert step(worker, lease_step("p", expires=0.0)).finished_sending == {"p"}
    agent(worker).inbox = [f"p#{NONCE}:1".encode()]
    assert step(worker).finished_sending == set()
    assert len(worker._seen) == 0
