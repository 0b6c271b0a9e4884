"""Nodes, what their caches hold and requests take of these, their states, and the snapshot that plans are made from.
Pure values.
"""

import dataclasses
import enum
import hashlib
import operator
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from pdproxy.nodes.cache_settings import CacheSettings
from pdproxy.nodes.hashing import Hashing
from pdproxy.request import Headers, Json
from pdproxy.settings import types

RANK_HEADER = "x-data-parallel-rank"
"""Which of its data-parallel ranks a server is to use. vLLM 0.32 heeds it for completions, chat and messages, not for
responses, and picks one by load where it is missing."""


def hash64(text: str) -> int:
    """A hash of 64 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())


Role = types.Role
"""The settings define it, for they are read without nodes; everything else takes it from here, beside `Node`."""


class State(enum.StrEnum):
    """Whether a node gets requests, and if not, why."""

    JOINING = "joining"
    """Preflight and known-answer test are under way: no requests."""
    UP = "up"
    PROBING = "probing"
    """The circuit is half open: one request at a time."""
    DOWN = "down"
    """The circuit is open."""
    DRAINING = "draining"
    """No new requests; running ones finish or migrate."""
    TERMINATING = "terminating"
    """Its endpoint goes away and still serves: requests only while no other node of its role takes any, or the others
    make no pair and it does."""
    REFUSED = "refused"
    """The preflight found a setting that cannot work; see the reason."""


SERVING = frozenset({State.UP, State.PROBING, State.TERMINATING})
"""States in which a node gets requests, or may get some."""
FEW_TOKENS = 8  # more than any model's multi-token prediction has modules


class Binding(enum.StrEnum):
    """What runs out first with sequences of the greatest length."""

    ATTENTION = "attention"
    STATE = "state"
    NOTHING = "nothing"


class Footprint(NamedTuple):
    """What requests take of a node's caches, as far as a proxy can tell.

    Attributes:
        tokens: of prompts and answers.
        sequences: each answer is one.
    """

    tokens: int = 0
    sequences: int = 0


NO_FOOTPRINT = Footprint()
"""Of a leg whose blocks are counted elsewhere, or that has none."""


FULL, OVERFLOW = 0.9, 3000.0
"""The part of a cache that may be held before more counts, and what a whole cache more weighs, in sequences."""


@dataclasses.dataclass(frozen=True, slots=True)
class Capacity:
    """What the caches of all engines behind one address hold.

    A load of t tokens in n sequences fits while t / tokens + n / sequences <= 1, but for the last block of each.

    Attributes:
        tokens: of attention capacity.
        sequences: that the state groups allow; None where there are none.
        longest: sequences of the greatest length that run together.
        binding: what runs out first with these.
    """

    tokens: int
    sequences: int | None
    longest: int
    binding: Binding

    def part_taken(self, tokens: int, sequences: int) -> float:
        """The part of it that such a load takes; above 1 where it does not fit."""
        return tokens / self.tokens + (sequences / self.sequences if self.sequences else 0.0)

    def crowd(self, held: Footprint, legs: int, ranks: int) -> float:
        """What the legs of one of its ranks weigh, in sequences: one each, and more where the cache is nearly full."""
        fill = self.part_taken(*held) * ranks
        return legs + max(0.0, fill - FULL) * OVERFLOW


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A vLLM server. Data-parallel ranks behind its one address are one node: it shares requests out among them.

    Attributes:
        name: unique, safe to show to operators (never to clients).
        url: the base, without a trailing slash.
        model: the model it serves, as clients name it; "" until known.
        aliases: further names that are served here (LoRA).
        cards: what the node itself says of each model, by name, as in ``GET /v1/models``.
        weight: relative share of requests, > 0.
        cohort: nodes pair only within one cohort (versions of vLLM and connector, fingerprint); "" pairs with all.
        capacity: None until known, and of a node that does not publish it.
        ranks: data-parallel ranks behind the address, each with blocks and hand-overs of its own.
        fingerprint: what the bytes of its KV cache depend on, value by part; empty where not published.
        block_size, max_model_len: tokens in an attention block, and in the longest sequence; 0 where not published.
        prefix_match_unit: tokens between the boundaries at which its hand-overs end; 0 where they end anywhere.
        can_resume: it has the route on which streams come with a journal, by which another such node resumes them.
        hashing, cache: how its prefix cache names the tokens of a prompt, and is set up; None where not published.
        seed: a hash of its name, 64 bits: the same in every proxy.
    """

    name: str
    url: str
    role: Role
    model: str = ""
    aliases: tuple[str, ...] = ()
    weight: float = 1.0
    cohort: str = ""
    capacity: Capacity | None = None
    ranks: int = 1
    fingerprint: Mapping[str, str] = dataclasses.field(default_factory=lambda: MappingProxyType({}), hash=False)
    block_size: int = 0
    max_model_len: int = 0
    prefix_match_unit: int = 0
    can_resume: bool = False
    hashing: Hashing | None = None
    cache: CacheSettings | None = None
    cards: Mapping[str, Json] = dataclasses.field(default_factory=lambda: MappingProxyType({}), hash=False)
    seed: int = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", hash64(self.name))

    @property
    def tail_tokens(self) -> int:
        """The most prompt tokens that a decode node computes itself though it has read a ticket of this node's.

        Up to two units, with EAGLE and MTP; without a unit the last token, or a few with MTP of several modules.
        """
        return 2 * self.prefix_match_unit or FEW_TOKENS

    def each_rank(self) -> tuple[Headers, ...]:
        """The headers that bring a request to each of its ranks; a lone one needs none."""
        return tuple(((RANK_HEADER, str(rank)),) for rank in range(self.ranks)) if self.ranks > 1 else ((),)

    def serves(self, model: str) -> bool:
        """Whether clients may ask this node for ``model``; a node whose model is unknown is taken to serve any."""
        return self.model in ("", model) or model in self.aliases

    def pairs_with(self, cohort: str) -> bool:
        """Whether a ticket can pass between this node and a node of ``cohort``."""
        return "" in (self.cohort, cohort) or self.cohort == cohort

    def is_partner(self, other: "Node") -> bool:
        """Whether a ticket can pass between the two, as far as role and cohort say."""
        return self.role is not other.role and self.pairs_with(other.cohort)

    def replaces(self, other: "Node") -> bool:
        """Whether it does what the other one does, for the same partners."""
        return self.role is other.role and self.pairs_with(other.cohort)


