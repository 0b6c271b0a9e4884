"""Snapshots are never out of date, though the pool makes anew only what has changed."""

import contextlib
import dataclasses

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, consumes, invariant, multiple, rule

from pdproxy.errors import Fault
from pdproxy.nodes.circuit_breaker import CircuitBreakerConfig
from pdproxy.nodes.node import Bars, Node, Role, Roster, Snapshot
from pdproxy.nodes.outlier import Source, Verdict
from pdproxy.nodes.pool import DuplicateNode, Pool, UnknownNode
from pdproxy.nodes.pool_entry import Slot
from pdproxy.observe.labels import Leg
from tests.fakes.clock import FakeClock
from tests.fakes.refused import serve

CONFIG = CircuitBreakerConfig(failures=2, cool_down=10, slow_start=20)
NAMES = st.sampled_from(["p1", "p2", "d1", "d2"])
MODELS = ("m", "n", "lora", "", "nobody")


def node(name: str, **more: object) -> Node:
    role = Role.PREFILL if name.startswith("p") else Role.DECODE
    return Node(name, f"http://{name}", role, **more)  # type: ignore[arg-type]


def fresh(pool: Pool) -> Snapshot:
    """What a pool that remembers nothing would show."""
    now = pool._clock.now()
    return Snapshot(tuple(pool._refresh(entry, now).view(now) for entry in pool._entries.values()), pool.bars)


class ChangingPool(RuleBasedStateMachine):
    """Everything that happens to a pool, in any order."""

    slots: Bundle[Slot] = Bundle("slots")

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.pool = Pool(self.clock, CONFIG)

    @rule(name=NAMES)
    def add(self, name: str) -> None:
        with contextlib.suppress(DuplicateNode):
            self.pool.add(node(name))

    @rule(name=NAMES, model=st.sampled_from("mn"), cohort=st.sampled_from(["", "a", "b"]), lora=st.booleans())
    def admit(self, name: str, model: str, cohort: str, lora: bool) -> None:
        with contextlib.suppress(UnknownNode):
            self.pool.admit(node(name, model=model, cohort=cohort, aliases=("lora",) if lora else ()))

    @rule(name=NAMES, weight=st.sampled_from([0.5, 2.0]))
    def amend(self, name: str, weight: float) -> None:
        with contextlib.suppress(UnknownNode):
            self.pool.amend(dataclasses.replace(self.pool.configured(name), weight=weight))

    @rule(name=NAMES, change=st.sampled_from([Pool.rejoin, Pool.drain, Pool.terminate, Pool.remove]))
    def change(self, name: str, change: object) -> None:
        with contextlib.suppress(UnknownNode):
            change(self.pool, name)  # type: ignore[operator]

    @rule(name=NAMES, reason=st.sampled_from("xy"), change=st.sampled_from([Pool.refuse, Pool.set_join_reason]))
    def explain(self, name: str, reason: str, change: object) -> None:
        with contextlib.suppress(UnknownNode):
            change(self.pool, name, reason)  # type: ignore[operator]

    @rule(name=NAMES)
    def serve(self, name: str) -> None:
        serve(self.pool, name)

    @rule(name=NAMES, request=st.sampled_from(["r1", "r2", "r3"]), verdict=st.sampled_from(Verdict))
    def fail(self, name: str, request: str, verdict: Verdict) -> None:
        self.pool.leg_failed(name, Leg.DECODE, Fault.RESET, Source(request), verdict)

    @rule(name=NAMES, fault=st.sampled_from([None, Fault.RESET]))
    def probed(self, name: str, fault: Fault | None) -> None:
        self.pool.probed(name, fault, self.clock.now())

    @rule(target=slots, name=NAMES)
    def acquire(self, name: str) -> Slot | MultipleResults[Slot]:
        return self.pool.acquire(name) if name in self.pool else multiple()

    @rule(slot=consumes(slots))
    def release(self, slot: Slot) -> None:
        slot.release()

    @rule(pairs=st.sets(st.tuples(st.sampled_from(["p1", "p2"]), st.sampled_from(["d1", "d2"]))))
    def bar(self, pairs: set[tuple[str, str]]) -> None:
        self.pool.bar(Bars(dict.fromkeys(pairs, "")))

    @rule(seconds=st.sampled_from([0.1, 0.5, 4.0, 10.0, 25.0]) | st.floats(0, 30))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def look(self) -> None:
        """A second look shows the same."""
        assert self.pool.snapshot() == self.pool.snapshot()

    @invariant()
    def the_snapshot_is_as_if_made_anew(self) -> None:
        shown, wanted = self.pool.snapshot(), fresh(self.pool)
        assert shown == wanted
        assert [view.load for view in shown.nodes] == [view.load for view in wanted.nodes]
        assert [self.pool.view(view.node.name) for view in wanted.nodes] == list(wanted.nodes)

    @invariant()
    def the_roster_is_as_if_made_anew(self) -> None:
        shown, wanted = self.pool.snapshot().roster, Roster(fresh(self.pool).nodes)
        assert shown.models == wanted.models
        for model in MODELS:
            assert (shown.knows(model), shown.served(model)) == (wanted.knows(model), wanted.served(model))


TestChangingPool = ChangingPool.TestCase


def test_what_has_not_changed_is_not_made_again() -> None:
    pool = Pool(FakeClock(), CONFIG)
    for name in ("p1", "d1"):
        pool.add(node(name))
    before = pool.snapshot()
    assert pool.snapshot() is before
    pool.acquire("p1")
    after = pool.snapshot()
    assert (after.nodes[0].active, after.nodes[1]) == (1, before.nodes[1])
    assert after.nodes[1] is before.nodes[1]
    assert after.roster is before.roster
    assert before.nodes[0].active == 0, "an earlier snapshot stays as it was"


def test_a_leg_that_ends_after_its_node_left_brings_it_not_back() -> None:
    pool = Pool(FakeClock(), CONFIG)
    pool.add(node("d1"))
    slot, other = pool.acquire("d1"), pool.acquire("d1")
    pool.remove("d1")
    slot.release()
    assert pool.snapshot().nodes == ()
    pool.add(node("d1"))
    other.release()
    assert [view.active for view in pool.snapshot().nodes] == [0]


def test_a_node_that_leaves_while_it_starts_slowly_is_not_looked_for_later() -> None:
    clock = FakeClock()
    pool = Pool(clock, CONFIG)
    pool.add(node("d1"))
    pool.admit(node("d1"))
    assert pool.snapshot().nodes[0].share < 1.0
    pool.remove("d1")
    clock.advance(30)
    assert pool.snapshot().nodes == ()
