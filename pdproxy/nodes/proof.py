"""Nodes are proved: a decode node must answer a prompt that a prefill node handed over as it answers it alone.

Settings that agree promise that the bytes of one node mean the same on the other; this is the proof. It is made

- when a node joins, or comes back: with one partner of its cohort, a proved one where there is one. Only if that fails
  or cannot be made, a second partner is tested. Partners that are not proved yet are proved with it, so that all that
  joined before the first node of the other role are proved by the time that one serves.
- in the background: pairs that failed, pairs that hand nothing over (`hand_overs`), and nodes that could not be
  tested, again and again with growing waits.

A test takes as long as the nodes take, up to minutes on hosts that are busy with something else. Where no decode node
serves, clients would get 503 for so long: after `PATIENCE` the joining one serves, and exchanges no tickets until its
tests are over.

Of two nodes that have both roles, each way is tested. That is O(nodes) tests, and misses a pair that is wrong though
each of the two is right with other nodes: all nodes of a cohort publish one fingerprint and run one release, so what
can go wrong goes wrong by the node.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Iterator, Mapping
from typing import Protocol

from pdproxy.clock import Clock
from pdproxy.nodes.evidence import Evidence, Pair
from pdproxy.nodes.node import Bars, Node, Role, State
from pdproxy.nodes.pool import Pool
from pdproxy.observe.labels import Proof

_LOG = logging.getLogger(__name__)

MOST_PARTNERS = 8
"""How many partners a joining node is tested or warmed up with: each costs requests on them."""
PATIENCE = 5.0
"""Seconds of tests after which a decode node serves where no other one does."""
WITNESSES = 2
"""How many partners are tested, one after the other, until a joining node passes with one."""


@dataclasses.dataclass(frozen=True, slots=True)
class ProofResult:
    """How a known-answer test ended; ``why`` is a sentence with the figures, for the operator."""

    proof: Proof
    why: str = ""


class HandOverTest(Protocol):
    """Sends test requests to a pair of nodes. Bounded in time; never raises for what nodes do."""

    async def ask(self, prefill: Node, decode: Node) -> ProofResult:
        """Hand a prompt over and compare the answer."""
        ...

    async def warm(self, prefill: Node, decode: Node) -> ProofResult:
        """Hand a tiny prompt over, so that the handshake of seconds is made before clients come; compare nothing."""
        ...


async def warm_up(pool: Pool, test: HandOverTest, clock: Clock, node: Node) -> None:
    """Warm the pairs of a joining node up, and prove nothing. Pairs that hand nothing over are not used."""
    partners = itertools.islice(partners_of(pool, node), MOST_PARTNERS)
    pairs = (pair for partner in partners for pair in pairs_of(node, partner))
    await asyncio.gather(*(_warm(pool, test, clock, *pair) for pair in pairs))


async def _warm(pool: Pool, test: HandOverTest, clock: Clock, prefill: Node, decode: Node) -> None:
    result = await test.warm(prefill, decode)
    if result.proof is Proof.NOT_HANDED_OVER:
        pool.hand_overs.not_handed_over((prefill.name, decode.name), result.why, clock.now())
    elif result.proof is not Proof.PASSED:
        _LOG.warning("no warm-up from %s to %s: %s", prefill.name, decode.name, result.why)


_UNDER_WAY = "their known-answer test is still under way"


class NothingCompared:
    """A hand-over test that compares no answers: a pair whose tickets were of no use is warmed up, and its next
    requests decide."""

    def __init__(self, test: HandOverTest) -> None:
        self._test = test

    async def ask(self, prefill: Node, decode: Node) -> ProofResult:
        """See `HandOverTest`."""
        result = await self._test.warm(prefill, decode)
        return result if result.proof is Proof.NOT_HANDED_OVER else ProofResult(Proof.PASSED)

    async def warm(self, prefill: Node, decode: Node) -> ProofResult:
        """See `HandOverTest`."""
        return await self._test.warm(prefill, decode)


class Prover:
    """Tests pairs, and bars in the pool those that failed, and those whose tickets were of no use. `join` is for
    joining nodes, `run` for the background."""

    def __init__(self, pool: Pool, test: HandOverTest, clock: Clock) -> None:
        self._pool = pool
        self._test = test
        self._clock = clock
        self._evidence = Evidence()
        self._under_test: set[str] = set()
        self._joins: dict[str, int] = {}
        self._turns = itertools.count()
        self._early: dict[str, Mapping[Pair, str]] = {}
        """Nodes that serve while they are tested, and the pairs that exchange no tickets for it."""

    def proved(self, name: str) -> bool:
        """Whether a node passed a test since it joined."""
        return self._evidence.proved(name)

    async def join(self, node: Node) -> None:
        """Prove the node, and with it partners that are not proved; what failed is barred when this returns.

        It may serve before that (`PATIENCE`).
        """
        self._joins[node.name] = next(self._turns)
        possible = [view.node.name for view in self._pool.state().nodes if could_pair(node, view.node)]
        self._evidence.node_joins(node.name, self._clock.now(), possible)
        self._pool.hand_overs.node_joins(node.name)
        partners = sorted(partners_of(self._pool, node), key=self._rank)
        if not partners:
            self._publish()
            return  # at once: of two nodes that join at the same time, the second must find the first one serving
        unproved = [partner for partner in partners[1:] if self._rank(partner) == (True, False)][:MOST_PARTNERS]
        rest = [partner for partner in partners[1:] if partner not in unproved][: MOST_PARTNERS - len(unproved)]
        with self._testing(node, partners[0], *unproved), self._serving_soon(node):
            await asyncio.gather(
                self._prove(node, partners),
                *(self._ask_both_ways(node, partner) for partner in unproved),
                *(_warm(self._pool, self._test, self._clock, *pair) for each in rest for pair in pairs_of(node, each)),
            )
        self._publish()

    @contextlib.contextmanager
    def _serving_soon(self, node: Node) -> Iterator[None]:
        """While inside, the node is tested; where no other one serves, it does after `PATIENCE`."""
        waiting = asyncio.get_running_loop().create_task(self._serve_early(node))
        try:
            yield
        finally:
            waiting.cancel()
            self._early.pop(node.name, None)

    async def _serve_early(self, node: Node) -> None:
        await self._clock.sleep(PATIENCE)
        others = [each for each in _serving(self._pool) if Role.DECODE in each.roles and each.model == node.model]
        if Role.DECODE in node.roles and not others and node.name in self._pool:
            pairs = (pair for each in partners_of(self._pool, node) for pair in pairs_of(node, each))
            self._early[node.name] = {(prefill.name, decode.name): _UNDER_WAY for prefill, decode in pairs}
            self._publish()
            self._pool.bring_up(node)

    async def look(self) -> None:
        """Bar pairs whose tickets are of no use, and repeat tests that failed or could not be made, one pair at a time;
        to be called each second."""
        if self._pool.hand_overs.changed:
            self._publish()
        for prefill, decode in self._due():
            await self._ask(prefill, decode)

    async def _prove(self, node: Node, partners: list[Node]) -> None:
        for partner in partners[:WITNESSES]:
            if await self._ask_both_ways(node, partner):
                return

    async def _ask_both_ways(self, node: Node, partner: Node) -> bool:
        """Test the two, one way after the other where both have both roles; whether all is well."""
        return all([await self._ask(*pair) is Proof.PASSED for pair in pairs_of(node, partner)])

    def _rank(self, partner: Node) -> tuple[bool, bool]:
        """Whether it is unproved, and whether it is under test: proved partners come first."""
        return not self._evidence.proved(partner.name), partner.name in self._under_test

    async def _ask(self, prefill: Node, decode: Node) -> Proof:
        pair = prefill.name, decode.name
        joins = self._joins_of(pair)
        with self._testing(prefill, decode):
            result = await self._test.ask(prefill, decode)
        if self._joins_of(pair) == joins:
            self._record(pair, result)
        return result.proof

    @contextlib.contextmanager
    def _testing(self, *nodes: Node) -> Iterator[None]:
        """While inside, no other test need prove these nodes."""
        added = {node.name for node in nodes} - self._under_test
        self._under_test |= added
        try:
            yield
        finally:
            self._under_test -= added

    def _joins_of(self, pair: Pair) -> tuple[int | None, ...]:
        """Changes when one of the two joins anew: earlier results are about another node then."""
        return tuple(self._joins.get(name) for name in pair)

    def _record(self, pair: Pair, result: ProofResult) -> None:
        now = self._clock.now()
        match result.proof:
            case Proof.PASSED:
                self._evidence.record_passed(pair)
                self._pool.hand_overs.passed(pair)
            case Proof.FAILED:
                self._evidence.record_failed(pair, result.why, now)
                self._pool.hand_overs.not_passed(pair, now)
            case Proof.NOT_HANDED_OVER:
                self._evidence.record_unanswered(pair, result.why, now)
                self._pool.hand_overs.not_handed_over(pair, result.why, now)
            case Proof.UNANSWERED:
                _LOG.warning("no known-answer test from %s to %s: %s", *pair, result.why)
                self._evidence.record_unanswered(pair, result.why, now)
                self._pool.hand_overs.not_passed(pair, now)
        self._publish()

    def _publish(self) -> None:
        names = frozenset(view.node.name for view in self._pool.state().nodes)
        self._joins = {name: join for name, join in self._joins.items() if name in names}
        self._evidence.keep_only(names)
        hand_overs, failed = self._pool.hand_overs, self._evidence.bars()
        hand_overs.keep_only(names)
        hand_overs.changed = False
        early = {pair: why for pairs in self._early.values() for pair, why in pairs.items()}
        bars = Bars({**early, **hand_overs.bars(), **failed.pairs}, failed.nodes)
        self._pool.bar(bars)

    def _due(self) -> list[tuple[Node, Node]]:
        """Pairs to test now: those that failed, and unproved nodes, each with one partner."""
        now, serving = self._clock.now(), {node.name: node for node in _serving(self._pool)}
        failed = [
            (serving[prefill], serving[decode])
            for prefill, decode in dict.fromkeys([*self._evidence.due(now), *self._pool.hand_overs.due(now)])
            if prefill in serving and decode in serving
        ]
        unproved = (
            self._next_pair(node)
            for name, node in serving.items()
            if name in self._joins and name not in self._under_test and self._evidence.unproved_due(name, now)
        )
        return failed + [pair for pair in unproved if pair is not None]

    def _next_pair(self, node: Node) -> tuple[Node, Node] | None:
        """The node with one of its partners, best a proved one; none that is barred, which has a time of its own.
        Partners take turns."""
        pairs = [pair for partner in partners_of(self._pool, node) for pair in pairs_of(node, partner)]
        untried = [pair for pair in pairs if (pair[0].name, pair[1].name) not in self._pool.bars.pairs]
        best = [pair for pair in untried if any(self._evidence.proved(each.name) for each in pair)] or untried
        return best[next(self._turns) % len(best)] if best else None


def partners_of(pool: Pool, node: Node) -> Iterator[Node]:
    """Serving nodes that it could exchange tickets with, in the order of joining."""
    return (other for other in _serving(pool) if could_pair(node, other))


def could_pair(node: Node, other: Node) -> bool:
    """Whether a ticket could pass between two nodes, one way or both: by roles, cohort and model, which is known."""
    return node.is_partner(other) and node.model == other.model != ""


def pairs_of(node: Node, partner: Node) -> list[tuple[Node, Node]]:
    """The two of them, the prefill node first; both ways where both have both roles."""
    return [pair for pair in ((node, partner), (partner, node)) if pair[0].may_hand_to(pair[1])]


def _serving(pool: Pool) -> list[Node]:
    return [view.node for view in pool.state().nodes if view.state is State.UP]
