"""Which engines may be read from, decided without sockets or clocks."""

from __future__ import annotations

from connector.metadata import ReadOutcome
from connector.peer_engines import (
    INCOMPATIBLE_FOR,
    MOST_FAILURES,
    MOST_OFFERS,
    UNREACHABLE_FOR,
    CannotRead,
    EngineMetadata,
    EngineUnreachable,
    MayRead,
    MetadataRequest,
    NotYet,
    PeerEngines,
)

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
    assert made.next_step(ASKED, 0, loaded=False) == NotYet(request=ASKED)
    made.on_metadata(ASKED, said(), 0, loaded=False)
    assert made.take_offer("P") == said()
    return made


def test_an_unknown_engine_is_asked_once_and_then_offered() -> None:
    made = PeerEngines()
    assert made.next_step(ASKED, 0, loaded=False) == NotYet(request=ASKED)
    assert made.next_step(ASKED, 0, loaded=False) == NotYet()
    made.on_metadata(ASKED, said(), 1, loaded=False)
    assert made.next_step(ASKED, 1, loaded=False) == MayRead()
    assert (made.address("P"), made.incarnation("P")) == (HERE, "first run")
    assert made.take_offer("P") == said()
    assert made.take_offer("P") is None
    assert made.next_step(ASKED, 1, loaded=True) == MayRead()


def test_a_known_engine_is_never_asked() -> None:
    made = acquainted()
    assert all(made.next_step(ASKED, now, loaded=True) == MayRead() for now in range(0, 10_000, 100))


def test_an_engine_that_vllm_has_dropped_is_asked_again() -> None:
    assert acquainted().next_step(ASKED, 4000, loaded=False) == NotYet(request=ASKED)


def test_an_address_that_was_silent_is_left_alone_for_a_while() -> None:
    made = PeerEngines()
    made.next_step(ASKED, 0, loaded=False)
    made.on_metadata(ASKED, EngineUnreachable("silence"), 5, loaded=False)
    assert made.next_step(ASKED, 5 + UNREACHABLE_FOR / 2, loaded=False) == SILENT
    other = MetadataRequest("Q", HERE, RANKS)
    assert made.next_step(other, 5, loaded=False) == NotYet(request=other)
    assert made.next_step(ASKED, 5 + UNREACHABLE_FOR, loaded=False) == NotYet(request=ASKED)


def test_failures_and_offers_are_bounded() -> None:
    made = PeerEngines()
    for port in range(3 * MOST_FAILURES):
        asked = MetadataRequest("P", ("h", port), RANKS)
        made.next_step(asked, 0, loaded=False)
        made.on_metadata(asked, EngineUnreachable("silence"), 0, loaded=False)
    assert len(made._failed) == MOST_FAILURES
    for number in range(3 * MOST_OFFERS):
        asked = MetadataRequest(str(number), HERE, RANKS)
        made.next_step(asked, 0, loaded=False)
        made.on_metadata(asked, said(), 0, loaded=False)
    assert len(made._offers) == MOST_OFFERS
    assert not made._requested


def test_after_a_lost_connection_the_same_run_goes_on() -> None:
    made = acquainted()
    made.on_lost([THERE])
    assert made.next_step(ASKED, 1, loaded=True) == MayRead()
    made.on_lost([HERE])
    assert made.next_step(ASKED, 1, loaded=True) == NotYet(request=ASKED)
    made.on_metadata(ASKED, said(), 1, loaded=True)
    assert made.next_step(ASKED, 1, loaded=True) == MayRead()
    assert made.take_offer("P") is None


def test_another_run_is_met_anew() -> None:
    made = acquainted()
    made.mark_stale(["P", "nobody"])
    assert made.next_step(ASKED, 1, loaded=True) == NotYet(request=ASKED)
    made.on_metadata(ASKED, said("second run"), 1, loaded=True)
    assert made.next_step(ASKED, 1, loaded=True) == NotYet(forget=True)
    made.on_forgotten("P")
    assert made.next_step(ASKED, 1, loaded=False) == MayRead()
    assert made.incarnation("P") == "second run"
    assert made.take_offer("P") == said("second run")
    assert made.next_step(ASKED, 1, loaded=True) == MayRead()


