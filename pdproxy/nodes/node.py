"""What a node's cache holds, as its connector tells it: pure.

Values about nodes: pure, no I/O."""

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from pdproxy.request import Headers

CAPACITY_METRICS = "pdproxy_connector_capacity_"
"""What the names of the gauges begin with."""

Sample = tuple[str, Mapping[str, str], float]
"""A metric's name, labels and value."""


class Binding(enum.StrEnum):
    """What runs out first with sequences of the greatest length."""

    ATTENTION = "attention"
    STATE = "state"
    NOTHING = "nothing"


@dataclasses.dataclass(frozen=True, slots=True)
class Capacity:
    """Of all engines behind one address together.

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


def read_capacity(samples: Sequence[Sample]) -> Capacity | None:
    """Out of the gauges of a node; None where they are missing or make no sense (an engine that has not told yet)."""
    told = [
        (name.removeprefix(CAPACITY_METRICS), labels, int(value))
        for name, labels, value in samples
        if math.isfinite(value)
    ]
    tokens = [value for name, _, value in told if name == "tokens"]
    state, longest = _sequences(told, "state"), _sequences(told, "max_model_len")
    binding = next((labels.get("group") for name, labels, value in told if name == "binding" and value), None)
    if not tokens or not longest or binding not in set(Binding):
        return None
    return Capacity(sum(tokens), sum(state) if state else None, sum(longest), Binding(binding))


def _sequences(told: Sequence[tuple[str, Mapping[str, str], int]], limit: str) -> list[int]:
    return [value for name, labels, value in told if name == "sequences" and labels.get("limit") == limit]


RANK_HEADER = "x-data-parallel-rank"
"""Which of its data-parallel ranks a server is to use. vLLM 0.32 heeds it for completions, chat and messages, not for
responses, and picks one by load where it is missing."""


class Role(enum.StrEnum):
    """What a node is asked to do."""

    PREFILL = "prefill"
    DECODE = "decode"


class State(enum.StrEnum):
    """Where a node stands in its life."""

    JOINING = "joining"
    """Preflight and warm-up are under way: no requests."""
    UP = "up"
    PROBING = "probing"
    """The circuit is half open: one request at a time."""
    DOWN = "down"
    """The circuit is open."""
    DRAINING = "draining"
    """No new requests; running ones finish or migrate."""
    REFUSED = "refused"
    """The preflight found a setting that cannot work; see the reason."""


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A vLLM server. Data-parallel ranks behind its one address are one node: it shares requests out among them.

    Attributes:
        name: unique, safe to show to operators (never to clients).
        url: the base, without a trailing slash.
        role: what it is asked to do.
        model: the model it serves, as clients name it; "" until known.
        aliases: further names that are served here (LoRA).
        weight: relative share of requests, > 0.
        cohort: nodes pair only within one cohort (versions of vLLM and connector, fingerprint); "" pairs with all.
        capacity: what its cache holds; None until known, and of a node that does not tell.
        ranks: data-parallel ranks behind the address, each with blocks and hand-overs of its own.
        fingerprint: what the bytes of its KV cache depend on, value by part; empty where it does not say.
        block_size: tokens in an attention block; 0 where it does not say.
        max_model_len: the longest sequence in tokens; 0 where it does not say.
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

    def each_rank(self) -> tuple[Headers, ...]:
        """The headers that bring a request to each of its ranks; a lone one needs none."""
        return tuple(((RANK_HEADER, str(rank)),) for rank in range(self.ranks)) if self.ranks > 1 else ((),)

    def serves(self, model: str) -> bool:
        """Whether clients may ask this node for ``model``; a node whose model is unknown is taken to serve any."""
        return self.model in ("", model) or model in self.aliases

    def pairs_with(self, cohort: str) -> bool:
        """Whether a ticket can pass between this node and a node of ``cohort``."""
        return "" in (self.cohort, cohort) or self.cohort == cohort


@dataclasses.dataclass(frozen=True, slots=True)
class NodeView:
    """One node in a snapshot: its state and what runs on it now."""

    node: Node
    state: State
    active: int
    """Legs in flight from this proxy."""
    share: float = 1.0
    """0 < share <= 1: the part of its weight that slow start allows now."""
    trials: int = 0
    """While PROBING: requests taken since the circuit became half open and not yet judged. One is all it may get."""
    reason: str = ""
    """For operators: why it is in this state (the setting that was refused, the last fault)."""

    def takes_requests(self) -> bool:
        """Whether a plan may send something here now."""
        return self.state is State.UP or (self.state is State.PROBING and self.trials == 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Bars:
    """Which nodes of one cohort exchange no tickets all the same, each with a sentence that says why.

    Attributes:
        pairs: by the names of prefill and decode node.
        nodes: by name: nodes that exchange none with any other.
    """

    pairs: Mapping[tuple[str, str], str] = dataclasses.field(default_factory=lambda: MappingProxyType({}))
    nodes: Mapping[str, str] = dataclasses.field(default_factory=lambda: MappingProxyType({}))

    def __bool__(self) -> bool:
        """Whether anything is barred at all."""
        return bool(self.pairs or self.nodes)

    def allow(self, prefill: str, decode: str) -> bool:
        """Whether a ticket may pass from one node to the other."""
        return prefill not in self.nodes and decode not in self.nodes and (prefill, decode) not in self.pairs

    def of(self, name: str) -> tuple[str, ...]:
        """From whom a node is barred, and why: a sentence for each."""
        pairs = tuple(
            f"no tickets with {decode if name == prefill else prefill}: {why}"
            for (prefill, decode), why in self.pairs.items()
            if name in (prefill, decode)
        )
        return (f"no tickets with any node: {self.nodes[name]}", *pairs) if name in self.nodes else pairs


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """All nodes at one moment; what a plan is made from."""

    nodes: tuple[NodeView, ...]
    bars: Bars = Bars()
