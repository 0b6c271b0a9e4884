"""Which child loads a request's prefix: claims in, one choice out. Pure.

A claim is worth the prompt tokens that need not be computed because of it, times the child's `load_weight`. That is
counted from the *shared* hit, the boundary at which every local cache group agrees: without a load the node resumes
there. A claim that stands on a deeper local hit, of attention alone, makes that hit usable by bringing the state, and
so is worth it too: with attention cached up to 96, state nowhere, and a ticket up to 131, it saves 131 tokens, not 35.


Every request that children are asked for, and every load on its way. Pure: times are passed in.

Loads from a tier that take too long; in the scheduler's process. Pure: times are passed in, seconds, monotonic.

    begun ──► overdue: the workers are told ──► ended in time after all
                                            └── given up: its request computes; its blocks stay out of the pool
                                                └── drained: the load has ended on every rank, the blocks go back

A tier cannot be made to stop, so it may write into the blocks for as long as its load runs, whatever became of the
request. Nothing else is loaded for a request whose load was given up: two loads under one id could not be told apart.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from connector.decode_reads import Quarantine
from connector.tiers.stats import SelectionCounters


@dataclass(frozen=True, slots=True)
class Offer:
    """What a child said when it was asked.

    `base`: the local hit, in tokens, that it was told of and builds on. `tokens`: how many it would bring beyond that;
    0 for none, None while it is still looking.
    """

    child: int
    base: int
    tokens: int | None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class LoadFrom:
    """This claim wins."""

    claim: Offer


@dataclass(frozen=True, slots=True)
class AskAgain:
    """A child that has not decided could still win: ask again."""


@dataclass(frozen=True, slots=True)
class ComputeHere:
    """No child has anything worth loading."""


Choice = LoadFrom | AskAgain | ComputeHere


def choose(claims: Sequence[Offer], *, shared: int, prompt: int, late: bool) -> Choice:
    """The best claim; of two that are worth the same, the child's that stands first.

    `shared`, `prompt`: tokens of the shared hit and of the whole request. `late`: the deadline for children that have
    not decided is over; they count as having nothing. Before it they are waited for only while they could win.
    """
    best: Offer | None = None
    for claim in claims:
        if worth(claim, shared) > (0.0 if best is None else worth(best, shared)):
            best = claim
    if not late and any(_may_beat(claim, best, shared, prompt) for claim in claims if claim.tokens is None):
        return AskAgain()
    return ComputeHere() if best is None else LoadFrom(best)


def worth(claim: Offer, shared: int) -> float:
    """What a claim saves, in weighted tokens; 0 for one that has nothing, or is undecided."""
    if not claim.tokens or claim.tokens < 0:
        return 0.0
    return max(0, claim.base + claim.tokens - shared) * claim.weight


def _may_beat(undecided: Offer, best: Offer | None, shared: int, prompt: int) -> bool:
    # One that stands on a hit of the whole prompt has nothing left to bring.
    most = max(0, prompt - shared) * undecided.weight if undecided.base < prompt else 0.0
    if best is None:
        return most > 0
    return (most, -undecided.child) > (worth(best, shared), -best.child)


def bounded_offer(tokens: int | None, *, base: int, prompt: int) -> int | None:
    """A child's answer as it may be counted: less than nothing, or more than the prompt has, is nothing.

    vLLM's scheduler asserts on both, which would end the engine. An answer that is too large is not cut down: where it
    would be cut there is no state to resume from.
    """
    if tokens is None:
        return None
    return tokens if 0 < tokens <= prompt - base else 0


@dataclass(frozen=True, slots=True)
class Load:
    """A child loads a request's prefix into these blocks, by KV-cache group. Pickled to the workers."""

    child: int
    blocks: tuple[tuple[int, ...], ...]

    def touches(self, blocks: Collection[int]) -> bool:
        """Whether any of `blocks` is among this load's. Only meaningful where block ids are unique over the groups."""
        return any(block in blocks for group in self.blocks for block in group)


@dataclass(slots=True)
class _WaitingRequest:
    """A request that was not admitted yet. `barred`: children whose load of it has failed."""

    since: float | None = None
    claims: tuple[Offer, ...] = ()
    chosen: Offer | None = None
    asynchronous: bool = False
    barred: set[int] = field(default_factory=set)


