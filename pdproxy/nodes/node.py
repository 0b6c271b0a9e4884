"""Nodes, what their caches hold and requests take of these, and all of them as plans see them. Pure."""

import dataclasses
import enum
import hashlib
import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import msgspec

from pdproxy.nodes.cache_settings import CacheSettings
from pdproxy.nodes.hashing import Hashing
from pdproxy.nodes.load import Load, PlaceLoad
from pdproxy.request import Headers, Json
from pdproxy.settings import types

RANK_HEADER = "x-data-parallel-rank"
"""Which of its data-parallel ranks a server is to use. vLLM 0.32 heeds it for completions, chat and messages, not for
responses, and picks one by load where it is missing."""


def hash64(text: str) -> int:
    """A hash of 64 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())


Role = types.Role
Roles = types.Roles
"""The settings define them, for they are read without nodes; everything else takes them from here, beside `Node`."""
PREFILL, DECODE, BOTH = (Role.PREFILL,), (Role.DECODE,), tuple(Role)
"""The roles that a node may have. A node of both computes prompts for others, decodes for others, and serves alone."""


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
    """No new requests; running ones finish, or move when the deadline comes."""
    TERMINATING = "terminating"
    """Its endpoint goes away and still serves: requests only while no other node of its role takes any, or the others
    make no pair and it does."""
    REFUSED = "refused"
    """The preflight found a setting that cannot work; see the reason."""


class Outage(NamedTuple):
    """A node was out between these monotonic seconds; ``reason``: why it went, for operators."""

    began: float
    ended: float
    reason: str = ""


SERVING = frozenset({State.UP, State.PROBING, State.TERMINATING})
"""States in which a node gets requests, or may get some."""
UNKNOWN_BLOCK = 16
"""Tokens in a block of a node that does not publish it: vLLM's default for models without states."""
FEW_TOKENS = 8  # more than any model's multi-token prediction has modules


class Binding(enum.StrEnum):
    """The resource that runs out first with sequences of the greatest length."""

    ATTENTION = "attention"
    STATE = "state"
    NOTHING = "nothing"


class Footprint(msgspec.Struct, frozen=True, order=True, gc=False):
    """The share of a node's caches that requests take, as far as a proxy can tell.

    Attributes:
        tokens: of prompts and answers.
        sequences: each answer is one.
    """

    tokens: int = 0
    sequences: int = 0


NO_FOOTPRINT = Footprint()
"""The footprint of a leg whose blocks are counted elsewhere, or that has none."""


FULL, OVERFLOW = 0.9, 3000.0
"""The part of a cache that may be held before more counts, and what a whole cache more weighs, in sequences."""


