"""Reads: each ends exactly once, with the right outcome, and no request runs before the verdict.

The rules by themselves, then on a rank: vLLM's own worker code, a small NIXL agent, and a real side channel.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload

from connector.counters import ReadOutcome
from connector.kv_groups import ReadSize
from connector.messages import Question, Verdict
from connector.metadata import ConnectorMetadata, ReadEnd
from connector.node_fingerprint import RankPayload
from connector.notifs import ReadDone, parse_notif
from connector.pending_reads import LATE_FAILURE, OverdueRead, PendingReads
from connector.verifier import ReadVerdict, Verifier
from connector.worker import IDLE_READ_WAIT, IDLE_VERDICT_WAIT
from deploy.local.ports import free_ports
from tests.connector.rank import PEER, read_step
from tests.connector.worker import (
    BLOCK_BYTES,
    NONCE,
    PATIENCE,
    MakeRank,
    Prefill,
    agent,
    counts,
    report,
    step,
    until,
    until_received,
)

HERE = ("10.0.0.1", 5600)
ASKED = Question("P", "remote", "nonce-1")
SIZE = ReadSize(attention=300, state=40, spared=100)


def begun(deadline: float = 10) -> PendingReads:
    reads = PendingReads(deadline)
    reads.on_ordered("r", ASKED, HERE, SIZE, now=0)
    return reads


@pytest.mark.parametrize("verdict", list(Verdict))
def test_a_completed_read_is_good_only_with_a_good_verdict(verdict: Verdict) -> None:
    reads = begun()
    reads.on_posted("r", now=0)
    assert reads.on_completed(["r"], now=2) == {HERE: [ASKED]}
    result = reads.on_verdict(ReadVerdict("nonce-1", verdict), now=2.5)
    assert result is not None
    assert (result.request_id, result.verify_seconds) == ("r", 0.5)
    if verdict in (Verdict.HELD, Verdict.RELEASED_BY_YOU):
        assert result.end == ReadEnd("nonce-1", ReadOutcome.VERIFIED, 300, 40)
        assert result.spared == 100
    else:
        assert result.end == ReadEnd("nonce-1", ReadOutcome.NOT_HELD, 0, 0)
        assert result.spared == 0
    assert len(reads) == 0


def test_no_verdict_in_time_is_asked_for_once_more_and_then_counts_as_no_good_one() -> None:
    reads = begun()
    reads.on_completed(["r"], now=1)
    assert reads.on_verdict(ReadVerdict("nonce-1", None), now=6) is None
    assert reads.awaits_verdict()
    assert reads.repeat_questions() == {HERE: [ASKED]}
    assert reads.repeat_questions() == {}
    result = reads.on_verdict(ReadVerdict("nonce-1", None), now=11)
    assert result is not None
    assert result.end.outcome is ReadOutcome.UNVERIFIED
    assert reads.repeat_questions() == {}


@pytest.mark.parametrize("verdict", list(Verdict))
def test_a_late_verdict_is_as_good_as_one_in_time(verdict: Verdict) -> None:
    reads = begun()
    reads.on_completed(["r"], now=1)
    reads.on_verdict(ReadVerdict("nonce-1", None), now=6)
    result = reads.on_verdict(ReadVerdict("nonce-1", verdict), now=7)
    assert result is not None
    assert (result.end.outcome is ReadOutcome.VERIFIED) == verdict.good
    assert result.verify_seconds == 6


def test_a_verdict_settles_nothing_before_the_last_byte_and_nothing_twice() -> None:
    reads = begun()
    assert reads.on_verdict(ReadVerdict("nonce-1", Verdict.HELD), now=1) is None
    assert reads.on_verdict(ReadVerdict("another", Verdict.HELD), now=1) is None
    reads.on_completed(["r"], now=1)
    assert reads.on_verdict(ReadVerdict("nonce-1", Verdict.HELD), now=1) is not None
    assert reads.on_verdict(ReadVerdict("nonce-1", Verdict.HELD), now=1) is None


def test_why_a_read_failed() -> None:
    assert begun().on_failed("r", 0).outcome is ReadOutcome.PEER_UNREACHABLE
    posted = begun()
    posted.on_posted("r", now=0)
    assert posted.on_failed("r", 2.9).outcome is ReadOutcome.TRANSFER_FAILED


def test_a_transfer_that_fails_late_has_made_no_progress() -> None:
    reads = begun()
    reads.on_posted("r", now=5)
    assert reads.on_failed("r", 5 + LATE_FAILURE).outcome is ReadOutcome.NO_PROGRESS


def test_a_read_is_given_up_once_at_its_deadline() -> None:
    reads = begun(deadline=10)
    reads.on_posted("r", now=0)
    assert reads.overdue(9.9) == []
    assert reads.overdue(10) == [OverdueRead("r", "P", "nonce-1")]
    assert reads.overdue(20) == []
    assert reads.on_failed("r", 0).outcome is ReadOutcome.NO_PROGRESS


def test_a_long_read_goes_on_while_its_peer_answers_whatever_the_verdict() -> None:
    reads = begun(deadline=100)
    reads.on_posted("r", now=0)
    assert reads.probes(0.9) == {}
    for now, verdict in ((1.0, Verdict.HELD), (2.5, Verdict.EXPIRED), (4.0, Verdict.RELEASED_BY_ANOTHER)):
        ((asked,),) = reads.probes(now).values()
        assert asked.nonce != ASKED.nonce
        assert reads.probes(now + 1) == {}, "one at a time"
        assert reads.on_verdict(ReadVerdict(asked.nonce, verdict), now) is None
        assert reads.overdue(now) == []
    reads.on_completed(["r"], now=5)
    assert reads.on_verdict(ReadVerdict("nonce-1", Verdict.HELD), now=5) is not None


def test_a_read_is_given_up_when_its_peer_is_silent() -> None:
    reads = begun(deadline=100)
    reads.on_posted("r", now=0)
    ((asked,),) = reads.probes(1).values()
    reads.on_verdict(ReadVerdict(asked.nonce, None), now=6)
    assert reads.overdue(6) == [OverdueRead("r", "P", "nonce-1")]
    assert reads.on_failed("r", 0).outcome is ReadOutcome.NO_PROGRESS


def test_the_answer_to_a_probe_is_no_verdict_on_a_read() -> None:
    """The answer was given before the last byte came."""
    reads = begun()
    reads.on_posted("r", now=0)
    ((asked,),) = reads.probes(1).values()
    reads.on_completed(["r"], now=1.5)
    assert reads.on_verdict(ReadVerdict(asked.nonce, Verdict.HELD), now=2) is None
    assert len(reads) == 1
    assert reads.probes(10) == {}


def test_the_answer_to_an_earlier_reads_probe_does_not_count_for_the_next() -> None:
    reads = begun()
    reads.on_posted("r", now=0)
    ((asked,),) = reads.probes(1).values()
    reads.on_failed("r", 0)
    reads.on_ordered("r", Question("P", "remote", "nonce-2"), HERE, SIZE, now=2)
    reads.on_posted("r", now=2)
    reads.on_verdict(ReadVerdict(asked.nonce, None), now=3)
    assert reads.overdue(3) == []


def test_a_read_that_never_reached_its_peer_is_not_live_when_given_up() -> None:
    reads = begun(deadline=10)
    assert reads.overdue(10) == [OverdueRead("r", "P", "nonce-1")]
    assert reads.on_failed("r", 0).outcome is ReadOutcome.PEER_UNREACHABLE


def test_waiting_for_the_verdict_is_not_the_reads_fault() -> None:
    reads = begun(deadline=10)
    reads.on_completed(["r"], now=9)
    assert reads.overdue(100) == []


def test_the_second_read_is_not_settled_by_the_first_ones_verdict() -> None:
    reads = begun()
    reads.on_failed("r", 0)
    reads.on_ordered("r", Question("P", "remote", "nonce-2"), HERE, SIZE, now=1)
    reads.on_completed(["r"], now=2)
    assert reads.on_verdict(ReadVerdict("nonce-1", Verdict.HELD), now=3) is None
    assert reads.on_verdict(ReadVerdict("nonce-2", Verdict.HELD), now=3) is not None


def test_questions_of_one_peer_go_together() -> None:
    reads = PendingReads(10)
    for name, address in (("a", HERE), ("b", HERE), ("c", ("10.0.0.2", 5600))):
        reads.on_ordered(name, Question("P", name, "n-" + name), address, SIZE, now=0)
    asked = reads.on_completed(["a", "b", "c"], now=1)
    assert {address: [one.nonce for one in questions] for address, questions in asked.items()} == {
        HERE: ["n-a", "n-b"],
        ("10.0.0.2", 5600): ["n-c"],
    }


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
    assert [parse_notif(notif) for notif in agent(worker).sent] == [ReadDone("remote-r", NONCE, 1)]
    assert report(worker).reads_ended == {"r": ReadEnd(NONCE, ReadOutcome.VERIFIED, 2 * BLOCK_BYTES, 0)}
    assert worker.build_connector_worker_meta() is None
    assert counts(worker) == {
        ("reads", "verified"): 1,
        ("bytes", "attention", "pulled"): 2 * BLOCK_BYTES,
        ("bytes", "attention", "spared"): BLOCK_BYTES,
    }


def test_a_rank_publishes_all_its_backends(make: MakeRank, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM names the first layer's alone, mamba's where a model begins with mamba; a stock node reads what it knows."""

    def as_vllm_does(worker: Any, caches: Any) -> None:
        worker.xfer_handshake_metadata = NixlHandshakePayload("hash", b"metadata")

    monkeypatch.setattr(NixlBaseConnectorWorker, "register_kv_caches", as_vllm_does)
    worker = make()
    worker.register_kv_caches({})
    published = worker.xfer_handshake_metadata
    assert isinstance(published, RankPayload)
    assert published == RankPayload("hash", b"metadata", "FLASH_ATTN+GDN_ATTN")
    stock = msgspec.msgpack.decode(msgspec.msgpack.encode(published), type=NixlHandshakePayload)
    assert stock == NixlHandshakePayload("hash", b"metadata")


