"""Which engines may be read from, decided without sockets or clocks."""

from __future__ import annotations

from connector.counters import ReadOutcome
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
REQUEST = MetadataRequest("P", HERE, RANKS)
ELSEWHERE = MetadataRequest("P", THERE, RANKS)
SILENT = CannotRead(ReadOutcome.PEER_UNREACHABLE, "silence")


def metadata(run: str = "first run") -> EngineMetadata:
    return EngineMetadata(run, {(0, 0): run.encode()})


def with_handshake() -> PeerEngines:
    """With the engine at HERE, whose handshake vLLM has engines."""
    engines = PeerEngines()
    assert engines.next_step(REQUEST, 0, loaded=False) == NotYet(request=REQUEST)
    engines.on_metadata(REQUEST, metadata(), 0, loaded=False)
    assert engines.take_offer("P") == metadata()
    return engines


def test_an_unknown_engine_is_asked_once_and_then_offered() -> None:
    engines = PeerEngines()
    assert engines.next_step(REQUEST, 0, loaded=False) == NotYet(request=REQUEST)
    assert engines.next_step(REQUEST, 0, loaded=False) == NotYet()
    engines.on_metadata(REQUEST, metadata(), 1, loaded=False)
    assert engines.next_step(REQUEST, 1, loaded=False) == MayRead()
    assert (engines.address("P"), engines.incarnation("P")) == (HERE, "first run")
    assert engines.take_offer("P") == metadata()
    assert engines.take_offer("P") is None
    assert engines.next_step(REQUEST, 1, loaded=True) == MayRead()


def test_a_known_engine_is_never_asked() -> None:
    engines = with_handshake()
    assert all(engines.next_step(REQUEST, now, loaded=True) == MayRead() for now in range(0, 10_000, 100))


def test_an_engine_that_vllm_has_dropped_is_asked_again() -> None:
    assert with_handshake().next_step(REQUEST, 4000, loaded=False) == NotYet(request=REQUEST)


def test_an_address_that_was_silent_is_left_alone_for_a_while() -> None:
    engines = PeerEngines()
    engines.next_step(REQUEST, 0, loaded=False)
    engines.on_metadata(REQUEST, EngineUnreachable("silence"), 5, loaded=False)
    assert engines.next_step(REQUEST, 5 + UNREACHABLE_FOR / 2, loaded=False) == SILENT
    other = MetadataRequest("Q", HERE, RANKS)
    assert engines.next_step(other, 5, loaded=False) == NotYet(request=other)
    assert engines.next_step(REQUEST, 5 + UNREACHABLE_FOR, loaded=False) == NotYet(request=REQUEST)


def test_failures_and_offers_are_bounded() -> None:
    engines = PeerEngines()
    for port in range(3 * MOST_FAILURES):
        request = MetadataRequest("P", ("h", port), RANKS)
        engines.next_step(request, 0, loaded=False)
        engines.on_metadata(request, EngineUnreachable("silence"), 0, loaded=False)
    assert len(engines._failed) == MOST_FAILURES
    for number in range(3 * MOST_OFFERS):
        request = MetadataRequest(str(number), HERE, RANKS)
        engines.next_step(request, 0, loaded=False)
        engines.on_metadata(request, metadata(), 0, loaded=False)
    assert len(engines._offers) == MOST_OFFERS
    assert not engines._requested


def test_after_a_lost_connection_the_same_run_goes_on() -> None:
    engines = with_handshake()
    engines.on_lost([THERE])
    assert engines.next_step(REQUEST, 1, loaded=True) == MayRead()
    engines.on_lost([HERE])
    assert engines.next_step(REQUEST, 1, loaded=True) == NotYet(request=REQUEST)
    engines.on_metadata(REQUEST, metadata(), 1, loaded=True)
    assert engines.next_step(REQUEST, 1, loaded=True) == MayRead()
    assert engines.take_offer("P") is None


def test_another_run_needs_a_new_handshake() -> None:
    engines = with_handshake()
    engines.mark_stale(["P", "nobody"])
    assert engines.next_step(REQUEST, 1, loaded=True) == NotYet(request=REQUEST)
    engines.on_metadata(REQUEST, metadata("second run"), 1, loaded=True)
    assert engines.next_step(REQUEST, 1, loaded=True) == NotYet(forget=True)
    engines.on_forgotten("P")
    assert engines.next_step(REQUEST, 1, loaded=False) == MayRead()
    assert engines.incarnation("P") == "second run"
    assert engines.take_offer("P") == metadata("second run")
    assert engines.next_step(REQUEST, 1, loaded=True) == MayRead()