@dataclasses.dataclass(slots=True)
class NodeView:
    """One node in a snapshot. Nothing changes one; it is not frozen because several are made for each request, and a
    frozen one takes three times as long to make.

    Attributes:
        active: legs in flight from this proxy.
        share: 0 < share <= 1: the part of its weight that slow start allows now.
        trials: while PROBING: requests in flight that try the half-open circuit. One is all it may get.
        reason: for operators: why it is in this state (the setting that was refused, the last fault).
        legs: in flight, by data-parallel rank.
        queued: tokens of their prompts that are still to be computed, by rank.
        held: what they take of the caches, by rank, as far as they are decode legs.
        since: monotonic seconds when its state last changed; while it is out, when that began.
        name: of the node.
        footprint: of all ranks together.
        rank: the one with the fewest tokens to compute (``backlog``), and of these the fewest legs (``sequences``).
        crowd: `crowd_of` it.
        room: the weight that it may use now.
        load: what its legs would be with one more, per unit of ``room``.
    """

    node: Node
    state: State
    active: int
    share: float = 1.0
    trials: int = 0
    reason: str = ""
    legs: tuple[int, ...] = (0,)
    queued: tuple[int, ...] = (0,)
    held: tuple[Footprint, ...] = (NO_FOOTPRINT,)
    since: float = float("-inf")
    name: str = dataclasses.field(init=False, repr=False, compare=False)
    footprint: Footprint = dataclasses.field(init=False, repr=False, compare=False)
    rank: int = dataclasses.field(init=False, repr=False, compare=False)
    backlog: int = dataclasses.field(init=False, repr=False, compare=False)
    sequences: int = dataclasses.field(init=False, repr=False, compare=False)
    crowd: float = dataclasses.field(init=False, repr=False, compare=False)
    room: float = dataclasses.field(init=False, repr=False, compare=False)
    load: float = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Every plan compares all of them, and a view outlives many plans.
        self.name = self.node.name
        self.room = self.node.weight * self.share
        self.load = (self.active + 1) / self.room
        self.footprint, self.rank, self.backlog, self.sequences = self.held[0], 0, self.queued[0], self.legs[0]
        if len(self.legs) > 1:
            self.footprint = Footprint(*map(sum, zip(*self.held, strict=True)))
            lightest = min(zip(self.queued, self.legs, range(len(self.legs)), strict=True))
            self.backlog, self.sequences, self.rank = lightest
        self.crowd = self.crowd_of(self.rank) if self.node.capacity else self.sequences

    def crowd_of(self, rank: int) -> float:
        """What the legs of a rank weigh, in sequences: one each, and more where they nearly fill its cache."""
        capacity, legs = self.node.capacity, self.legs[rank]
        return legs if capacity is None else capacity.crowd(self.held[rank], legs, self.node.ranks)

    def takes_requests(self) -> bool:
        """Whether a plan may send something here now."""
        return self.state is State.UP or (self.state is State.PROBING and self.trials == 0)

    def is_last_resort(self) -> bool:
        """Whether a plan may send something here where it could send it nowhere else."""
        return self.state is State.TERMINATING

    def admits(self, more: Footprint, most: float) -> bool:
        """Whether its caches have room for a request, up to the part ``most`` of them; 0 for any.

        A node without a published capacity admits any, and one on which no decode leg of ours runs admits any one.
        """
        capacity, held = self.node.capacity, self.footprint
        if capacity is None or not most or not held.sequences:
            return True
        return capacity.part_taken(held.tokens + more.tokens, held.sequences + more.sequences) <= most


