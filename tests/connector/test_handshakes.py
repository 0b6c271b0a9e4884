"""First reads over vLLM's own handshake code and real sockets: no address delays another, whatever answers there."""

from __future__ import annotations

import hashlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import HeartbeatInfo

from connector import peer_engines
from connector.counters import ReadOutcome
from connector.messages import Verdict
from connector.metadata import ConnectorMetadata, ReadEnd
from connector.peers import Peers, Resolver, SocketAddress
from connector.verifier import Verifier
from connector.worker import ConnectorWorker
from connector.zmtp import Zmtp
from deploy.local.ports import free_ports
from tests.connector.rank import HOST, PEER, read_step
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
    until_received,
)

KEYS = (b"a key of sixteen bytes", b"another of sixteen bytes")


def nonce_of(request_id: str) -> str:
    return hashlib.sha256(request_id.encode()).hexdigest()[:16]


def order(request_id: str, port: int, engine: str = NEW, host: str = HOST) -> ConnectorMetadata:
    metadata = read_step(request_id, nonce_of(request_id), port, local=[3], remote=[7], engine=engine)
    remote = metadata.reqs_to_recv[request_id].remote
    assert remote is not None
    remote.host = host
    return metadata


def until_posted(worker: ConnectorWorker, count: int, metadata: ConnectorMetadata | None = None) -> None:
    """Step until the rank has posted so many reads in all."""
    deadline = time.monotonic() + PATIENCE
    step(worker, metadata)
    while len(agent(worker).blocks) < count:
        assert time.monotonic() < deadline, "the read was not posted"
        time.sleep(0.001)
        step(worker)


def ended(worker: ConnectorWorker, *request_ids: str, metadata: ConnectorMetadata | None = None) -> dict[str, ReadEnd]:
    """Step until these reads have ended, with `metadata` in the first step; transfers end well as soon as posted."""
    found: dict[str, ReadEnd] = {}
    deadline = time.monotonic() + PATIENCE
    while not set(request_ids) <= found.keys():
        assert time.monotonic() < deadline, f"only {set(found)} ended"
        for handle in [handle for handle, state in agent(worker).states.items() if state == "PROC"]:
            agent(worker).end(handle)
        results, metadata = step(worker, metadata), None
        reads = report(worker).reads_ended
        bad = {name for name, end in reads.items() if end.outcome is not ReadOutcome.VERIFIED}
        assert (results.finished_recving, results.failed_recving) == (set(reads), bad)
        found |= reads
        time.sleep(0.002)
    return found


def read(worker: ConnectorWorker, metadata: ConnectorMetadata) -> ReadOutcome:
    """One read from its order to its end."""
    (request_id,) = metadata.reqs_to_recv
    step(worker, metadata)
    end = report(worker).reads_ended.get(request_id)
    return (end or ended(worker, request_id)[request_id]).outcome


def quick_read(worker: ConnectorWorker, metadata: ConnectorMetadata) -> ReadOutcome:
    """The same, within a second."""
    begun = time.monotonic()
    outcome = read(worker, metadata)
    assert time.monotonic() - begun < 1
    return outcome


def test_a_first_read_waits_for_the_metadata_and_is_then_made(make: MakeRank, new_node: Prefill) -> None:
    worker = make()
    metadata = order("r", new_node.port)
    assert not step(worker, metadata).finished_recving
    assert metadata.reqs_to_recv == {}
    assert ended(worker, "r")["r"].outcome is ReadOutcome.VERIFIED
    assert read(worker, order("s", new_node.port)) is ReadOutcome.VERIFIED
    assert worker._remote_agents[NEW] == {(0, 0): f"agent of {NEW}"}
    assert handshakes(worker) == [NEW]
    assert worker._engine_by_address[HOST, new_node.port] == NEW


def accepting() -> socket.socket:
    """Accepts (the system does) and never answers."""
    return socket.create_server((HOST, 0))


class Scripted:
    """A peer that speaks ZMTP until it is ready, then sends what its script makes, for ever."""

    def __init__(self, says: Callable[[Zmtp], bytes]) -> None:
        self._listening = socket.create_server((HOST, 0))
        self.port = self._listening.getsockname()[1]
        self._says = says
        self._callers: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                caller, _ = self._listening.accept()
                self._callers.append(caller)
                self._serve(caller)
        except OSError:
            return

    def _serve(self, caller: socket.socket) -> None:
        zmtp = Zmtp(b"ROUTER", 1 << 20)
        caller.settimeout(PATIENCE)
        try:
            while zmtp.peer is None:
                caller.sendall(b"".join(zmtp.pieces))
                zmtp.pieces.clear()
                zmtp.receive(caller.recv(4096))
                zmtp.next_message()
            caller.sendall(b"".join(zmtp.pieces))
            while data := self._says(zmtp):
                caller.sendall(data)
        except OSError:
            return

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for caller in self._callers:
            caller.close()
        self._thread.join(PATIENCE)


