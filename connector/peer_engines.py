"""Which prefill engines one rank may read from, and what has to happen first. Pure: time is passed in.

    ticket of an unknown engine ──► metadata requested ──► offered to vLLM's handshake ──► read
                                        └► unreachable: its reads fail, and further ones for a short while
    a transfer from it ended in an error ──► broken: vLLM forgets it, and a new handshake is made. NIXL never mends a
        connection that broke, so that every later read on it would fail
    its side channel's connection was lost, or a read failed ──► stale: metadata is requested before the next read
        same run of the node    ──► read
        another run of it       ──► what vLLM holds of the engine is forgotten, the new run is offered ──► read
    a ticket that names another address than the engine is known at ──► metadata is requested at the known address
        it answers as before    ──► refused: two nodes with one engine id, or a forged ticket
        it does not             ──► forgotten, and metadata is requested at the other address

Reads from an engine that is known and not stale never wait. `loaded` below: vLLM has agents of the engine, or its
handshake is under way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .counters import ReadOutcome
from .peers import Address

Rank = tuple[int, int]
"""Pipeline rank, tensor rank."""

MOST_RANKS = 256
"""Workers of a prefill node that one of ours may have to read from."""
UNREACHABLE_FOR = 0.1
"""Seconds for which an address that could not be reached is not asked again: enough for a flood of tickets to cost one
dial, and too short for a node that was only slow to be passed over."""
INCOMPATIBLE_FOR = 10.0
MOST_FAILURES = 1024
MOST_OFFERS = 64
MOST_KNOWN = 4096


@dataclass(frozen=True, slots=True)
class MetadataRequest:
    """Which workers of which engine, where."""

    engine_id: str
    address: Address
    ranks: tuple[Rank, ...]


@dataclass(frozen=True, slots=True)
class EngineMetadata:
    """An engine's answer: msgpack of vLLM's `NixlHandshakePayload` by rank, all from one run of the node."""

    incarnation: str
    payloads: Mapping[Rank, bytes]


@dataclass(frozen=True, slots=True)
class EngineUnreachable:
    """Nothing usable came; `why` continues "The prefill node cannot be reached: "."""

    why: str


@dataclass(frozen=True, slots=True)
class MayRead:
    """vLLM may be given the read."""


@dataclass(frozen=True, slots=True)
class NotYet:
    """Not yet. First send `request`, where there is one; where `forget`, first have vLLM forget the engine."""

    request: MetadataRequest | None = None
    forget: bool = False


@dataclass(frozen=True, slots=True)
class CannotRead:
    """No read from there; `why` is for the log."""

    outcome: ReadOutcome
    why: str


@dataclass(slots=True)
class _Known:
    """An engine that vLLM has agents of. `stale`: its metadata must be requested again before it is read.

    `replaced`: its connection broke, or another run of it is known of: vLLM must forget this one. `rivals`: requests
    that named another address.
    """

    address: Address
    incarnation: str
    ranks: tuple[Rank, ...]
    stale: bool = False
    replaced: bool = False
    rivals: set[MetadataRequest] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Offer:
    request: MetadataRequest
    metadata: EngineMetadata


class PeerEngines:
    """For the engine's thread, but for `take_offer`, which is for vLLM's handshake thread."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._offers: OrderedDict[str, _Offer] = OrderedDict()
        self._requested: set[MetadataRequest] = set()
        self._failed: OrderedDict[MetadataRequest, tuple[float, CannotRead]] = OrderedDict()

    def next_step(self, request: MetadataRequest, now: float, *, loaded: bool) -> MayRead | NotYet | CannotRead:
        """The next step before a read from this engine at this address."""
        failure = self.failure(request, now)
        if failure is not None:
            return failure
        known = self._known.get(request.engine_id)
        if not loaded:
            offer = self._offers.get(request.engine_id)
            if offer is None or offer.request != request:
                return self._request(request)
            self._add(request.engine_id, offer)
            return MayRead()
        if known is None:
            return MayRead()
        if known.replaced:
            return NotYet(forget=True)
        if known.address != request.address:
            known.rivals.add(request)
            return self._request(MetadataRequest(request.engine_id, known.address, known.ranks))
        return self._request(request) if known.stale else MayRead()

    def on_metadata(
        self, request: MetadataRequest, result: EngineMetadata | EngineUnreachable, now: float, *, loaded: bool
    ) -> None:
        """The metadata has come, or never will."""
        self._requested.discard(request)
        known = self._known.get(request.engine_id)
        if known is not None and not (loaded and known.address == request.address):
            known = None
        if isinstance(result, EngineUnreachable):
            self._fail(request, CannotRead(ReadOutcome.PEER_UNREACHABLE, result.why), now + UNREACHABLE_FOR)
            if known is not None and known.rivals and request.ranks == known.ranks:
                known.replaced = True
        elif known is not None and known.incarnation == result.incarnation:
            self._confirm(known, now)
        elif known is not None:
            self._offer(request, result)
            known.replaced = True
        elif not loaded:
            self._offer(request, result)
            self.on_forgotten(request.engine_id)

    def failure(self, request: MetadataRequest, now: float) -> CannotRead | None:
        """Why no read from there was possible, a short while ago."""
        until, failure = self._failed.get(request, (now, None))
        return failure if now < until else None

    def take_offer(self, engine_id: str) -> EngineMetadata | None:
        """The metadata for vLLM's handshake; once."""
        offer = self._offers.pop(engine_id, None)
        return None if offer is None else offer.metadata

    def on_forgotten(self, engine_id: str) -> None:
        """vLLM holds nothing of the engine any more."""
        self._known.pop(engine_id, None)
        offer = self._offers.get(engine_id)
        if offer is not None:
            self._add(engine_id, offer)

    def on_handshake_failed(self, engine_id: str, failure: CannotRead, now: float) -> None:
        """vLLM's handshake with the engine failed, on the engine's own metadata."""
        known = self._known.pop(engine_id, None)
        if known is not None:
            incompatible = failure.outcome is ReadOutcome.INCOMPATIBLE
            until = now + (INCOMPATIBLE_FOR if incompatible else UNREACHABLE_FOR)
            self._fail(MetadataRequest(engine_id, known.address, known.ranks), failure, until)

    def mark_stale(self, engine_ids: Iterable[str]) -> None:
        """A read from these engines failed."""
        for engine_id in engine_ids:
            if engine_id in self._known:
                self._known[engine_id].stale = True

    def mark_broken(self, engine_ids: Iterable[str]) -> None:
        """A transfer from these engines ended in an error: their connections are of no use any more."""
        for engine_id in engine_ids:
            if engine_id in self._known:
                self._known[engine_id].replaced = True

    def on_lost(self, addresses: Iterable[Address]) -> None:
        """The connections to these addresses have gone."""
        gone = set(addresses)
        self.mark_stale([name for name, known in self._known.items() if known.address in gone] if gone else ())

    def address(self, engine_id: str) -> Address | None:
        """Where the engine that vLLM has agents of answers; None where nothing is known of it."""
        known = self._known.get(engine_id)
        return None if known is None else known.address

    def incarnation(self, engine_id: str) -> str:
        """Which run of it vLLM's agents are of; empty where nothing is known of it."""
        known = self._known.get(engine_id)
        return "" if known is None else known.incarnation

    def _request(self, request: MetadataRequest) -> NotYet:
        if request in self._requested:
            return NotYet()
        self._requested.add(request)
        return NotYet(request)

    def _confirm(self, known: _Known, now: float) -> None:
        host, port = known.address
        failure = CannotRead(ReadOutcome.PEER_UNREACHABLE, f"the engine answers at {host}:{port}, where it is known")
        for rival in known.rivals:
            self._fail(rival, failure, now + UNREACHABLE_FOR)
        known.rivals.clear()
        known.stale = False

    def _offer(self, request: MetadataRequest, metadata: EngineMetadata) -> None:
        """The first of two addresses that claim one engine wins, until vLLM has taken what it offers."""
        offered = self._offers.get(request.engine_id)
        if offered is not None and offered.request.address != request.address:
            return
        self._offers[request.engine_id] = _Offer(request, metadata)
        if len(self._offers) > MOST_OFFERS:
            self._offers.popitem(last=False)

    def _add(self, engine_id: str, offer: _Offer) -> None:
        self._known[engine_id] = _Known(offer.request.address, offer.metadata.incarnation, offer.request.ranks)
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

    def _fail(self, request: MetadataRequest, failure: CannotRead, until: float) -> None:
        self._failed[request] = (until, failure)
        self._failed.move_to_end(request)
        if len(self._failed) > MOST_FAILURES:
            self._failed.popitem(last=False)
