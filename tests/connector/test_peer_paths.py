"""Which prefill engines are barred: what bars one, who probes it, and when its tickets are read again."""

from __future__ import annotations

import logging

import pytest

from connector.counters import PATH_FAILURES, Counters, ReadOutcome
from connector.peer_paths import (
    LONGEST_HOLD,
    LONGEST_PAUSE,
    MOST_PEERS,
    PROBED_FOR,
    Peer,
    PeerPaths,
)

PEER = Peer("P", "10.0.0.1", 5600, 1, 1, 1)
OTHER = Peer("P", "10.0.0.2", 5600, 1, 1, 1)


def barred(ranks: int = 1, at: float = 0.0) -> PeerPaths:
    paths = PeerPaths(ranks, Counters())
    paths.on_read_ended(PEER, ReadOutcome.NO_PROGRESS, at)
    return paths


def probe(paths: PeerPaths, now: float) -> int:
    """The one probe that is ordered now."""
    ((number, peer),) = paths.pop_probes(now).items()
    assert peer == PEER
    return number


def fail_probe(paths: PeerPaths, now: float) -> None:
    paths.on_probed({}, {probe(paths, now): 1}, now)


@pytest.mark.parametrize("outcome", list(ReadOutcome))
def test_what_bars_a_peer(outcome: ReadOutcome) -> None:
    paths = PeerPaths(1, Counters())
    paths.on_read_ended(PEER, outcome, 0)
    assert paths.barred(PEER, 1) == (outcome if outcome in PATH_FAILURES else None)
    assert len(paths) == (outcome in PATH_FAILURES)


@pytest.mark.parametrize(
    "other",
    [OTHER, Peer("Q", "10.0.0.1", 5600, 1, 1, 1), Peer("P", "10.0.0.1", 5600, 2, 1, 1)],
    ids=["address", "engine", "sizes"],
)
def test_another_peer_is_not_barred(other: Peer) -> None:
    """A node that restarted has another engine id."""
    assert barred().barred(other, 1) is None


def test_it_is_probed_at_once_one_at_a_time_and_less_often_the_longer_it_fails() -> None:
    paths, now, waits = barred(), 0.0, []
    for _ in range(6):
        fail_probe(paths, now)
        assert paths.barred(PEER, now) is ReadOutcome.NO_PROGRESS
        began = now
        while not paths._paths[PEER].due <= now:
            assert paths.pop_probes(now) == {}
            now += 0.5
        waits.append(now - began)
    assert waits == [0.5, 1.0, LONGEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE]


def test_a_probe_under_way_is_not_ordered_again() -> None:
    paths = barred()
    probe(paths, 0)
    assert paths.pop_probes(100 * LONGEST_PAUSE) == {}


def test_it_is_open_again_when_the_probe_has_passed_on_every_rank() -> None:
    paths = barred(ranks=2)
    number = probe(paths, 0)
    paths.on_probed({number: 1}, {}, 1)
    assert paths.barred(PEER, 1) is ReadOutcome.NO_PROGRESS
    paths.on_probed({number: 1}, {}, 2)
    assert paths.barred(PEER, 2) is None
    assert len(paths) == 0


def test_one_rank_that_cannot_read_is_enough() -> None:
    paths = barred(ranks=2)
    number = probe(paths, 0)
    paths.on_probed({number: 1}, {number: 1}, 1)
    assert paths.barred(PEER, 1) is ReadOutcome.NO_PROGRESS
    assert paths.pop_probes(1 + LONGEST_PAUSE) != {}


def test_a_read_that_was_under_way_and_is_verified_opens_it() -> None:
    paths = barred()
    number = probe(paths, 0)
    paths.on_read_ended(PEER, ReadOutcome.VERIFIED, 1)
    assert paths.barred(PEER, 1) is None
    paths.on_probed({}, {number: 1}, 2)
    assert paths.barred(PEER, 2) is None


def test_a_path_that_passes_probes_and_fails_reads_is_held_longer_each_time() -> None:
    """Small packets may pass where large ones are lost."""
    paths, now, held = barred(), 0.0, []
    for _ in range(9):
        since = now
        while paths.barred(PEER, now) is not None:
            for number in paths.pop_probes(now):
                paths.on_probed({number: 1}, {}, now)
            now += 0.5
        held.append(now - since)
        paths.on_read_ended(PEER, ReadOutcome.NO_PROGRESS, now)
    assert [round(each - 0.5) for each in held] == [0, 2, 4, 8, 16, 32, LONGEST_HOLD, LONGEST_HOLD, LONGEST_HOLD]
    for number in paths.pop_probes(now + LONGEST_HOLD):
        paths.on_probed({number: 1}, {}, now + LONGEST_HOLD)
    paths.on_read_ended(PEER, ReadOutcome.VERIFIED, now + LONGEST_HOLD)
    paths.on_read_ended(PEER, ReadOutcome.NO_PROGRESS, now + LONGEST_HOLD)
    paths.on_probed({probe(paths, now + LONGEST_HOLD): 1}, {}, now + LONGEST_HOLD)
    assert paths.barred(PEER, now + LONGEST_HOLD) is None, "a verified read is a new beginning"


def test_without_tickets_it_is_not_probed_and_the_next_ticket_finds_it_barred() -> None:
    paths = barred()
    fail_probe(paths, 0)
    assert paths.pop_probes(PROBED_FOR) == {}
    assert len(paths) == 0
    assert paths.barred(PEER, 10 * PROBED_FOR) is ReadOutcome.NO_PROGRESS
    assert len(paths) == 1
    assert paths.pop_probes(10 * PROBED_FOR) != {}


def test_more_failures_while_it_is_barred_change_nothing() -> None:
    paths = barred()
    number = probe(paths, 0)
    paths.on_read_ended(PEER, ReadOutcome.UNVERIFIED, 1)
    assert paths.barred(PEER, 1) is ReadOutcome.NO_PROGRESS
    paths.on_probed({number: 1}, {}, 1)
    assert paths.barred(PEER, 1) is None


def test_forged_peers_are_bounded() -> None:
    paths = PeerPaths(1, Counters())
    for port in range(MOST_PEERS + 10):
        paths.on_read_ended(Peer("P", "10.0.0.1", port, 1, 1, 1), ReadOutcome.PEER_UNREACHABLE, 0)
    assert len(paths) == MOST_PEERS


def test_each_change_is_one_line_and_the_gauge_follows(caplog: pytest.LogCaptureFixture) -> None:
    counters = Counters()
    paths = PeerPaths(1, counters)
    with caplog.at_level(logging.DEBUG, "vllm.pdproxy.scheduler"):
        for at in range(3):
            paths.on_read_ended(PEER, ReadOutcome.NO_PROGRESS, at)
            paths.barred(PEER, at)
        assert counters.drain().gauges == [("barred_peers", [], 1)]
        number = probe(paths, 5)
        paths.on_probed({number: 1}, {}, 7.5)
    snapshot = counters.drain()
    assert snapshot.gauges == [("barred_peers", [], 0)]
    assert snapshot.counts == [("path_probes", ["passed"], 1)]
    barring, opening = (record.getMessage() for record in caplog.records)
    assert "engine P at 10.0.0.1:5600" in barring
    assert "no_progress" in barring
    assert "works again, after 7.5 s" in opening
