"""Which engines may be read from, decided without sockets or clocks."""

from __future__ import annotations

from connector.metadata import ReadOutcome
from connector.peer_engines import (
    INCOMPATIBLE_FOR,
    MOST_FAILURES,
    MOST_OFFERS,
    UNREACHABLE_FOR,
    CannotRead,
    MayRead,
    NotYet,
    PeerEngines,
)
from connector.verifier import EngineMetadata, EngineUnreachable, MetadataRequest

HERE, THERE = ("10.0.0.1", 5600), ("10.0.0.2", 5600)
RANKS = ((0, 0),)
ASKED = MetadataRequest("P", HERE, RANKS)
ELSEWHERE = MetadataRequest("P", THERE, RANKS)
SILENT = CannotRead(ReadOutcome.PEER_UNREACHABLE, "silence")


def said(run: str = "first run") -> EngineMetadata:
    return EngineMetadata(run, {(0, 0): run.encode()})


def acquainted() -> PeerEngines:
    """With the engine at HERE, whose handshake vLLM has made."""
    made = PeerEngines()
    assert made.way(ASKED, 0, loaded=False) == NotYet(ask=ASKED)
    made.settle(ASKED, said(), 0, loaded=False)
    assert made.take("P") == said()
    return made


def test_an_unknown_engine_is_asked_once_and_then_offered() -> None:
    made = PeerEngines()
    assert made.way(ASKED, 0, loaded=False) == NotYet(ask=ASKED)
    assert made.way(ASKED, 0, loaded=False) == NotYet()
    made.settle(ASKED, said(), 1, loaded=False)
    assert made.way(ASKED, 1, loaded=False) == MayRead()
    assert (made.address("P"), made.incarnation("P")) == (HERE, "first run")
    assert made.take("P") == said()
    assert made.take("P") is None
    assert made.way(ASKED, 1, loaded=True) == MayRead()


def test_a_known_engine_is_never_asked() -> None:
    made = acquainted()
    assert all(made.way(ASKED, now, loaded=True) == MayRead() for now in range(0, 10_000, 100))


def test_an_engine_that_vllm_has_dropped_is_asked_again() -> None:
    assert acquainted().way(ASKED, 4000, loaded=False) == NotYet(ask=ASKED)


def test_an_address_that_was_silent_is_left_alone_for_a_while() -> None:
    made = PeerEngines()
    made.way(ASKED, 0, loaded=False)
    made.settle(ASKED, EngineUnreachable("silence"), 5, loaded=False)
    assert made.way(ASKED, 5 + UNREACHABLE_FOR / 2, loaded=False) == SILENT
    other = MetadataRequest("Q", HERE, RANKS)
    assert made.way(other, 5, loaded=False) == NotYet(ask=other)
    assert made.way(ASKED, 5 + UNREACHABLE_FOR, loaded=False) == NotYet(ask=ASKED)


def test_failures_and_offers_are_bounded() -> None:
    made = PeerEngines()
    for port in range(3 * MOST_FAILURES):
        asked = MetadataRequest("P", ("h", port), RANKS)
        made.way(asked, 0, loaded=False)
        made.settle(asked, EngineUnreachable("silence"), 0, loaded=False)
    assert len(made._failed) == MOST_FAILURES
    for number in range(3 * MOST_OFFERS):
        asked = MetadataRequest(str(number), HERE, RANKS)
        made.way(asked, 0, loaded=False)
        made.settle(asked, said(), 0, loaded=False)
    assert len(made._offers) == MOST_OFFERS
    assert not made._asked


def test_after_a_lost_connection_the_same_run_goes_on() -> None:
    made = acquainted()
    made.lost([THERE])
    assert made.way(ASKED, 1, loaded=True) == MayRead()
    made.lost([HERE])
    assert made.way(ASKED, 1, loaded=True) == NotYet(ask=ASKED)
    made.settle(ASKED, said(), 1, loaded=True)
    assert made.way(ASKED, 1, loaded=True) == MayRead()
    assert made.take("P") is None