class PendingLoads:
    """Books of the scheduler's process; `names` are the children's."""

    def __init__(self, names: Sequence[str], tally: SelectionCounters) -> None:
        self._names = tuple(names)
        self._tally = tally
        self._asked: dict[str, _WaitingRequest] = {}
        self._loads: dict[str, Load] = {}
        self._given_up: set[str] = set()
        self._left: set[str] = set()
        self._new: dict[str, Load] = {}

    def __len__(self) -> int:
        """Requests and loads that are remembered."""
        return len(self._asked.keys() | self._loads.keys())

    def waited(self, request_id: str, now: float) -> float:
        """Seconds since the children were first asked for this request's present admission; begins with 0."""
        asked = self._asked.setdefault(request_id, _WaitingRequest())
        asked.since = now if asked.since is None else asked.since
        return now - asked.since

    def barred(self, request_id: str) -> frozenset[int]:
        """Children that failed to load this request, and are not asked again: they would offer the same."""
        asked = self._asked.get(request_id)
        return frozenset() if asked is None else frozenset(asked.barred)

    def answered(self, request_id: str, claims: Sequence[Offer], chosen: Offer | None, *, asynchronous: bool) -> None:
        """What the children said, and who would load; counted only when the scheduler admits the request."""
        asked = self._asked.setdefault(request_id, _WaitingRequest())
        asked.claims, asked.chosen, asked.asynchronous = tuple(claims), chosen, asynchronous

    def admitted(self, request_id: str, blocks: tuple[tuple[int, ...], ...], tokens: int) -> int | None:
        """The scheduler has allocated; `tokens` are to be loaded, which is 0 where it found more locally than the
        child that was chosen could bring, whatever that child had said. The number of the child that loads."""
        asked = self._asked.get(request_id)
        if asked is None:
            return None
        winner = asked.chosen.child if asked.chosen is not None and tokens > 0 else None
        self._count(asked.claims, winner, tokens)
        if winner is not None and asked.asynchronous:
            self._loads[request_id] = self._new[request_id] = Load(winner, blocks)
        self._asked[request_id] = _WaitingRequest(barred=asked.barred)
        if not asked.barred:
            del self._asked[request_id]
        return winner

    def take_new(self) -> dict[str, Load]:
        """Loads that began in this step, for the workers; handed out once."""
        new, self._new = self._new, {}
        return new

    def loading(self, request_id: str) -> int | None:
        """Which child has a load of this request on its way."""
        load = self._loads.get(request_id)
        return None if load is None else load.child

    def failed(self, failed: Iterable[str], blocks: Collection[int]) -> set[str]:
        """Requests whose load failed: these, and those whose load touches one of `blocks`."""
        running = {request_id: load for request_id, load in self._loads.items() if request_id not in self._given_up}
        named = {request_id for request_id in failed if request_id in running}
        return named | {request_id for request_id, load in running.items() if load.touches(blocks)}

    def fail(self, request_id: str, *, bar: bool) -> None:
        """A load failed; with `bar` its child is not asked for this request again."""
        child = self._loads[request_id].child
        self._tally.add("child_failed_loads", self._names[child])
        if bar:
            self._bar(request_id, {child})

    def give_up(self, request_id: str) -> None:
        """A load takes too long: nothing more is loaded for its request, and the load is waited for by nobody."""
        self._given_up.add(request_id)
        self.fail(request_id, bar=False)
        self._bar(request_id, set(range(len(self._names))))

    def ended(self, request_ids: Iterable[str]) -> None:
        """These loads are over, however they went."""
        for request_id in request_ids:
            self._loads.pop(request_id, None)
            self._given_up.discard(request_id)
            self._left.discard(request_id)

    def leave(self, request_id: str) -> None:
        """The request is over. A load on its way still runs, and its blocks are held until it `ended`."""
        self._asked.pop(request_id, None)
        if request_id in self._loads:
            self._left.add(request_id)

    def _bar(self, request_id: str, children: set[int]) -> None:
        """Nobody asks for a request that is over, and nothing would be forgotten of it."""
        if request_id not in self._left:
            self._asked.setdefault(request_id, _WaitingRequest()).barred.update(children)

    def pending(self) -> Mapping[str, int]:
        """Loads on their way, by child."""
        counts = dict.fromkeys(self._names, 0)
        for load in self._loads.values():
            counts[self._names[load.child]] += 1
        return counts

    def _count(self, claims: Sequence[Offer], winner: int | None, tokens: int) -> None:
        for claim in claims:
            name = self._names[claim.child]
            self._tally.add("child_queries", name)
            if claim.child == winner:
                self._tally.add("child_wins", name)
                self._tally.add("child_tokens_won", name, tokens)
            else:
                self._tally.add("child_losses" if claim.tokens else "child_misses", name)


@dataclass(slots=True)
class _RunningLoad:
    blocks: Sequence[Any]
    since: float
    told: bool = False


class LoadDeadlines:
    """`within`: seconds that a load may take. The quarantine's names are request ids here."""

    def __init__(self, within: float, quarantine: Quarantine) -> None:
        self._within = within
        self._quarantine = quarantine
        self._loads: dict[str, _RunningLoad] = {}

    def __len__(self) -> int:
        """How many loads run, in time or given up."""
        return len(self._loads) + len(self._quarantine)

    def begin(self, request_id: str, blocks: Sequence[Any], now: float) -> None:
        """A tier begins to load into these blocks."""
        self._loads[request_id] = _RunningLoad(blocks, now)

    def take(self, now: float) -> frozenset[str]:
        """Requests whose load is overdue, each told once; a rank on which it still runs gives it up."""
        late = [name for name, load in self._loads.items() if not load.told and now - load.since >= self._within]
        for request_id in late:
            self._loads[request_id].told = True
        return frozenset(late)

    def give_up(self, stalled: Mapping[str, int]) -> set[str]:
        """Loads that still run on so many ranks; before vLLM frees a block. Which requests they were for."""
        given_up = stalled.keys() & self._loads.keys()
        for request_id in given_up:
            self._quarantine.stall(request_id, self._loads.pop(request_id).blocks, stalled[request_id])
        return set(given_up)

    def ended(self, request_ids: Iterable[str]) -> None:
        """These loads are over, however they went."""
        for request_id in request_ids:
            self._loads.pop(request_id, None)

    def drain(self, drained: Mapping[str, int]) -> list[str]:
        """Loads that were given up and have ended now, in ranks. Those that have ended on all of them."""
        return self._quarantine.drain(drained)