@dataclasses.dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity of the caches of all engines behind one address.

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

    def crowd(self, place: PlaceLoad, ranks: int) -> float:
        """The weight of the legs of one rank, in sequences: one each, and more where the cache is nearly full."""
        fill = self.part_taken(place.tokens, place.sequences) * ranks
        return place.legs + max(0.0, fill - FULL) * OVERFLOW


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A vLLM server. Data-parallel ranks behind its one address are one node: it shares requests out among them.

    Attributes:
        name: unique, safe to show to operators (never to clients).
        url: the base, without a trailing slash.
        roles: what it is asked to do, in the order of `Role`.
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
        keeps: its connector keeps conversations.
        seed: a hash of its name, 64 bits: the same in every proxy.
        keeps_states: its model has states, such as mamba's; taken to be so where the node does not say.
        match_block: tokens between the points from which it resumes: its match unit, or an attention block.
        match_rule: all that decides how much of a prompt that it has cached counts; equal for nodes that are alike.
    """

    name: str
    url: str
    roles: Roles
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
    keeps: bool = False
    hashing: Hashing | None = None
    cache: CacheSettings | None = None
    cards: Mapping[str, Json] = dataclasses.field(default_factory=lambda: MappingProxyType({}), hash=False)
    seed: int = dataclasses.field(init=False, repr=False, compare=False)
    keeps_states: bool = dataclasses.field(init=False, repr=False, compare=False)
    match_block: int = dataclasses.field(init=False, repr=False, compare=False)
    match_rule: tuple[object, ...] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        capacity, block = self.capacity, self.prefix_match_unit or self.block_size or UNKNOWN_BLOCK
        object.__setattr__(self, "seed", hash64(self.name))
        object.__setattr__(self, "keeps_states", capacity is None or capacity.sequences is not None)
        object.__setattr__(self, "match_block", block)
        drops = self.hashing is not None and self.hashing.drops_unit
        rule = (block, self.prefix_match_unit, self.keeps_states, drops, Role.PREFILL in self.roles)
        object.__setattr__(self, "match_rule", rule)

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

    @property
    def kind(self) -> str:
        """The name of its kind: "prefill", "decode", or, of both roles, "node"."""
        return types.kind_of_node(self.roles)

    def may_hand_to(self, other: "Node") -> bool:
        """Whether it may compute a prompt for the other one, as far as roles and cohort say; never for itself."""
        return (
            Role.PREFILL in self.roles
            and Role.DECODE in other.roles
            and self.name != other.name
            and self.pairs_with(other.cohort)
        )

    def is_partner(self, other: "Node") -> bool:
        """Whether a ticket can pass between the two, one way or both, as far as roles and cohort say."""
        return self.may_hand_to(other) or other.may_hand_to(self)

    def shares_role(self, other: "Node") -> bool:
        """Whether both are asked to do one thing."""
        return not set(self.roles).isdisjoint(other.roles)

    def replaces(self, other: "Node") -> bool:
        """Whether it does all that the other one does, for the same partners."""
        return set(self.roles).issuperset(other.roles) and self.pairs_with(other.cohort)


_LIGHTEST = operator.attrgetter("queued", "legs", "rank")
_FEWEST_LEGS = operator.attrgetter("legs", "rank")
_TOKENS, _SEQUENCES = operator.attrgetter("tokens"), operator.attrgetter("sequences")


@dataclasses.dataclass(slots=True, eq=False)
class NodeView:
    """One node as it stands: its state and its load. The pool keeps it up to date, and plans read it.

    Attributes:
        node: with what the preflight found filled in.
        active: legs in flight from this proxy.
        share: 0 < share <= 1: the part of its weight that slow start allows now.
        trials: while PROBING: requests in flight that try the half-open circuit. One is all it may get.
        reason: for operators: why it is in this state (the setting that was refused, the last fault).
        since: monotonic seconds when its state last changed; while it is out, when that began.
        joined_at: monotonic seconds when it was last let serve, after its preflight; -inf where it never was.
        silent: its last probe met nothing, see `NodeFault.silent`.
        outage: the last one that has ended; None where there was none.
        places: the load of each data-parallel rank.
        name: of the node.
        lightest: the place with the fewest tokens to compute, and of these the fewest legs.
        spot: the node and this place.
        usable_weight: the weight that it may use now.
        load: what its legs would be with one more, per unit of ``usable_weight``.
    """

    node: Node
    state: State = State.JOINING
    active: int = 0
    share: float = 1.0
    trials: int = 0
    reason: str = ""
    since: float = float("-inf")
    joined_at: float = float("-inf")
    silent: bool = False
    outage: Outage | None = None
    places: list[PlaceLoad] = dataclasses.field(default_factory=lambda: [PlaceLoad()])
    name: str = dataclasses.field(init=False)
    lightest: PlaceLoad = dataclasses.field(init=False)
    spot: "Spot" = dataclasses.field(init=False, repr=False)
    usable_weight: float = dataclasses.field(init=False)
    load: float = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.become(self.node, self.share)

    def become(self, node: Node, share: float) -> None:
        """The node is this one now, of which so much may be used. It may have more ranks than before, or fewer: legs on
        one that is gone count no more."""
        self.node, self.share, self.name = node, share, node.name
        ranks = len(self.places)
        self.places = [*self.places[: node.ranks], *map(PlaceLoad, range(ranks, node.ranks))]
        self.lightest = self.places[0]
        self.spot = self, self.lightest
        self.usable_weight = node.weight * share
        for place in self.places:
            self.changed(place)

    def changed(self, place: PlaceLoad) -> None:
        """The legs of a place are others than before. Every plan compares what is worked out here."""
        self.load = (self.active + 1) / self.usable_weight
        capacity = self.node.capacity
        place.crowd = capacity.crowd(place, self.node.ranks) if capacity is not None and place.sequences else place.legs
        self.prompts_changed()

    def prompts_changed(self) -> None:
        """The prompts that wait at a place are others than before; its legs are not."""
        if len(self.places) > 1:
            self.lightest = min(self.places, key=_LIGHTEST)
            self.spot = self, self.lightest

    def place(self, rank: int | None) -> PlaceLoad:
        """The place of a rank. Where none is named, vLLM chooses: the one with the fewest legs, as far as is known."""
        if len(self.places) == 1:
            return self.places[0]
        return min(self.places, key=_FEWEST_LEGS) if rank is None else self.places[rank]

    @property
    def footprint(self) -> Footprint:
        """The footprint of its decode legs in all its caches."""
        return Footprint(sum(map(_TOKENS, self.places)), sum(map(_SEQUENCES, self.places)))

    def legs(self, role: Role) -> int:
        """How many of its legs are there for a role. On a node of both, a prompt that is still to be computed counts as
        one of prefill, whichever leg it is of, and every other leg as one of decode."""
        if len(self.node.roles) == 1:
            return self.active
        prompts = sum(place.prompts for place in self.places)
        return prompts if role is Role.PREFILL else self.active - prompts

    def takes_requests(self) -> bool:
        """Whether a plan may send something here now."""
        return self.state is State.UP or (self.state is State.PROBING and self.trials == 0)

    def is_last_resort(self) -> bool:
        """Whether a plan may send something here where it could send it nowhere else."""
        return self.state is State.TERMINATING

    def has_room_for(self, more: Footprint, most: float) -> bool:
        """Whether its caches have room for a request, up to the part ``most`` of them; 0 for any.

        A node without a published capacity has room for any, and one on which no decode leg of ours runs for any one.
        """
        capacity = self.node.capacity
        if capacity is None or not most:
            return True
        held = sum(map(_SEQUENCES, self.places))
        return not held or (
            capacity.part_taken(sum(map(_TOKENS, self.places)) + more.tokens, held + more.sequences) <= most
        )


Spot: TypeAlias = tuple[NodeView, PlaceLoad]
"""A data-parallel rank of a node."""


MOST_SETS = 1024
"""Sets of places that are remembered."""


class PlaceSet:
    """Data-parallel ranks of nodes, each by the node's name and the rank.

    An index gives the same object for the same set, so that `ServingNodes.spots_of` has to look its nodes up only once.
    """

    __slots__ = ("places",)

    def __init__(self, places: Sequence[tuple[str, int]]) -> None:
        self.places = places


@dataclasses.dataclass(frozen=True, slots=True)
class Bars:
    """Why nodes of one cohort exchange no tickets: pairs by the names of prefill and decode node, nodes by name.

    Attributes:
        began: for pairs and nodes alike, when each was barred, in monotonic seconds; `Pool` notes it.
    """

    pairs: Mapping[tuple[str, str], str] = dataclasses.field(default_factory=lambda: MappingProxyType({}))
    nodes: Mapping[str, str] = dataclasses.field(default_factory=lambda: MappingProxyType({}))
    began: Mapping[tuple[str, str] | str, float] = dataclasses.field(
        default_factory=lambda: MappingProxyType({}), compare=False
    )

    def __bool__(self) -> bool:
        """Whether anything is barred at all."""
        return bool(self.pairs or self.nodes)

    def allow(self, prefill: str, decode: str) -> bool:
        """Whether a ticket may pass from one node to another; to itself none does."""
        return (
            prefill != decode
            and prefill not in self.nodes
            and decode not in self.nodes
            and (prefill, decode) not in self.pairs
        )

    def following(self, before: "Bars", now: float) -> "Bars":
        """The same, each with its time: now, or that of before where it was barred already."""
        barred: list[tuple[str, str] | str] = [*self.pairs, *self.nodes]
        began = {each: before.began.get(each, now) for each in barred}
        return dataclasses.replace(self, began=began)


NO_BARS = Bars()


@dataclasses.dataclass(frozen=True, slots=True)
class NodeGroup:
    """The prefill and decode nodes that take requests for one model, or those of one cohort of them.

    Attributes:
        cohort: its name; "" for all.
        prefills, decodes: in the order of joining. A node of both roles is in both.
    """

    cohort: str
    prefills: tuple[NodeView, ...]
    decodes: tuple[NodeView, ...]

    def of(self, role: Role) -> tuple[NodeView, ...]:
        """The nodes of one role."""
        return self.prefills if role is Role.PREFILL else self.decodes

    def has_pair(self) -> bool:
        """Whether there is a prefill node and another node that decodes."""
        return bool(self.prefills and self.decodes) and (
            len(self.prefills) > 1 or len(self.decodes) > 1 or self.prefills[0] is not self.decodes[0]
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Seeds:
    """The seeds by which nodes are hashed, each at its place; no weights where all are equal."""

    seeds: tuple[int, ...]
    weights: tuple[float, ...]


class ServingNodes:
    """The nodes that take requests for one model, and of those that are a last resort the ones that are needed.

    Attributes:
        all: of them.
        cohorts: those of each cohort, sorted by its name; nodes of unknown cohort are in each.
        by_name: each of them.
        spots: by role, each rank of these by its node's name and its number.
        lone_ranks: each of them has one rank.
        seeds: by role, in the order of ``all``.
        heaviest: by role, the greatest weight of a node; 1 where there is none.
        pairs: whether a prefill and a decode node are of one cohort, and two.
        alone: each role has one place at most, so that there is nothing to choose.
        shared: whether any node has both roles.
    """

    __slots__ = (
        "_spots_of", "all", "alone", "by_name", "cohorts", "heaviest", "lone_ranks", "pairs", "seeds", "shared", "spots"
    )  # fmt: skip

    def __init__(self, here: list[NodeView]) -> None:
        self.all = _group(here)
        names = sorted({view.node.cohort for view in here})
        self.cohorts = tuple(
            self.all if len(names) == 1 else _group([view for view in here if view.node.cohort in ("", name)], name)
            for name in names
        )
        self.by_name = {view.name: view for view in here}
        self.spots = {role: _spots(self.all.of(role)) for role in Role}
        self.lone_ranks = all(len(view.places) == 1 for view in here)
        self.seeds = {role: _seeds(self.all.of(role)) for role in Role}
        self.heaviest = {role: max((view.node.weight for view in self.all.of(role)), default=1.0) for role in Role}
        self.alone = all(sum(view.node.ranks for view in self.all.of(role)) < 2 for role in Role)
        self.pairs = any(group.has_pair() for group in self.cohorts)
        self.shared = any(len(view.node.roles) > 1 for view in here)
        self._spots_of: dict[Role, dict[PlaceSet, Sequence[Spot]]] = {role: {} for role in Role}

    def spots_of(self, role: Role, places: PlaceSet) -> Sequence[Spot]:
        """Those ranks of a set that are of nodes of this role."""
        known = self._spots_of[role]
        found = known.get(places)
        if found is None:
            if len(known) >= MOST_SETS:
                known.clear()
            found = known[places] = tuple(filter(None, map(self.spots[role].get, places.places)))
        return found


def _group(views: list[NodeView], cohort: str = "") -> NodeGroup:
    prefills, decodes = (tuple(view for view in views if role in view.node.roles) for role in Role)
    return NodeGroup(cohort, prefills, decodes)


def _spots(views: tuple[NodeView, ...]) -> dict[tuple[str, int], Spot]:
    return {(view.name, place.rank): (view, place) for view in views for place in view.places}


def _seeds(views: tuple[NodeView, ...]) -> Seeds:
    weights = tuple(view.node.weight for view in views)
    return Seeds(tuple(view.node.seed for view in views), weights if len(set(weights)) > 1 else ())


class PoolState:
    """All nodes, in the order of joining: which are there, in which state, which of them exchange tickets.

    It is another one as soon as any of that changes. Their load is not part of it: the views go on showing what it is.

    Attributes:
        nodes: all of them.
        bars: which exchange no tickets.
        load: how fast their places are.
        models: every name that a client may ask for, served by a decode node in whatever state, sorted.
        base_models: of these, the models themselves: no adapters, and no second names.
        keeps: any node's connector keeps conversations.
        by_name: each node by its name.
        rules: the first node of each `Node.match_rule`.
        rule_of: by a node's name, the index of its rule among these.
        least_block: the least `Node.match_block`; of a prompt that is no longer no place has anything.
    """

    def __init__(self, nodes: tuple[NodeView, ...], bars: Bars = NO_BARS, load: Load | None = None) -> None:
        self.nodes = nodes
        self.bars = bars
        self.load = load or Load()
        decodes = [view.node for view in nodes if Role.DECODE in view.node.roles]
        self.models = tuple(sorted({name for node in decodes for name in (node.model, *node.aliases) if name}))
        self.base_models = tuple(sorted({node.model for node in decodes if node.model}))
        self.keeps = any(view.node.keeps for view in nodes)
        self.by_name = {view.name: view.node for view in nodes}
        first: dict[tuple[object, ...], Node] = {}
        for view in nodes:
            first.setdefault(view.node.match_rule, view.node)
        self.rules, indices = tuple(first.values()), {rule: index for index, rule in enumerate(first)}
        self.rule_of = {view.name: indices[view.node.match_rule] for view in nodes}
        self.least_block = min((node.match_block for node in self.rules), default=0)
        self._may_serve_any = not all(node.model for node in decodes) or not decodes
        self._names = frozenset(name for view in nodes for name in (view.node.model, *view.node.aliases))
        self._served: dict[str, ServingNodes] = {}

    def knows(self, model: str) -> bool:
        """Whether a decode node, in whatever state, serves it or might: its model is unknown yet, or none is here."""
        return self._may_serve_any or model in self.models

    def served(self, model: str) -> ServingNodes:
        """The nodes that take requests for a model, or are the last resort, whatever a client may call it."""
        found = self._served.get(model)
        if found is None:
            known = model if model in self._names else ""  # so that clients' words do not fill the memory
            found = self._served.get(known)
            if found is None:
                found = self._served[known] = self._find(known)
        return found

    def _find(self, model: str) -> ServingNodes:
        views = [view for view in self.nodes if view.node.serves(model)]
        serving = [view.node for view in views if view.takes_requests()]
        needed = _needed(serving, [view.node for view in views if view.is_last_resort()])
        return ServingNodes([view for view in views if view.takes_requests() or view.name in needed])


def _needed(serving: list[Node], going: list[Node]) -> frozenset[str]:
    """The names of nodes that go away without which a role, or every pair, would be missing.

    During a surge the new nodes of one role serve first: until some of the other role do too, only the old ones, of
    which one terminates already, make a pair.
    """
    if not going or any(one.is_partner(other) for one in serving for other in serving):
        return frozenset()
    roles = {role for node in serving for role in node.roles}
    return frozenset(
        node.name
        for node in going
        if not roles.issuperset(node.roles)
        or (any(map(node.is_partner, (*serving, *going))) and not any(map(node.replaces, serving)))
    )