class PatientVerifier(Verifier):
    """Waits long where a rank would wait at all, and keeps how long that was to be."""

    def __init__(self) -> None:
        super().__init__(PATIENCE)
        self.waited: list[float] = []

    def verdicts(self, wait_seconds: float = 0.0) -> list[ReadVerdict]:
        self.waited.append(wait_seconds)
        return super().verdicts(PATIENCE if wait_seconds else 0.0)


def test_a_verdict_is_waited_for_only_in_a_step_that_computes_nothing(make: MakeRank, prefill: Prefill) -> None:
    worker = make()
    worker._verifier.close()
    worker._verifier = verifier = PatientVerifier()
    idle = ConnectorMetadata()
    idle.idle = True
    step(worker, read_step("r", NONCE, prefill.port, local=[3], remote=[7]))
    step(worker, idle)
    agent(worker).end(0)
    assert verifier.waited == [0.0, 0.0]
    assert step(worker, idle).finished_recving == {"r"}
    step(worker, read_step("s", "f" * 16, prefill.port, local=[4], remote=[7]))
    agent(worker).end(1)
    step(worker)
    assert verifier.waited == [0.0, 0.0, IDLE_VERDICT_WAIT, 0.0, 0.0]


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


def test_a_read_without_a_verdict_fails(make: MakeRank, prefill: Prefill) -> None:
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
    reported = report(worker)
    assert reported.reads_ended["r"].outcome is ReadOutcome.NO_PROGRESS
    assert (reported.stalled, reported.drained) == ({NONCE: 1}, {})
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