SCRIPTS: dict[str, Callable[[Zmtp], bytes]] = {
    "ready and then silent": lambda _: b"",
    "an endless answer": lambda _: b"\x01\xff" + b"x" * 255,
    "a frame of 2**62 bytes": lambda _: b"\x02\x40" + bytes(7),
    "answers nobody asked for": lambda _: b"\x01\x00\x00\x06\x94\x63\xa0\xa0\x90\x00"[:9],
    "junk": lambda _: b"\x00\x01j",
    "pings": lambda _: b"\x04\x07\x04PING\x00\x00",
}


@pytest.mark.parametrize("holes", [8, 64])
def test_black_holes_delay_nobody(make: MakeRank, new_node: Prefill, holes: int) -> None:
    worker = make(probe_timeout=600.0)
    with ExitStack() as stack:
        ports = [stack.enter_context(closing(accepting())).getsockname()[1] for _ in range(holes)]
        for number, port in enumerate(ports):
            step(worker, order(f"hole-{number}", port, engine=f"nobody-{number}"))
        assert quick_read(worker, order("honest", new_node.port)) is ReadOutcome.VERIFIED


@pytest.mark.parametrize("says", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_a_peer_that_stalls_or_floods_delays_nobody(
    make: MakeRank, new_node: Prefill, says: Callable[[Zmtp], bytes]
) -> None:
    worker = make(probe_timeout=1.1)
    with closing(Scripted(says)) as peer:
        begun = time.monotonic()
        step(worker, order("bad", peer.port, engine="bad"))
        found = ended(worker, "honest", metadata=order("honest", new_node.port))  # a flood may have failed by then
        assert time.monotonic() - begun < 1
        assert found["honest"].outcome is ReadOutcome.VERIFIED
        found |= ended(worker, *({"bad"} - found.keys()))
        assert found["bad"].outcome is ReadOutcome.PEER_UNREACHABLE


def test_syns_that_are_dropped_delay_nobody(make: MakeRank, new_node: Prefill) -> None:
    """A listening socket whose queue is full drops them."""
    worker = make(probe_timeout=1.1)
    with ExitStack() as stack:
        full = stack.enter_context(closing(socket.socket()))
        full.bind((HOST, 0))
        full.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(closing(socket.socket()))
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        step(worker, order("dropped", full.getsockname()[1], engine="dropped"))
        assert quick_read(worker, order("honest", new_node.port)) is ReadOutcome.VERIFIED
        end = ended(worker, "dropped")["dropped"]
        assert (end.outcome, end.why) == (ReadOutcome.PEER_UNREACHABLE, "no answer within 1.1 s")


def test_names_that_hang_delay_nobody(make: MakeRank, new_node: Prefill) -> None:
    go = threading.Event()

    def slow(host: str, port: int) -> tuple[socket.AddressFamily, SocketAddress]:
        if host.startswith("slow"):
            go.wait(PATIENCE)
        return socket.AF_INET, (HOST, port)

    def peers() -> Peers:
        made = Peers((), time.monotonic)
        made._resolver = Resolver(made.wake, time.monotonic, slow)
        return made

    worker = make()
    worker._verifier = Verifier(PATIENCE, metadata_timeout=1.1, peers=peers)
    for number in range(64):
        step(worker, order(f"slow-{number}", 1, engine=f"slow-{number}", host=f"slow-{number}.example"))
    assert quick_read(worker, order("honest", new_node.port, host="node.example")) is ReadOutcome.VERIFIED
    outcomes = {end.outcome for end in ended(worker, *(f"slow-{number}" for number in range(64))).values()}
    assert outcomes == {ReadOutcome.PEER_UNREACHABLE}
    go.set()


def test_a_flood_to_one_dead_address_costs_one_dial(
    make: MakeRank, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_engines, "UNREACHABLE_FOR", PATIENCE)
    caplog.set_level(logging.WARNING, "vllm.pdproxy.worker")
    worker = make(probe_timeout=0.5)
    with closing(accepting()) as hole:
        hole.settimeout(0.2)
        port = hole.getsockname()[1]
        for number in range(8):
            step(worker, order(f"r{number}", port))
        outcomes = {end.outcome for end in ended(worker, *(f"r{number}" for number in range(8))).values()}
        assert outcomes == {ReadOutcome.PEER_UNREACHABLE}
        begun = time.monotonic()
        assert read(worker, order("late", port)) is ReadOutcome.PEER_UNREACHABLE
        assert time.monotonic() - begun < 0.3
        hole.accept()[0].close()
        with pytest.raises(TimeoutError):
            hole.accept()
    assert counts(worker)["reads", "peer_unreachable"] == 9
    assert sum("cannot be reached: no answer within 0.5 s" in line for line in caplog.messages) == 1


def test_an_engine_that_is_not_there_any_more_is_unreachable(make: MakeRank, new_node: Prefill) -> None:
    worker = make()
    assert read(worker, order("r", new_node.port, engine="an earlier one")) is ReadOutcome.PEER_UNREACHABLE
    assert handshakes(worker) == []


def test_nodes_that_do_not_go_together_are_incompatible_and_not_unreachable(
    make: MakeRank, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "vllm.pdproxy.worker")
    worker = make()
    with closing(Stopping(Prefill(NEW, compatible=False))) as other:
        assert read(worker, order("r", other.prefill.port)) is ReadOutcome.INCOMPATIBLE
        assert read(worker, order("s", other.prefill.port)) is ReadOutcome.INCOMPATIBLE
    assert counts(worker)["reads", "incompatible"] == 2
    said = [line for line in caplog.messages if "do not go" in line or "NIXL handshake says" in line]
    assert len(said) == 1
    assert "compatibility hash mismatch" in said[0]
    assert NEW not in worker._remote_agents


def test_a_failed_handshake_with_an_engine_of_its_own_id_leaves_what_reads_need(
    make: MakeRank, new_node: Prefill
) -> None:
    worker = make()
    own = {name: entries[worker.engine_id] for name, entries in per_engine(worker).items()}
    assert own
    with closing(Stopping(Prefill(worker.engine_id, compatible=False))) as twin:
        assert read(worker, order("r", twin.prefill.port, engine=worker.engine_id)) is ReadOutcome.INCOMPATIBLE
    assert {name: per_engine(worker)[name].get(worker.engine_id) for name in own} == own
    assert read(worker, order("s", new_node.port)) is ReadOutcome.VERIFIED


def per_engine(worker: ConnectorWorker) -> dict[str, Any]:
    """vLLM's entries for each engine, where its own is among them."""
    return {
        name: value for name, value in vars(worker).items() if isinstance(value, dict) and worker.engine_id in value
    }


def test_sizes_that_cannot_go_together_are_incompatible(make: MakeRank, new_node: Prefill) -> None:
    worker = make()

    def refuse(tp_size: int, _dcp_size: int) -> list[int]:
        raise AssertionError("3 is no multiple of 2")

    worker.transfer_topo.handshake_target_ranks = refuse
    assert read(worker, order("r", new_node.port)) is ReadOutcome.INCOMPATIBLE


def test_a_ticket_that_vllm_cannot_pair_is_incompatible(make: MakeRank, prefill: Prefill) -> None:
    worker = make()
    metadata = read_step("r", "0" * 16, prefill.port, local=[3, 4, 5], remote=[7])
    assert step(worker, metadata).failed_recving == {"r"}
    assert report(worker).reads_ended["r"].outcome is ReadOutcome.INCOMPATIBLE


class Stopping:
    """A prefill node, with the method that `closing` calls."""

    def __init__(self, prefill: Prefill) -> None:
        self.prefill = prefill

    def close(self) -> None:
        self.prefill.listener.stop()


def test_with_keys_both_nodes_must_have_one(make: MakeRank, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "vllm.pdproxy.worker")
    with closing(Stopping(Prefill(NEW, keys=KEYS))) as locked:
        assert read(make(keys=KEYS[1:]), order("r", locked.prefill.port)) is ReadOutcome.VERIFIED
        for keys in ((), (b"a wrong key of sixteen",)):
            caplog.clear()
            assert read(make(keys=keys), order("r", locked.prefill.port)) is ReadOutcome.PEER_UNREACHABLE
            assert any("ticket keys" in line for line in caplog.messages)


def test_an_engine_without_keys_is_not_read_by_a_node_with_keys(make: MakeRank, new_node: Prefill) -> None:
    assert read(make(keys=KEYS), order("r", new_node.port)) is ReadOutcome.PEER_UNREACHABLE


def test_an_engine_that_restarts_with_its_id_is_read_at_once(make: MakeRank, new_node: Prefill) -> None:
    worker = make()
    read(worker, order("r", new_node.port))
    new_node.listener.stop()
    new_node.restart()
    until_lost(worker)
    assert read(worker, order("s", new_node.port)) is ReadOutcome.VERIFIED
    assert handshakes(worker) == [NEW, NEW]
    read(worker, order("t", new_node.port))
    assert handshakes(worker) == [NEW, NEW]


def test_an_engine_that_restarts_elsewhere_with_its_id_is_read(make: MakeRank, new_node: Prefill) -> None:
    worker = make()
    read(worker, order("r", new_node.port))
    new_node.listener.stop()
    new_node.restart(port=free_ports(1)[0])
    assert read(worker, order("s", new_node.port)) is ReadOutcome.VERIFIED
    assert handshakes(worker) == [NEW, NEW]


def until_lost(worker: ConnectorWorker) -> None:
    """Until the rank has seen its connection end."""
    deadline = time.monotonic() + PATIENCE
    while not worker._peer_engines._known[NEW].stale:
        assert time.monotonic() < deadline
        step(worker)
        time.sleep(0.005)


def test_a_read_under_way_when_the_engine_restarts_holds_up_the_next_and_no_longer(
    make: MakeRank, new_node: Prefill
) -> None:
    worker = make()
    until_posted(worker, 1, order("r", new_node.port))
    new_node.listener.stop()
    new_node.restart()
    until_lost(worker)
    for _ in range(20):
        step(worker, order("s", new_node.port) if _ == 0 else None)
        time.sleep(0.005)
    assert len(agent(worker).blocks) == 1
    agent(worker).end(0, "ERR")
    assert until_received(worker).failed_recving == {"r"}
    until_posted(worker, 2)
    assert handshakes(worker) == [NEW, NEW]


def test_after_a_failed_transfer_a_new_handshake_is_made_before_the_next_read(
    make: MakeRank, new_node: Prefill
) -> None:
    """NIXL never mends the connection on which a transfer failed: each later read on it would fail at once."""
    worker = make()
    until_posted(worker, 1, order("r", new_node.port))
    agent(worker).end(0, "ERR")
    until_received(worker)
    metadata = order("s", new_node.port)
    step(worker, metadata)
    assert metadata.reqs_to_recv == {}
    until_posted(worker, 2)
    assert handshakes(worker) == [NEW, NEW]


def test_a_read_that_was_given_up_and_fails_later_breaks_the_connection_too(make: MakeRank, new_node: Prefill) -> None:
    worker = make(read_deadline=1.0)
    until_posted(worker, 1, order("r", new_node.port))
    until_received(worker)
    assert report(worker).stalled
    assert handshakes(worker) == [NEW]
    agent(worker).end(0, "ERR")
    step(worker)
    until_posted(worker, 2, order("s", new_node.port))
    assert handshakes(worker) == [NEW, NEW]


def test_a_verdict_by_another_run_does_not_count(make: MakeRank, new_node: Prefill) -> None:
    worker = make()
    until_posted(worker, 1, order("r", new_node.port))
    new_node.listener.stop()
    new_node.restart()
    agent(worker).end(0)
    assert until_received(worker).failed_recving == {"r"}
    assert report(worker).reads_ended["r"] == ReadEnd(nonce_of("r"), ReadOutcome.UNVERIFIED)


def test_a_ticket_with_another_address_than_its_engine_has_is_not_read(make: MakeRank, new_node: Prefill) -> None:
    worker = make()
    read(worker, order("r", new_node.port))
    with closing(Stopping(Prefill(NEW))) as forged:
        assert read(worker, order("s", forged.prefill.port)) is ReadOutcome.PEER_UNREACHABLE
        assert forged.prefill.asked == []
    assert read(worker, order("t", new_node.port)) is ReadOutcome.VERIFIED
    assert handshakes(worker) == [NEW]


def test_a_deferred_read_that_is_given_up_never_touches_the_blocks(make: MakeRank) -> None:
    worker = make(read_deadline=0.1, probe_timeout=0.4)
    with closing(accepting()) as hole:
        assert read(worker, order("r", hole.getsockname()[1])) is ReadOutcome.PEER_UNREACHABLE
        time.sleep(0.5)
        assert not step(worker).finished_recving
        assert worker._deferred == {}
        assert worker._recving_metadata == {}


def beat(worker: ConnectorWorker, engine: str, port: int) -> None:
    metadata = ConnectorMetadata()
    metadata.heartbeat_by_engine = {engine: HeartbeatInfo({"remote-r"}, HOST, port, 1)}
    before: dict[str, Any] = dict(metadata.heartbeat_by_engine)
    step(worker, metadata)
    assert before.keys() == {engine}


def test_heartbeats_go_to_engines_whose_metadata_has_come(make: MakeRank, new_node: Prefill) -> None:
    worker = make()
    beat(worker, PEER, 1)
    assert agent(worker).sent == [b"HB:remote-r"]
    with closing(accepting()) as hole:
        beat(worker, "nobody", hole.getsockname()[1])
        deadline = time.monotonic() + PATIENCE
        while len(agent(worker).sent) < 2:
            assert time.monotonic() < deadline
            beat(worker, NEW, new_node.port)
            time.sleep(0.005)
    assert handshakes(worker) == [NEW]


def test_the_engine_itself_is_asked_whether_blocks_were_held(make: MakeRank, new_node: Prefill) -> None:
    new_node.verdict = Verdict.EXPIRED
    assert read(make(), order("r", new_node.port)) is ReadOutcome.NOT_HELD
