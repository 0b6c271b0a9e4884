"""Every request that children are asked for, and every load on its way. Pure: times are passed in."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from connector.multi.choice import Claim
from connector.multi.tally import Tally


@dataclass(frozen=True, slots=True)
class Load:
    """A child loads a request's prefix into these blocks, by KV-cache group. Pickled to the workers."""

    child: int
    blocks: tuple[tuple[int, ...], ...]

    def touches(self, blocks: Collection[int]) -> bool:
        """Whether any of `blocks` is among this load's. Only meaningful where block ids are unique over the groups."""
        return any(block in blocks for group in self.blocks for block in group)


@dataclass(slots=True)
class _Asked:
    """A request that was not admitted yet. `barred`: children whose load of it has failed."""

    since: float | None = None
    claims: tuple[Claim, ...] = ()
    chosen: Claim | None = None
    asynchronous: bool = False
    barred: set[int] = field(default_factory=set)


class Desk:
    """Books of the scheduler's process; `names` are the children's."""

    def __init__(self, names: Sequence[str], tally: Tally) -> None:
        self._names = tuple(names)
        self._tally = tally
        self._asked: dict[str, _Asked] = {}
        self._loads: dict[str, Load] = {}
        self._given_up: set[str] = set()
        self._left: set[str] = set()
        self._new: dict[str, Load] = {}

    def __len__(self) -> int:
        """Requests and loads that are remembered."""
        return len(self._asked.keys() | self._loads.keys())

    def waited(self, request_id: str, now: float) -> float:
        """Seconds since the children were first asked for this request's present admission; begins with 0."""
        asked = self._asked.setdefault(request_id, _Asked())
        asked.since = now if asked.since is None else asked.since
        return now - asked.since

    def barred(self, request_id: str) -> frozenset[int]:
        """Children that failed to load this request, and are not asked again: they would offer the same."""
        asked = self._asked.get(request_id)
        return frozenset() if asked is None else frozenset(asked.barred)

    def answered(self, request_id: str, claims: Sequence[Claim], chosen: Claim | None, *, asynchronous: bool) -> None:
        """What the children said, and who would load; counted only when the scheduler admits the request."""
        asked = self._asked.setdefault(request_id, _Asked())
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
        self._asked[request_id] = _Asked(barred=asked.barred)
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
            self._asked.setdefault(request_id, _Asked()).barred.update(children)

    def pending(self) -> Mapping[str, int]:
        """Loads on their way, by child."""
        counts = dict.fromkeys(self._names, 0)
        for load in self._loads.values():
            counts[self._names[load.child]] += 1
        return counts

    def _count(self, claims: Sequence[Claim], winner: int | None, tokens: int) -> None:
        for claim in claims:
            name = self._names[claim.child]
            self._tally.add("child_queries", name)
            if claim.child == winner:
                self._tally.add("child_wins", name)
                self._tally.add("child_tokens_won", name, tokens)
            else:
                self._tally.add("child_losses" if claim.tokens else "child_misses", name)