def test_a_port_without_a_listener_fails_the_read(make: MakeRank) -> None:
    worker = make()
    assert until_received(
        worker, read_step("r", NONCE, free_ports(1)[0], local=[3], remote=[7], engine="gone")
    ).failed_recving == {"r"}
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


def test_a_verdict_that_was_lost_is_asked_for_again_and_the_read_counts(make: MakeRank, prefill: Prefill) -> None:
    """Its own notice has ended the lease by then: to read once more would be to read what is not held."""
    worker = make()
    worker._verifier.close()
    worker._verifier = verifier = LossyVerifier()
    prefill.verdict = Verdict.RELEASED_BY_YOU
    step(worker, read_step("r", NONCE, prefill.port, local=[3], remote=[7]))
    agent(worker).end(0)
    assert until_received(worker).failed_recving == set()
    assert report(worker).reads_ended["r"].outcome is ReadOutcome.VERIFIED
    assert verifier.lost_nonces == [NONCE]
    assert prefill.asked == [(PEER, "remote-r", NONCE)] * 2


class LossyVerifier(Verifier):
    """Loses the first answer to each question."""

    def __init__(self) -> None:
        super().__init__(PATIENCE)
        self.lost_nonces: list[str] = []

    def verdicts(self, wait_seconds: float = 0.0) -> list[ReadVerdict]:
        found = super().verdicts(wait_seconds)
        for at, answer in enumerate(found):
            if answer.nonce not in self.lost_nonces:
                self.lost_nonces.append(answer.nonce)
                found[at] = ReadVerdict(answer.nonce, None)
        return found