@dataclasses.dataclass(frozen=True, slots=True)
class Bars:
    """Why nodes of one cohort exchange no tickets: pairs by the names of prefill and decode node, nodes by name."""

    pairs: Mapping[tuple[str, str], str] = dataclasses.field(default_factory=lambda: MappingProxyType({}))
    nodes: Mapping[str, str] = dataclasses.field(default_factory=lambda: MappingProxyType({}))

    def __bool__(self) -> bool:
        """Whether anything is barred at all."""
        return bool(self.pairs or self.nodes)

    def allow(self, prefill: str, decode: str) -> bool:
        """Whether a ticket may pass from one node to the other."""
        return prefill not in self.nodes and decode not in self.nodes and (prefill, decode) not in self.pairs


@dataclasses.dataclass(frozen=True, slots=True)
class Places:
    """Where in a snapshot prefill and decode nodes stand that take requests for one model."""

    prefills: tuple[int, ...]
    decodes: tuple[int, ...]

    def of(self, role: Role) -> tuple[int, ...]:
        """The places of one role's nodes."""
        return self.prefills if role is Role.PREFILL else self.decodes

    def views(self, role: Role, nodes: "tuple[NodeView, ...]") -> "list[NodeView]":
        """The views of one role's nodes, of all in a snapshot. Fast: each plan asks, and there are many."""
        places = self.of(role)
        if len(places) > 1:
            return list(operator.itemgetter(*places)(nodes))
        return [nodes[place] for place in places]