def test_another_run_is_met_anew() -> None:
    made = acquainted()
    made.doubt(["P", "nobody"])
    assert made.way(ASKED, 1, loaded=True) == NotYet(ask=ASKED)
    made.settle(ASKED, said("second run"), 1, loaded=True)
    assert made.way(ASKED, 1, loaded=True) == NotYet(forget=True)
    made.forgotten("P")
    assert made.way(ASKED, 1, loaded=False) == MayRead()
    assert made.incarnation("P") == "second run"
    assert made.take("P") == said("second run")
    assert made.way(ASKED, 1, loaded=True) == MayRead()


def test_a_lost_engine_that_does_not_answer_fails_its_reads_and_is_kept() -> None:
    made = acquainted()
    made.lost([HERE])
    made.way(ASKED, 1, loaded=True)
    made.settle(ASKED, EngineUnreachable("silence"), 6, loaded=True)
    assert made.way(ASKED, 6, loaded=True) == SILENT
    assert made.way(ASKED, 6 + UNREACHABLE_FOR, loaded=True) == NotYet(ask=ASKED)
    made.settle(ASKED, said(), 9, loaded=True)
    assert made.way(ASKED, 9, loaded=True) == MayRead()


def test_a_ticket_from_elsewhere_is_refused_while_the_engine_is_where_it_was() -> None:
    made = acquainted()
    assert made.way(ELSEWHERE, 1, loaded=True) == NotYet(ask=ASKED)
    assert made.way(ASKED, 1, loaded=True) == MayRead()
    made.settle(ASKED, said(), 1, loaded=True)
    refused = made.way(ELSEWHERE, 1, loaded=True)
    assert isinstance(refused, CannotRead)
    assert refused.outcome is ReadOutcome.PEER_UNREACHABLE
    assert "10.0.0.1:5600" in refused.why
    assert made.way(ASKED, 1, loaded=True) == MayRead()


def test_an_engine_may_come_back_at_another_address() -> None:
    made = acquainted()
    made.way(ELSEWHERE, 1, loaded=True)
    made.settle(ASKED, EngineUnreachable("refused"), 1, loaded=True)
    assert made.way(ELSEWHERE, 1, loaded=True) == NotYet(forget=True)
    made.forgotten("P")
    assert made.way(ELSEWHERE, 1, loaded=False) == NotYet(ask=ELSEWHERE)
    made.settle(ELSEWHERE, said("second run"), 1, loaded=False)
    assert made.way(ELSEWHERE, 1, loaded=False) == MayRead()
    assert made.address("P") == THERE


def test_ranks_that_the_engine_does_not_have_move_nobody() -> None:
    made = acquainted()
    made.lost([HERE])
    forged = MetadataRequest("P", HERE, tuple((0, rank) for rank in range(64)))
    made.way(ELSEWHERE, 1, loaded=True)
    assert made.way(forged, 1, loaded=True) == NotYet(ask=forged)
    made.settle(forged, EngineUnreachable("no such rank"), 1, loaded=True)
    assert isinstance(made.way(forged, 1, loaded=True), CannotRead)
    made.settle(ASKED, said(), 1, loaded=True)
    assert made.way(ASKED, 1, loaded=True) == MayRead()


def test_of_two_addresses_that_claim_one_engine_the_first_has_it() -> None:
    made = PeerEngines()
    made.way(ASKED, 0, loaded=False)
    made.way(ELSEWHERE, 0, loaded=False)
    made.settle(ASKED, said(), 1, loaded=False)
    made.settle(ELSEWHERE, said("forged"), 1, loaded=False)
    assert made.way(ASKED, 1, loaded=False) == MayRead()
    assert made.take("P") == said()
    assert made.address("P") == HERE


def test_what_vllm_refused_is_said_for_a_while_and_tried_again() -> None:
    made = acquainted()
    why = CannotRead(ReadOutcome.INCOMPATIBLE, "compatibility hash mismatch")
    made.refused("P", why, 1)
    made.refused("nobody", why, 1)
    assert made.failure(ASKED, 1) == why
    assert made.way(ASKED, 1 + INCOMPATIBLE_FOR / 2, loaded=False) == why
    assert made.way(ASKED, 1 + INCOMPATIBLE_FOR, loaded=False) == NotYet(ask=ASKED)