@pytest.mark.parametrize("end", ["DONE", "ERR"])
def test_how_a_transfer_that_was_given_up_ended_is_reported(make: MakeRank, prefill: Prefill, end: str) -> None:
    worker = make(read_deadline=0.05)
    until_received(worker, read_step("r", NONCE, prefill.port, local=[3], remote=[7]))
    report(worker)
    agent(worker).end(0, end)
    step(worker)
    reported = report(worker)
    assert reported.drained == {NONCE: 1}
    assert reported.broken == ({NONCE: 1} if end == "ERR" else {})


def idle_step() -> ConnectorMetadata:
    metadata = ConnectorMetadata()
    metadata.idle = True
    return metadata


def test_a_step_that_computes_nothing_waits_for_the_end_of_a_read(
    make: MakeRank, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("connector.worker.IDLE_READ_WAIT", PATIENCE)
    monkeypatch.setattr("connector.worker.IDLE_VERDICT_WAIT", PATIENCE)
    worker = make()
    step(worker, read_step("r", NONCE, prefill.port, local=[3], remote=[7]))
    until(lambda: step(worker), lambda _: bool(worker._recving_transfers))
    ends = threading.Timer(0.05, agent(worker).end, (0,))
    ends.start()
    assert step(worker, idle_step()).finished_recving == {"r"}
    ends.join()
    step(worker, read_step("s", "f" * 16, prefill.port, local=[4], remote=[7]))
    began = time.monotonic()
    assert not step(worker).finished_recving, "a step that computes does not wait"
    assert time.monotonic() - began < PATIENCE / 2


def test_an_idle_step_waits_for_a_read_for_a_moment_only(make: MakeRank, prefill: Prefill) -> None:
    worker = make(read_deadline=0.05)
    step(worker, read_step("r", NONCE, prefill.port, local=[3], remote=[7]))
    until(lambda: step(worker), lambda _: bool(worker._recving_transfers))
    began = time.monotonic()
    assert not step(worker, idle_step()).finished_recving
    assert IDLE_READ_WAIT <= time.monotonic() - began < PATIENCE / 2
    until_received(worker)
    step(worker, idle_step())
    assert worker._stalled, "nor is the end of a transfer that was given up waited for"
    agent(worker).end(0)
    step(worker)