def test_a_lost_engine_that_does_not_answer_fails_its_reads_and_is_kept() -> None:
    engines = with_handshake()
    engines.on_lost([HERE])
    engines.next_step(REQUEST, 1, loaded=True)
    engines.on_metadata(REQUEST, EngineUnreachable("silence"), 6, loaded=True)
    assert engines.next_step(REQUEST, 6, loaded=True) == SILENT
    assert engines.next_step(REQUEST, 6 + UNREACHABLE_FOR, loaded=True) == NotYet(request=REQUEST)
    engines.on_metadata(REQUEST, metadata(), 9, loaded=True)
    assert engines.next_step(REQUEST, 9, loaded=True) == MayRead()


def test_a_ticket_from_elsewhere_is_refused_while_the_engine_is_where_it_was() -> None:
    engines = with_handshake()
    assert engines.next_step(ELSEWHERE, 1, loaded=True) == NotYet(request=REQUEST)
    assert engines.next_step(REQUEST, 1, loaded=True) == MayRead()
    engines.on_metadata(REQUEST, metadata(), 1, loaded=True)
    refused = engines.next_step(ELSEWHERE, 1, loaded=True)
    assert isinstance(refused, CannotRead)
    assert refused.outcome is ReadOutcome.PEER_UNREACHABLE
    assert "10.0.0.1:5600" in refused.why
    assert engines.next_step(REQUEST, 1, loaded=True) == MayRead()


def test_an_engine_may_come_back_at_another_address() -> None:
    engines = with_handshake()
    engines.next_step(ELSEWHERE, 1, loaded=True)
    engines.on_metadata(REQUEST, EngineUnreachable("refused"), 1, loaded=True)
    assert engines.next_step(ELSEWHERE, 1, loaded=True) == NotYet(forget=True)
    engines.on_forgotten("P")
    assert engines.next_step(ELSEWHERE, 1, loaded=False) == NotYet(request=ELSEWHERE)
    engines.on_metadata(ELSEWHERE, metadata("second run"), 1, loaded=False)
    assert engines.next_step(ELSEWHERE, 1, loaded=False) == MayRead()
    assert engines.address("P") == THERE


def test_ranks_that_the_engine_does_not_have_change_nothing() -> None:
    engines = with_handshake()
    engines.on_lost([HERE])
    forged = MetadataRequest("P", HERE, tuple((0, rank) for rank in range(64)))
    engines.next_step(ELSEWHERE, 1, loaded=True)
    assert engines.next_step(forged, 1, loaded=True) == NotYet(request=forged)
    engines.on_metadata(forged, EngineUnreachable("no such rank"), 1, loaded=True)
    assert isinstance(engines.next_step(forged, 1, loaded=True), CannotRead)
    engines.on_metadata(REQUEST, metadata(), 1, loaded=True)
    assert engines.next_step(REQUEST, 1, loaded=True) == MayRead()


def test_of_two_addresses_that_claim_one_engine_the_first_has_it() -> None:
    engines = PeerEngines()
    engines.next_step(REQUEST, 0, loaded=False)
    engines.next_step(ELSEWHERE, 0, loaded=False)
    engines.on_metadata(REQUEST, metadata(), 1, loaded=False)
    engines.on_metadata(ELSEWHERE, metadata("forged"), 1, loaded=False)
    assert engines.next_step(REQUEST, 1, loaded=False) == MayRead()
    assert engines.take_offer("P") == metadata()
    assert engines.address("P") == HERE


def test_a_failed_handshake_is_remembered_for_a_while_and_tried_again() -> None:
    engines = with_handshake()
    why = CannotRead(ReadOutcome.INCOMPATIBLE, "compatibility hash mismatch")
    engines.on_handshake_failed("P", why, 1)
    engines.on_handshake_failed("nobody", why, 1)
    assert engines.failure(REQUEST, 1) == why
    assert engines.next_step(REQUEST, 1 + INCOMPATIBLE_FOR / 2, loaded=False) == why
    assert engines.next_step(REQUEST, 1 + INCOMPATIBLE_FOR, loaded=False) == NotYet(request=REQUEST)
