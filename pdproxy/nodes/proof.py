"""Nodes are proved: a pair must answer a question handed over as the decode node answers it alone.

Settings that agree promise that the bytes of one node mean the same on the other; this is the proof. It is asked for

- when a node joins, or comes back: with one partner of its cohort, a proved one where there is one. Only if that fails
  or comes to nothing, a second partner is asked. Partners that are not proved yet are proved with it, so that all that
  joined before the first node of the other role are proved by the time that one serves.
- in the background: pairs that failed and nodes that could not be asked, again and again with growing waits.

That is O(nodes) tests, and says nothing of a pair that is wrong though each of the two is right with somebody else: all
nodes of a cohort publish one fingerprint and run one release, so what can go wrong goes wrong by the node.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Iterable, Iterator
from typing import Protocol

from pdproxy.clock import Clock
from pdproxy.nodes.evidence import Backoff, Evidence, Pair
from pdproxy.nodes.node import Bars, Node, Role, State
from pdproxy.nodes.pool import Pool
from pdproxy.observe.labels import Proof

_LOG = logging.getLogger(__name__)

MOST_PARTNERS = 8
"""With how many partners a joining node has to do before it serves: each costs requests on them."""
WITNESSES = 2
"""How many partners are asked, one after the other, until a joining node passes with one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """How a known-answer test ended; ``why`` is a sentence with the figures, for the operator."""

    proof: Proof
    why: str = ""


class HandOverTest(Protocol):
    """Asks two nodes."""

    async def ask(self, prefill: Node, decode: Node) -> Result:
        """Hand a prompt over and compare. Bounded in time; never raises for what nodes do."""
        ...

    async def warm(self, prefill: Node, decode: Node) -> None:
        """Hand a tiny prompt over, so that the handshake of seconds is made before clients come. As `ask`."""
        ...


class Introduction(Protocol):
    """What a node goes through between its preflight and its first request."""

    async def join(self, node: Node) -> None:
        """Bounded in time; whatever comes of it, the node serves afterwards."""
        ...


class WarmUp:
    """An `Introduction` that only pays for handshakes.

    Args:
        pool: where partners are found.
        test: the way to the nodes.
    """

    def __init__(self, pool: Pool, test: HandOverTest) -> None:
        self._pool = pool
        self._test = test

    async def join(self, node: Node) -> None:
        """Warm the pairs that the node makes."""
        partners = itertools.islice(partners_of(self._pool, node), MOST_PARTNERS)
        await asyncio.gather(*(self._test.warm(*in_order(node, partner)) for partner in partners))


