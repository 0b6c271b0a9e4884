"""A rank's probes of a path: metadata, a handshake, a small read; what each says, and what they leave behind."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("vllm")

from connector import path_probes, peer_engines
from connector.metadata import ConnectorMetadata, WorkerReport
from connector.peer_paths import Peer
from connector.worker import ConnectorWorker
from deploy.local.ports import free_ports
from tests.connector.rank import HOST, read_step
from tests.connector.worker import (
    NEW,
    PATIENCE,
    MakeRank,
    Prefill,
    agent,
    handshakes,
    report,
    step,
    until,
    until_received,
)

NONCE = "c" * 16


def probe_step(port: int, number: int = 1, engine: str = NEW) -> ConnectorMetadata:
    metadata = ConnectorMetadata()
    metadata.probes = {number: Peer(engine, HOST, port, 1, 1, 1)}
    return metadata


def until_probed(worker: ConnectorWorker, metadata: ConnectorMetadata | None = None) -> WorkerReport:
    """The first report of the end of a probe."""
    deadline = time.monotonic() + PATIENCE
    while True:
        step(worker, metadata)
        reported = report(worker)
        if reported.paths_passed or reported.paths_failed:
            return reported
        metadata = None
        assert time.monotonic() < deadline, "no probe came to its end"
        time.sleep(0.002)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that does not end is soon given up."""
    monkeypatch.setattr(path_probes, "PROBE_WITHIN", 0.3)


def test_a_probe_of_an_unknown_engine_makes_a_handshake_and_reads(make: MakeRank, new_node: Prefill) -> None:
    worker = make()
    reported = until_probed(worker, probe_step(new_node.port))
    assert (reported.paths_passed, reported.paths_failed) == ({1: 1}, {})
    assert handshakes(worker) == [NEW]
    assert len(agent(worker).probed) == 1
    assert agent(worker).sent == [], "no lease is touched"


def test_an_engine_that_is_known_is_read_over_its_connection(make: MakeRank, new_node: Prefill) -> None:
    worker = make()
    for number in (1, 2):
        assert until_probed(worker, probe_step(new_node.port, number)).paths_passed == {number: 1}
    assert handshakes(worker) == [NEW]
    assert len(agent(worker).registered) == 1


@pytest.mark.parametrize("path", ["ERR", "refused"])
def test_a_broken_connection_is_made_anew_once(make: MakeRank, new_node: Prefill, path: str) -> None:
    worker = make()
    until_probed(worker, probe_step(new_node.port))
    agent(worker).path = path
    assert until_probed(worker, probe_step(new_node.port, 2)).paths_failed == {2: 1}
    assert handshakes(worker) == [NEW, NEW]
    agent(worker).path = "DONE"
    assert until_probed(worker, probe_step(new_node.port, 3)).paths_passed == {3: 1}
    assert handshakes(worker) == [NEW, NEW, NEW]


@pytest.mark.usefixtures("soon")
def test_on_a_cut_path_one_small_read_is_left_and_polled_until_it_ends(make: MakeRank, new_node: Prefill) -> None:
    worker = make()
    agent(worker).path = "PROC"
    for number in (1, 2, 3):
        assert until_probed(worker, probe_step(new_node.port, number)).paths_failed == {number: 1}
    assert len(agent(worker).probed) == 1
    assert worker._engines_with_inflight_transfers() == {NEW}
    agent(worker).path = "DONE"
    agent(worker).end(agent(worker).probed[0], "ERR")
    assert until_probed(worker, probe_step(new_node.port, 4)).paths_passed == {4: 1}
    assert handshakes(worker) == [NEW, NEW]
    assert worker._engines_with_inflight_transfers() == set()


def test_a_side_channel_that_does_not_answer_fails_the_probe(
    make: MakeRank, new_node: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_engines, "UNREACHABLE_FOR", 0.0)
    worker = make()
    until_probed(worker, probe_step(new_node.port))
    new_node.listener.stop()
    assert until_probed(worker, probe_step(new_node.port, 2)).paths_failed == {2: 1}
    assert len(agent(worker).probed) == 1, "nothing is read from an engine that does not answer"
    new_node.restart()
    assert until_probed(worker, probe_step(new_node.port, 3)).paths_passed == {3: 1}
    assert handshakes(worker) == [NEW, NEW], "it is another run of the node"


def test_nobody_at_the_address_fails_it_at_once(make: MakeRank) -> None:
    assert until_probed(make(), probe_step(free_ports(1)[0])).paths_failed == {1: 1}


def test_a_node_that_does_not_fit_fails_it(make: MakeRank) -> None:
    other = Prefill(NEW, compatible=False)
    try:
        assert until_probed(make(), probe_step(other.port)).paths_failed == {1: 1}
    finally:
        other.listener.stop()


def test_reads_of_a_pair_that_was_probed_go_on(make: MakeRank, new_node: Prefill) -> None:
    worker = make()
    until_probed(worker, probe_step(new_node.port))
    step(worker, read_step("r", NONCE, new_node.port, local=[3], remote=[7], engine=NEW))
    posted = until(lambda: step(worker) and list(worker._recving_transfers.get("r", ())), bool)
    agent(worker).end(posted[0])
    assert until_received(worker).failed_recving == set()