@dataclasses.dataclass(frozen=True, slots=True)
class Seeds:
    """What nodes are hashed by, each at its place; no weights where all are equal."""

    seeds: tuple[int, ...]
    weights: tuple[float, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """The nodes that take requests for one model, and of those that are a last resort the ones that are needed.

    Attributes:
        places: of all of them.
        cohorts: of those of each cohort, sorted by its name (``cohort_names``); nodes of unknown cohort are in each.
        by_name: the place of each of them.
        seeds: by role, in the order of ``places``.
    """

    places: Places
    cohorts: tuple[Places, ...]
    cohort_names: tuple[str, ...]
    by_name: Mapping[str, int]
    seeds: Mapping[Role, Seeds]

    @property
    def pairs(self) -> bool:
        """Whether a prefill and a decode node are of one cohort."""
        return any(places.prefills and places.decodes for places in self.cohorts)


class Roster:
    """What of a snapshot does not depend on load: which of its nodes take requests for which model.

    Finding that takes longer than a plan, so it is found once for all snapshots in which each place has the same node,
    and the same answers from `NodeView.takes_requests` and `NodeView.is_last_resort`.

    Attributes:
        models: every name that a client may ask for, served by a decode node in whatever state, sorted.
        base_models: of these, the models themselves: no adapters, and no second names.
    """

    def __init__(self, nodes: tuple[NodeView, ...]) -> None:
        decodes = [view.node for view in nodes if view.node.role is Role.DECODE]
        self.models = tuple(sorted({name for node in decodes for name in (node.model, *node.aliases) if name}))
        self.base_models = tuple(sorted({node.model for node in decodes if node.model}))
        self._may_serve_any = not all(node.model for node in decodes) or not decodes
        self._names = frozenset(name for view in nodes for name in (view.node.model, *view.node.aliases))
        self._nodes = nodes
        self._served: dict[str, Served] = {}

    def knows(self, model: str) -> bool:
        """Whether a decode node, in whatever state, serves it or might: its model is unknown yet, or none is here."""
        return self._may_serve_any or model in self.models

    def served(self, model: str) -> Served:
        """The nodes that take requests for a model, or are the last resort, whatever a client may call it."""
        known = model if model in self._names else ""  # so that clients' words do not fill the memory
        found = self._served.get(known)
        if found is None:
            found = self._served[known] = self._find(known)
        return found

    def _find(self, model: str) -> Served:
        views = [(place, view) for place, view in enumerate(self._nodes) if view.node.serves(model)]
        serving = [view.node for _, view in views if view.takes_requests()]
        needed = _needed(serving, [view.node for _, view in views if view.is_last_resort()])
        here = [(place, view.node) for place, view in views if view.takes_requests() or view.name in needed]
        cohorts = sorted({node.cohort for _, node in here})
        seeds = {role: _seeds([node for _, node in here if node.role is role]) for role in Role}
        by_name = {node.name: place for place, node in here}
        groups = tuple(_places(here, cohort) for cohort in cohorts)
        return Served(_places(here), groups, tuple(cohorts), by_name, seeds)


def _needed(serving: list[Node], going: list[Node]) -> frozenset[str]:
    """Of the nodes that go away, the names of those without which a role, or every pair, would be missing.

    During a surge the new nodes of one role serve first: until some of the other role do too, only the old ones, of
    which one terminates already, make a pair.
    """
    if not going or any(one.is_partner(other) for one in serving for other in serving):
        return frozenset()
    roles = {node.role for node in serving}
    return frozenset(
        node.name
        for node in going
        if node.role not in roles
        or (any(map(node.is_partner, (*serving, *going))) and not any(map(node.replaces, serving)))
    )


def _places(here: list[tuple[int, Node]], cohort: str | None = None) -> Places:
    """Of all nodes, or of those that belong to a cohort."""
    those = [(place, node.role) for place, node in here if cohort is None or node.cohort in ("", cohort)]
    prefills, decodes = (tuple(place for place, role in those if role is wanted) for wanted in Role)
    return Places(prefills, decodes)


def _seeds(nodes: list[Node]) -> Seeds:
    weights = tuple(node.weight for node in nodes)
    return Seeds(tuple(node.seed for node in nodes), weights if len(set(weights)) > 1 else ())


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """All nodes at one moment, in the order of joining; ``known`` is the roster of an earlier one that still holds."""

    nodes: tuple[NodeView, ...]
    bars: Bars = Bars()
    known: dataclasses.InitVar[Roster | None] = None
    roster: Roster = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self, known: Roster | None) -> None:
        object.__setattr__(self, "roster", known or Roster(self.nodes))