class Prover:
    """An `Introduction` by known-answer tests; tells the pool which pairs are barred. `run` tries these again.

    Args:
        pool: where partners are found, and what is told.
        test: the way to the nodes.
        clock: for waits.
    """

    def __init__(self, pool: Pool, test: HandOverTest, clock: Clock, backoff: Backoff | None = None) -> None:
        self._pool = pool
        self._test = test
        self._clock = clock
        self._evidence = Evidence(backoff)
        self._in_hand: set[str] = set()
        self._joins: dict[str, int] = {}
        self._turns = itertools.count()

    async def join(self, node: Node) -> None:
        """Prove the node, and with it partners that are not proved; what failed is barred when this returns."""
        self._joins[node.name] = next(self._turns)
        fellows = [view.node.name for view in self._pool.snapshot().nodes if could_pair(node, view.node)]
        self._evidence.starts_anew(node.name, self._clock.now(), fellows)
        partners = sorted(partners_of(self._pool, node), key=self._rank)
        if not partners:
            self._publish()
            return  # at once: of two nodes that join at the same time, the second must find the first one serving
        unproved = [partner for partner in partners[1:] if not self._settled(partner.name)][:MOST_PARTNERS]
        rest = [partner for partner in partners[1:] if partner not in unproved][: MOST_PARTNERS - len(unproved)]
        with self._in_hands(node, *partners[:1], *unproved):
            await asyncio.gather(
                self._prove(node, partners),
                *(self._ask(*in_order(node, partner)) for partner in unproved),
                *(self._test.warm(*in_order(node, partner)) for partner in rest),
            )

    async def run(self) -> None:
        """Try again what failed or could not be asked, one pair at a time, until cancelled."""
        while True:
            for prefill, decode in self._due():
                await self._ask(prefill, decode)
            await self._clock.sleep(1.0)

    async def _prove(self, node: Node, partners: list[Node]) -> None:
        for partner in partners[:WITNESSES]:
            if await self._ask(*in_order(node, partner)) is Proof.PASSED:
                return

    def _rank(self, partner: Node) -> tuple[bool, bool]:
        """Proved nodes first, then those that nobody asks at this moment."""
        return not self._evidence.proved(partner.name), partner.name in self._in_hand

    def _settled(self, name: str) -> bool:
        """Whether a joining node need not prove this partner: it is proved, or being proved."""
        return self._evidence.proved(name) or name in self._in_hand

    async def _ask(self, prefill: Node, decode: Node) -> Proof:
        pair = prefill.name, decode.name
        asked = self._incarnations(pair)
        with self._in_hands(prefill, decode):
            result = await self._test.ask(prefill, decode)
        if self._incarnations(pair) == asked:
            self._record(pair, result)
        return result.proof

    @contextlib.contextmanager
    def _in_hands(self, *nodes: Node) -> Iterator[None]:
        """While inside, nobody else need prove these nodes."""
        taken = {node.name for node in nodes} - self._in_hand
        self._in_hand |= taken
        try:
            yield
        finally:
            self._in_hand -= taken

    def _incarnations(self, pair: Pair) -> tuple[int | None, ...]:
        return tuple(self._joins.get(name) for name in pair)

    def _record(self, pair: Pair, result: Result) -> None:
        now = self._clock.now()
        match result.proof:
            case Proof.PASSED:
                self._evidence.passes(pair)
            case Proof.FAILED:
                self._evidence.fails(pair, result.why, now)
            case Proof.UNANSWERED:
                _LOG.warning("no known-answer test from %s to %s: %s", *pair, result.why)
                self._evidence.is_silent(pair, result.why, now)
        self._publish()

    def _publish(self) -> None:
        names = frozenset(view.node.name for view in self._pool.snapshot().nodes)
        self._joins = {name: join for name, join in self._joins.items() if name in names}
        self._evidence.keep_only(names)
        bars = self._evidence.bars()
        _log_changes(self._pool.bars, bars)
        self._pool.bar(bars)

    def _due(self) -> list[tuple[Node, Node]]:
        """Pairs to try now: those that failed, and unproved nodes, each with one partner."""
        now, serving = self._clock.now(), {node.name: node for node in _serving(self._pool)}
        failed = [
            (serving[prefill], serving[decode])
            for prefill, decode in self._evidence.due(now)
            if prefill in serving and decode in serving
        ]
        unproved = (
            node for node in serving.values() if self._joined(node) and self._evidence.unproved_due(node.name, now)
        )
        return failed + list(self._with_partners(unproved))

    def _joined(self, node: Node) -> bool:
        """Whether the node came in through `join`, and nobody asks it at this moment."""
        return node.name in self._joins and node.name not in self._in_hand

    def _with_partners(self, nodes: Iterable[Node]) -> Iterator[tuple[Node, Node]]:
        for node in nodes:
            untried = [partner for partner in partners_of(self._pool, node) if not self._failed(node, partner)]
            proved = [partner for partner in untried if self._evidence.proved(partner.name)] or untried
            if proved:
                yield in_order(node, proved[next(self._turns) % len(proved)])

    def _failed(self, node: Node, partner: Node) -> bool:
        prefill, decode = in_order(node, partner)
        return self._evidence.failed((prefill.name, decode.name)) is not None


def partners_of(pool: Pool, node: Node) -> Iterator[Node]:
    """Serving nodes that it could exchange tickets with, in the order of joining."""
    return (other for other in _serving(pool) if could_pair(node, other))


def could_pair(node: Node, other: Node) -> bool:
    """Whether two nodes are of two roles, one cohort and one model, which is known."""
    return node.role is not other.role and node.pairs_with(other.cohort) and node.model == other.model != ""


def in_order(node: Node, partner: Node) -> tuple[Node, Node]:
    """The two of them, the prefill node first."""
    return (node, partner) if node.role is Role.PREFILL else (partner, node)


def _serving(pool: Pool) -> list[Node]:
    return [view.node for view in pool.snapshot().nodes if view.state is State.UP]


def _log_changes(before: Bars, after: Bars) -> None:
    """One sentence for each bar that is new, and for each that was lifted."""
    for name in after.nodes.keys() - before.nodes.keys():
        _LOG.error(
            "node %s exchanges no tickets with any node: it failed where others pass: %s", name, after.nodes[name]
        )
    for pair in after.pairs.keys() - before.pairs.keys():
        _LOG.error("prefill node %s and decode node %s exchange no tickets: %s", *pair, after.pairs[pair])
    for name in before.nodes.keys() - after.nodes.keys():
        _LOG.info("node %s exchanges tickets again", name)
    for pair in before.pairs.keys() - after.pairs.keys():
        _LOG.info("prefill node %s and decode node %s exchange tickets again", *pair)
