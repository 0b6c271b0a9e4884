"""Notices of reads and heartbeats on a prefill node's rank: which end or prolong a lease, and which mean nothing."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("vllm")


from connector.metadata import ConnectorMetadata
from tests.connector.rank import alias_of, lease_step
from tests.connector.worker import NONCE, MakeRank, agent, report, step


def test_a_read_of_our_lease_ends_it_and_is_reported_with_its_nonce(make: MakeRank) -> None:
    worker = make()
    assert step(worker, lease_step("p")).finished_sending == set()
    agent(worker).inbox = [f"alias-of-p#{NONCE}:1".encode()]
    assert step(worker).finished_sending == {"p"}
    assert report(worker).reads_seen == {"p": {NONCE: 1}}
    agent(worker).inbox = [f"alias-of-p#{NONCE}:1".encode()]
    assert step(worker).finished_sending == set()
    assert worker.build_connector_worker_meta() is None


def test_several_readers_each_send_a_notif(make: MakeRank) -> None:
    worker = make()
    step(worker, lease_step("p", readers=2))
    agent(worker).inbox = [b"alias-of-p#aaaaaaaa:1"]
    assert step(worker).finished_sending == set()
    assert report(worker).reads_seen == {"p": {"aaaaaaaa": 1}}
    agent(worker).inbox = [b"alias-of-p#bbbbbbbb:1"]
    assert step(worker).finished_sending == {"p"}
    assert report(worker).reads_seen == {"p": {"bbbbbbbb": 1}}


def test_tickets_that_were_given_back_end_a_lease_as_reads_do(make: MakeRank) -> None:
    """No rank will read, however many would have. A notif of the same read, later, counts for nothing."""
    worker = make()
    leased = lease_step("p", readers=2)
    leased.returned = {"p": {"aaaaaaaa"}, "unknown": {"aaaaaaaa"}}
    assert step(worker, leased).finished_sending == set()
    agent(worker).inbox = [b"alias-of-p#aaaaaaaa:2"]
    assert step(worker).finished_sending == set()
    assert report(worker).reads_seen == {"p": {"aaaaaaaa": 1}}
    again = ConnectorMetadata()
    again.returned = {"p": {"bbbbbbbb"}}
    assert step(worker, again).finished_sending == {"p"}


def test_a_notif_never_ends_a_request_that_still_runs(make: MakeRank) -> None:
    worker = make()
    running = ConnectorMetadata()
    running.aliases = {alias_of("p"): "p"}
    running.reqs_in_batch = {"p"}
    step(worker, running)
    agent(worker).inbox = [f"alias-of-p#{NONCE}:1".encode()]
    assert step(worker).finished_sending == set()
    assert step(worker, lease_step("p")).finished_sending == {"p"}
    assert report(worker).reads_seen == {"p": {NONCE: 1}}


def test_junk_and_forged_notifs_are_counted_and_end_nothing(make: MakeRank) -> None:
    worker = make()
    step(worker, lease_step("p"))
    agent(worker).inbox = [
        b"",
        b"\xff",
        b"p",
        b"p:",
        b"p:0",
        b"p:x",
        b"HB:\xff",
        b"unknown#aaaaaaaa:1",
        b"HB:who,alias-of-p",
    ]
    assert step(worker).finished_sending == set()
    worker.drain_counters()
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
    agent(worker).inbox = [f"alias-of-p#{NONCE}:1".encode()]
    assert step(worker).finished_sending == set()
    assert len(worker._lease_reads) == 0


def test_the_engine_s_own_request_id_ends_nothing_and_prolongs_nothing(make: MakeRank) -> None:
    worker = make()
    step(worker, lease_step("p"))
    expires = dict(worker._reqs_to_send)
    agent(worker).inbox = [f"p#{NONCE}:1".encode(), b"p:1", b"HB:p"]
    assert step(worker).finished_sending == set()
    assert worker._reqs_to_send == expires
    assert worker.build_connector_worker_meta() is None


def test_a_heartbeat_prolongs_the_leases_of_known_aliases(make: MakeRank) -> None:
    worker = make()
    for name in ("p", "q"):
        step(worker, lease_step(name, expires=time.perf_counter() + 5))
    before = dict(worker._reqs_to_send)
    agent(worker).inbox = [b"HB:unknown,alias-of-q"]
    step(worker)
    assert worker._reqs_to_send["q"] > before["q"] + 10
    assert worker._reqs_to_send["p"] == before["p"]


def test_a_retired_alias_means_nothing(make: MakeRank) -> None:
    worker = make()
    step(worker, lease_step("p"))
    over = ConnectorMetadata()
    over.retired = frozenset({"p", "never"})
    step(worker, over)
    agent(worker).inbox = [f"alias-of-p#{NONCE}:1".encode()]
    assert step(worker).finished_sending == set()
    assert len(worker._aliases) == 0
