"""Which prefill engines one rank may read from, and what has to happen first. Pure: time is passed in.

    ticket of an unknown engine ──► introduction asked for ──► offered to vLLM's handshake ──► read
                                        └► unreachable: its reads fail, and further ones for a short while
    an engine's connection was lost, or a read from it failed ──► doubted: asked again before the next read
        same run of the node    ──► read
        another run of it       ──► what vLLM holds of the engine is forgotten, the new run is offered ──► read
    a ticket that names another address than the engine is known at ──► the known address is asked
        it answers as before    ──► refused: two nodes with one engine id, or a forged ticket
        it does not             ──► forgotten, and the other address is asked

Reads from an engine that is known and not doubted never wait. `loaded` below: vLLM has agents of the engine, or its
handshake is under way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from connector.metadata import ReadOutcome
from connector.peers import Address
from connector.verifier import EngineMetadata, EngineUnreachable, MetadataRequest, Rank

UNREACHABLE_FOR = 0.1
"""Seconds for which an address that could not be reached is not asked again: enough for a flood of tickets to cost one
dial, and too short for a node that was only slow to be passed over."""
INCOMPATIBLE_FOR = 10.0
MOST_FAILURES = 1024
MOST_OFFERS = 64
MOST_KNOWN = 4096


@dataclass(frozen=True, slots=True)
class MayRead:
    """vLLM may be given the read."""


@dataclass(frozen=True, slots=True)
class NotYet:
    """Not yet; `ask`: first ask for this introduction, `forget`: first have vLLM forget the engine."""

    ask: MetadataRequest | None = None
    forget: bool = False


@dataclass(frozen=True, slots=True)
class CannotRead:
    """No read from there; `why` is for the log."""

    outcome: ReadOutcome
    why: str


@dataclass(slots=True)
class _Known:
    address: Address
    incarnation: str
    ranks: tuple[Rank, ...]
    doubted: bool = False
    stale: bool = False
    rivals: set[MetadataRequest] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Offer:
    asked: MetadataRequest
    introduction: EngineMetadata


class PeerEngines:
    """For the engine's thread, but for `take`, which is for vLLM's handshake thread."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._offers: OrderedDict[str, _Offer] = OrderedDict()
        self._asked: set[MetadataRequest] = set()
        self._failed: OrderedDict[MetadataRequest, tuple[float, CannotRead]] = OrderedDict()

    def way(self, asked: MetadataRequest, now: float, *, loaded: bool) -> MayRead | NotYet | CannotRead:
        """What is next for a read from this engine at this address."""
        failure = self.failure(asked, now)
        if failure is not None:
            return failure
        known = self._known.get(asked.engine_id)
        if not loaded:
            offer = self._offers.get(asked.engine_id)
            if offer is None or offer.asked != asked:
                return self._ask(asked)
            self._know(asked.engine_id, offer)
            return MayRead()
        if known is None:
            return MayRead()
        if known.stale:
            return NotYet(forget=True)
        if known.address != asked.address:
            known.rivals.add(asked)
            return self._ask(MetadataRequest(asked.engine_id, known.address, known.ranks))
        return self._ask(asked) if known.doubted else MayRead()

    def settle(
        self, asked: MetadataRequest, how: EngineMetadata | EngineUnreachable, now: float, *, loaded: bool
    ) -> None:
        """An introduction has come, or never will."""
        self._asked.discard(asked)
        known = self._known.get(asked.engine_id)
        theirs = known is not None and loaded and known.address == asked.address
        if isinstance(how, EngineUnreachable):
            self._fail(asked, CannotRead(ReadOutcome.PEER_UNREACHABLE, how.why), now + UNREACHABLE_FOR)
            if known is not None and theirs:
                known.stale = known.stale or (bool(known.rivals) and asked.ranks == known.ranks)
        elif known is not None and theirs and known.incarnation == how.incarnation:
            self._confirm(known, now)
        elif known is not None and theirs:
            self._offer(asked, how)
            known.stale = True
        elif not loaded:
            self._offer(asked, how)
            self.forgotten(asked.engine_id)

    def failure(self, asked: MetadataRequest, now: float) -> CannotRead | None:
        """Why no read from there was possible, a short while ago."""
        until, failure = self._failed.get(asked, (now, None))
        return failure if now < until else None

    def take(self, engine_id: str) -> EngineMetadata | None:
        """What vLLM's handshake is to be made of; once."""
        offer = self._offers.pop(engine_id, None)
        return None if offer is None else offer.introduction

    def forgotten(self, engine_id: str) -> None:
        """vLLM holds nothing of the engine any more."""
        self._known.pop(engine_id, None)
        offer = self._offers.get(engine_id)
        if offer is not None:
            self._know(engine_id, offer)

    def refused(self, engine_id: str, failure: CannotRead, now: float) -> None:
        """vLLM's handshake with the engine failed, on what it said of itself."""
        known = self._known.pop(engine_id, None)
        if known is not None:
            self._fail(MetadataRequest(engine_id, known.address, known.ranks), failure, now + INCOMPATIBLE_FOR)

    def doubt(self, engine_ids: Iterable[str]) -> None:
        """A read from these engines failed."""
        for engine_id in engine_ids:
            if engine_id in self._known:
                self._known[engine_id].doubted = True

    def lost(self, addresses: Iterable[Address]) -> None:
        """The connections to these addresses have gone."""
        gone = set(addresses)
        self.doubt([engine_id for engine_id, known in self._known.items() if known.address in gone] if gone else ())

    def address(self, engine_id: str) -> Address | None:
        """Where the engine that vLLM has agents of answers; None where nothing is known of it."""
        known = self._known.get(engine_id)
        return None if known is None else known.address

    def incarnation(self, engine_id: str) -> str:
        """Which run of it they are of; empty where nothing is known of it."""
        known = self._known.get(engine_id)
        return "" if known is None else known.incarnation

    def _ask(self, asked: MetadataRequest) -> NotYet:
        if asked in self._asked:
            return NotYet()
        self._asked.add(asked)
        return NotYet(ask=asked)

    def _confirm(self, known: _Known, now: float) -> None:
        host, port = known.address
        failure = CannotRead(ReadOutcome.PEER_UNREACHABLE, f"the engine answers at {host}:{port}, where it is known")
        for rival in known.rivals:
            self._fail(rival, failure, now + UNREACHABLE_FOR)
        known.rivals.clear()
        known.doubted = False

    def _offer(self, asked: MetadataRequest, introduction: EngineMetadata) -> None:
        """The first of two addresses that claim one engine wins, until vLLM has taken what it offers."""
        offered = self._offers.get(asked.engine_id)
        if offered is not None and offered.asked.address != asked.address:
            return
        self._offers[asked.engine_id] = _Offer(asked, introduction)
        if len(self._offers) > MOST_OFFERS:
            self._offers.popitem(last=False)

    def _know(self, engine_id: str, offer: _Offer) -> None:
        self._known[engine_id] = _Known(offer.asked.address, offer.introduction.incarnation, offer.asked.ranks)
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

    def _fail(self, asked: MetadataRequest, failure: CannotRead, until: float) -> None:
        self._failed[asked] = (until, failure)
        self._failed.move_to_end(asked)
        if len(self._failed) > MOST_FAILURES:
            self._failed.popitem(last=False)
