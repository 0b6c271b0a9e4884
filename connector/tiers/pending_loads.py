"""Which child loads a request's prefix, and every load that is running; in the scheduler's process. Pure: times are
passed in, monotonic seconds.

`choose` picks one of the children's offers. An offer is worth the prompt tokens that need not be computed because of
it, times the child's `load_weight`. That is counted from the *shared* hit, the boundary at which every local cache
group agrees: without a load the node resumes there. An offer that builds on a deeper local hit, of attention alone,
makes that hit usable by bringing the state, and so is worth it too: with attention cached up to 96, state nowhere, and
a ticket up to 131, it saves 131 tokens, not 35.

`PendingLoads` has every request that children are asked for, and every running load. `LoadDeadlines` ends loads from a
tier that take too long:

    begun ──► overdue: the workers are told ──► ended in time after all
                                            └── given up: its request computes; its blocks stay out of the pool
                                                └── drained: the load has ended on every rank, the blocks go back

A tier's load cannot be cancelled, so it may write into the blocks for as long as it runs, whatever became of the
request. Nothing else is loaded for a request whose load was given up: two loads under one id could not be told apart.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..decode_reads import Quarantine
from .stats import SelectionCounters


@dataclass(frozen=True, slots=True)
class Offer:
    """A child's answer to how much it can load.

    `base`: the local hit, in tokens, that it was given and builds on. `tokens`: how many it would load beyond that;
    0 for none, None while it is still looking.
    """

    child: int
    base: int
    tokens: int | None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class LoadFrom:
    """This offer wins."""

    offer: Offer


@dataclass(frozen=True, slots=True)
class AskAgain:
    """A child that has not decided could still win: ask again."""


@dataclass(frozen=True, slots=True)
class ComputeHere:
    """No child has anything worth loading."""


Choice = LoadFrom | AskAgain | ComputeHere


def choose(offers: Sequence[Offer], *, shared: int, prompt: int, late: bool) -> Choice:
    """The best offer; of two that are worth the same, the child's that is listed first.

    `shared`, `prompt`: tokens of the shared hit and of the whole request. `late`: the deadline for children that have
    not decided is over; they count as having nothing. Before it they are waited for only while they could win.
    """
    best: Offer | None = None
    for offer in offers:
        if worth(offer, shared) > (0.0 if best is None else worth(best, shared)):
            best = offer
    undecided = [offer for offer in offers if offer.tokens is None and not late]
    if any(_may_beat(offer, best, shared, prompt) for offer in undecided):
        return AskAgain()
    return ComputeHere() if best is None else LoadFrom(best)


def worth(offer: Offer, shared: int) -> float:
    """Weighted tokens that an offer saves; 0 for an offer that has nothing, or is undecided."""
    if not offer.tokens or offer.tokens < 0:
        return 0.0
    return max(0, offer.base + offer.tokens - shared) * offer.weight


def _may_beat(undecided: Offer, best: Offer | None, shared: int, prompt: int) -> bool:
    # One that builds on a hit of the whole prompt has nothing left to load.
    most = max(0, prompt - shared) * undecided.weight if undecided.base < prompt else 0.0
    if best is None:
        return most > 0
    return (most, -undecided.child) > (worth(best, shared), -best.child)


def bounded_offer(tokens: int | None, *, base: int, prompt: int) -> int | None:
    """A child's answer, with a negative number, or more tokens than the prompt has left, replaced by 0.

    vLLM's scheduler asserts on both, which would end the engine. An answer that is too large is not truncated: there
    would be no state to resume from at that point.
    """
    if tokens is None:
        return None
    return tokens if 0 < tokens <= prompt - base else 0


@dataclass(frozen=True, slots=True)
class ChildLoad:
    """A child loads a request's prefix into these blocks, by KV-cache group. Pickled to the workers."""

    child: int
    blocks: tuple[tuple[int, ...], ...]

    def touches(self, blocks: Collection[int]) -> bool:
        """Whether any of `blocks` is one of this load's. Block ids must be unique over the groups."""
        return any(block in blocks for group in self.blocks for block in group)


@dataclass(slots=True)
class _WaitingRequest:
    """A request that was not admitted yet. `barred`: children whose load of it has failed."""

    since: float | None = None
    offers: tuple[Offer, ...] = ()
    chosen: Offer | None = None
    asynchronous: bool = False
    barred: set[int] = field(default_factory=set)