def test_a_lost_engine_that_does_not_answer_fails_its_reads_and_is_kept() -> None:
    made = acquainted()
    made.on_lost([HERE])
    made.next_step(ASKED, 1, loaded=True)
    made.on_metadata(ASKED, EngineUnreachable("silence"), 6, loaded=True)
    assert made.next_step(ASKED, 6, loaded=True) == SILENT
    assert made.next_step(ASKED, 6 + UNREACHABLE_FOR, loaded=True) == NotYet(request=ASKED)
    made.on_metadata(ASKED, said(), 9, loaded=True)
    assert made.next_step(ASKED, 9, loaded=True) == MayRead()


def test_a_ticket_from_elsewhere_is_refused_while_the_engine_is_where_it_was() -> None:
    made = acquainted()
    assert made.next_step(ELSEWHERE, 1, loaded=True) == NotYet(request=ASKED)
    assert made.next_step(ASKED, 1, loaded=True) == MayRead()
    made.on_metadata(ASKED, said(), 1, loaded=True)
    refused = made.next_step(ELSEWHERE, 1, loaded=True)
    assert isinstance(refused, CannotRead)
    assert refused.outcome is ReadOutcome.PEER_UNREACHABLE
    assert "10.0.0.1:5600" in refused.why
    assert made.next_step(ASKED, 1, loaded=True) == MayRead()


def test_an_engine_may_come_back_at_another_address() -> None:
    made = acquainted()
    made.next_step(ELSEWHERE, 1, loaded=True)
    made.on_metadata(ASKED, EngineUnreachable("refused"), 1, loaded=True)
    assert made.next_step(ELSEWHERE, 1, loaded=True) == NotYet(forget=True)
    made.on_forgotten("P")
    assert made.next_step(ELSEWHERE, 1, loaded=False) == NotYet(request=ELSEWHERE)
    made.on_metadata(ELSEWHERE, said("second run"), 1, loaded=False)
    assert made.next_step(ELSEWHERE, 1, loaded=False) == MayRead()
    assert made.address("P") == THERE


def test_ranks_that_the_engine_does_not_have_move_nobody() -> None:
    made = acquainted()
    made.on_lost([HERE])
    forged = MetadataRequest("P", HERE, tuple((0, rank) for rank in range(64)))
    made.next_step(ELSEWHERE, 1, loaded=True)
    assert made.next_step(forged, 1, loaded=True) == NotYet(request=forged)
    made.on_metadata(forged, EngineUnreachable("no such rank"), 1, loaded=True)
    assert isinstance(made.next_step(forged, 1, loaded=True), CannotRead)
    made.on_metadata(ASKED, said(), 1, loaded=True)
    assert made.next_step(ASKED, 1, loaded=True) == MayRead()


def test_of_two_addresses_that_claim_one_engine_the_first_has_it() -> None:
    made = PeerEngines()
    made.next_step(ASKED, 0, loaded=False)
    made.next_step(ELSEWHERE, 0, loaded=False)
    made.on_metadata(ASKED, said(), 1, loaded=False)
    made.on_metadata(ELSEWHERE, said("forged"), 1, loaded=False)
    assert made.next_step(ASKED, 1, loaded=False) == MayRead()
    assert made.take_offer("P") == said()
    assert made.address("P") == HERE


def test_what_vllm_refused_is_said_for_a_while_and_tried_again() -> None:
    made = acquainted()
    why = CannotRead(ReadOutcome.INCOMPATIBLE, "compatibility hash mismatch")
    made.on_handshake_failed("P", why, 1)
    made.on_handshake_failed("nobody", why, 1)
    assert made.failure(ASKED, 1) == why
    assert made.next_step(ASKED, 1 + INCOMPATIBLE_FOR / 2, loaded=False) == why
    assert made.next_step(ASKED, 1 + INCOMPATIBLE_FOR, loaded=False) == NotYet(request=ASKED)