class PendingLoads:
    """Requests that wait for admission, and running loads. `names`: the children's."""

    def __init__(self, names: Sequence[str], counters: SelectionCounters) -> None:
        self._names = tuple(names)
        self._counters = counters
        self._waiting: dict[str, _WaitingRequest] = {}
        self._loads: dict[str, ChildLoad] = {}
        self._given_up: set[str] = set()
        self._ended_requests: set[str] = set()
        self._new: dict[str, ChildLoad] = {}

    def __len__(self) -> int:
        """How many requests have an entry here."""
        return len(self._waiting.keys() | self._loads.keys())

    def waited(self, request_id: str, now: float) -> float:
        """Seconds since the children were first asked for this admission of the request; 0 at the first call."""
        waiting = self._waiting.setdefault(request_id, _WaitingRequest())
        waiting.since = now if waiting.since is None else waiting.since
        return now - waiting.since

    def barred(self, request_id: str) -> frozenset[int]:
        """Children that failed to load this request: they would offer the same."""
        waiting = self._waiting.get(request_id)
        return frozenset() if waiting is None else frozenset(waiting.barred)

    def record_choice(
        self, request_id: str, offers: Sequence[Offer], chosen: Offer | None, *, asynchronous: bool
    ) -> None:
        """The children's offers, and the chosen one; counted only when the scheduler admits the request."""
        waiting = self._waiting.setdefault(request_id, _WaitingRequest())
        waiting.offers, waiting.chosen, waiting.asynchronous = tuple(offers), chosen, asynchronous

    def admitted(self, request_id: str, blocks: tuple[tuple[int, ...], ...], tokens: int) -> int | None:
        """The scheduler has allocated the request's blocks. The number of the child that loads, or None.

        `tokens`: to be loaded, which is 0 where it found more locally than the chosen child's offer.
        """
        waiting = self._waiting.get(request_id)
        if waiting is None:
            return None
        winner = waiting.chosen.child if waiting.chosen is not None and tokens > 0 else None
        self._count(waiting.offers, winner, tokens)
        if winner is not None and waiting.asynchronous:
            self._loads[request_id] = self._new[request_id] = ChildLoad(winner, blocks)
        self._waiting[request_id] = _WaitingRequest(barred=waiting.barred)
        if not waiting.barred:
            del self._waiting[request_id]
        return winner

    def pop_new(self) -> dict[str, ChildLoad]:
        """Loads that began since the last call, for the workers."""
        new, self._new = self._new, {}
        return new

    def loading(self, request_id: str) -> int | None:
        """The child whose load of this request is running."""
        load = self._loads.get(request_id)
        return None if load is None else load.child

    def failed_requests(self, failed: Iterable[str], blocks: Collection[int]) -> set[str]:
        """Requests whose load failed: those of `failed`, and those whose load touches one of `blocks`."""
        running = {request_id: load for request_id, load in self._loads.items() if request_id not in self._given_up}
        named = {request_id for request_id in failed if request_id in running}
        return named | {request_id for request_id, load in running.items() if load.touches(blocks)}

    def fail(self, request_id: str) -> None:
        """The request's load failed; its child is not asked for this request again."""
        child = self._loads[request_id].child
        self._counters.add("child_failed_loads", self._names[child])
        self._bar(request_id, {child})

    def give_up(self, request_id: str) -> None:
        """The load takes too long: the request no longer waits for it, and nothing more is loaded for it."""
        self._given_up.add(request_id)
        self.fail(request_id)
        self._bar(request_id, set(range(len(self._names))))

    def ended(self, request_ids: Iterable[str]) -> None:
        """These loads have ended, well or not."""
        for request_id in request_ids:
            self._loads.pop(request_id, None)
            self._given_up.discard(request_id)
            self._ended_requests.discard(request_id)

    def on_request_finished(self, request_id: str) -> None:
        """The request has ended. Its load may still run, and its blocks are held until then."""
        self._waiting.pop(request_id, None)
        if request_id in self._loads:
            self._ended_requests.add(request_id)

    def _bar(self, request_id: str, children: set[int]) -> None:
        """Not for a request that has ended: its entry would never be removed."""
        if request_id not in self._ended_requests:
            self._waiting.setdefault(request_id, _WaitingRequest()).barred.update(children)

    def pending(self) -> Mapping[str, int]:
        """How many loads are running, by child."""
        counts = dict.fromkeys(self._names, 0)
        for load in self._loads.values():
            counts[self._names[load.child]] += 1
        return counts

    def _count(self, offers: Sequence[Offer], winner: int | None, tokens: int) -> None:
        for offer in offers:
            name = self._names[offer.child]
            self._counters.add("child_queries", name)
            if offer.child == winner:
                self._counters.add("child_wins", name)
                self._counters.add("child_tokens_won", name, tokens)
            else:
                self._counters.add("child_losses" if offer.tokens else "child_misses", name)


@dataclass(slots=True)
class _RunningLoad:
    blocks: Sequence[Any]
    since: float
    reported: bool = False


class LoadDeadlines:
    """Running loads of tiers. `within`: seconds that one may take. The quarantine's keys are request ids here."""

    def __init__(self, within: float, quarantine: Quarantine) -> None:
        self._within = within
        self._quarantine = quarantine
        self._loads: dict[str, _RunningLoad] = {}

    def __len__(self) -> int:
        """How many loads are running, in time or given up."""
        return len(self._loads) + len(self._quarantine)

    def on_load_started(self, request_id: str, blocks: Sequence[Any], now: float) -> None:
        """A tier begins to load into these blocks."""
        self._loads[request_id] = _RunningLoad(blocks, now)

    def pop_overdue(self, now: float) -> frozenset[str]:
        """Requests whose load is overdue, each returned once. A rank on which it still runs gives it up."""
        late = [name for name, load in self._loads.items() if not load.reported and now - load.since >= self._within]
        for request_id in late:
            self._loads[request_id].reported = True
        return frozenset(late)

    def give_up(self, stalled: Mapping[str, int]) -> set[str]:
        """Overdue loads that still run: request id → number of ranks. Must precede vLLM's freeing of blocks.

        Returns the requests whose load is given up.
        """
        given_up = stalled.keys() & self._loads.keys()
        for request_id in given_up:
            self._quarantine.add(request_id, self._loads.pop(request_id).blocks, stalled[request_id])
        return set(given_up)

    def ended(self, request_ids: Iterable[str]) -> None:
        """These loads have ended, well or not."""
        for request_id in request_ids:
            self._loads.pop(request_id, None)

    def on_drained(self, drained: Mapping[str, int]) -> list[str]:
        """Given-up loads that ended: request id → number of ranks. Returns those that have ended on all ranks."""
        return self._quarantine.on_transfers_ended(drained)
