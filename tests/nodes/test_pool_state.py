"""The pool as plans see it is never out of date, though it is not made anew for each."""

import contextlib
import dataclasses

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, consumes, invariant, multiple, rule

from pdproxy.errors import Fault
from pdproxy.nodes.circuit_breaker import CircuitBreakerConfig
from pdproxy.nodes.node import Bars, Footprint, Node, NodeView, PoolState, Role, State
from pdproxy.nodes.outlier import FailureEvidence, LegOrigin
from pdproxy.nodes.pool import DuplicateNode, Pool, UnknownNode
from pdproxy.nodes.pool_entry import LegLoad, PoolEntry, Slot
from pdproxy.observe.labels import Leg
from tests.fakes.clock import FakeClock
from tests.fakes.refused import serve

CONFIG = CircuitBreakerConfig(failures=2, cool_down=10, slow_start=20)
NAMES = st.sampled_from(["p1", "p2", "d1", "d2"])
MODELS = ("m", "n", "lora", "", "nobody")


def node(name: str, **more: object) -> Node:
    role = Role.PREFILL if name.startswith("p") else Role.DECODE
    return Node(name, f"http://{name}", (role,), **more)  # type: ignore[arg-type]


LOADS = st.sampled_from([LegLoad(), LegLoad(queued=70, key="k"), LegLoad(None, 0, Footprint(50, 1))])


def fresh(entry: PoolEntry, now: float) -> NodeView:
    """A node as a pool that remembers nothing would show it, but for its load."""
    kept = entry.view
    return NodeView(entry.node, entry.state(), kept.active, entry.circuit.share(now), kept.trials)


def shown(view: NodeView) -> tuple[object, ...]:
    """The part of the pool that plans read."""
    return view.node, view.name, view.state, view.share, view.usable_weight, view.load, view.trials, len(view.places)


class ChangingPool(RuleBasedStateMachine):
    """Everything that happens to a pool, in any order."""

    slots: Bundle[Slot] = Bundle("slots")

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.pool = Pool(self.clock, CONFIG)
        self.running: dict[Slot, tuple[NodeView, LegLoad]] = {}

    @rule(name=NAMES)
    def add(self, name: str) -> None:
        with contextlib.suppress(DuplicateNode):
            self.pool.add(node(name))

    @rule(name=NAMES, model=st.sampled_from("mn"), cohort=st.sampled_from(["", "a", "b"]), lora=st.booleans())
    def admit(self, name: str, model: str, cohort: str, lora: bool) -> None:
        with contextlib.suppress(UnknownNode):
            self.pool.bring_up(node(name, model=model, cohort=cohort, aliases=("lora",) if lora else ()))

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

    @rule(name=NAMES, request=st.sampled_from(["r1", "r2", "r3"]), evidence=st.sampled_from(FailureEvidence))
    def fail(self, name: str, request: str, evidence: FailureEvidence) -> None:
        self.pool.leg_failed(name, Leg.DECODE, Fault.RESET, LegOrigin(request), evidence)

    @rule(name=NAMES, fault=st.sampled_from([None, Fault.RESET]))
    def probed(self, name: str, fault: Fault | None) -> None:
        self.pool.probed(name, fault, self.clock.now())

    @rule(target=slots, name=NAMES, load=LOADS)
    def acquire(self, name: str, load: LegLoad) -> Slot | MultipleResults[Slot]:
        if name not in self.pool:
            return multiple()
        slot = self.pool.acquire(name, load)
        self.running[slot] = (self.pool.view(name), load)
        return slot

    @rule(slot=slots, tokens=st.sampled_from([None, 50]))
    def compute(self, slot: Slot, tokens: int | None) -> None:
        slot.computed(tokens)
        if slot in self.running:
            view, load = self.running[slot]
            self.running[slot] = (view, msgspec.structs.replace(load, queued=None))

    @rule(slot=consumes(slots))
    def release(self, slot: Slot) -> None:
        slot.release()
        self.running.pop(slot, None)

    @rule(pairs=st.sets(st.tuples(st.sampled_from(["p1", "p2"]), st.sampled_from(["d1", "d2"]))))
    def bar(self, pairs: set[tuple[str, str]]) -> None:
        self.pool.bar(Bars(dict.fromkeys(pairs, "")))

    @rule(seconds=st.sampled_from([0.1, 0.5, 4.0, 10.0, 25.0]) | st.floats(0, 30))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def the_nodes_are_as_if_looked_at_anew(self) -> None:
        now, entries = self.clock.now(), self.pool._entries.values()
        views = self.pool.state().nodes
        assert [shown(view) for view in views] == [shown(fresh(entry, now)) for entry in entries]
        assert [self.pool.view(view.name) for view in views] == list(views)

    @invariant()
    def the_load_is_that_of_what_runs(self) -> None:
        for view in self.pool.state().nodes:
            loads = [load for on, load in self.running.values() if on is view]
            (place,) = view.places
            assert view.active == place.legs == len(loads)
            assert place.queued == sum(load.queued or 0 for load in loads)
            assert place.prompts == sum(load.queued is not None for load in loads) == sum(place.keys.values())
            assert view.footprint == Footprint(
                sum(load.footprint.tokens for load in loads),
                sum(load.footprint.sequences for load in loads),
            )

    @invariant()
    def who_serves_what_is_as_if_looked_at_anew(self) -> None:
        now = self.pool.state()
        anew = PoolState(now.nodes, self.pool.bars)
        assert (now.models, now.base_models, now.bars) == (anew.models, anew.base_models, anew.bars)
        for model in MODELS:
            assert now.knows(model) == anew.knows(model)
            served, wanted = now.served(model), anew.served(model)
            assert [(group.cohort, group.prefills, group.decodes) for group in served.cohorts] == [
                (group.cohort, group.prefills, group.decodes) for group in wanted.cohorts
            ]
            assert (served.all, served.by_name, served.seeds, served.heaviest, served.pairs, served.alone) == (
                wanted.all, wanted.by_name, wanted.seeds, wanted.heaviest, wanted.pairs, wanted.alone
            )  # fmt: skip


TestChangingPool = ChangingPool.TestCase


def test_who_serves_what_is_not_looked_for_again_for_a_leg_more_or_less() -> None:
    pool = Pool(FakeClock(), CONFIG)
    for name in ("p1", "d1"):
        pool.add(node(name))
        pool.bring_up(node(name))
    before = pool.state()
    with pool.acquire("p1"):
        assert pool.state() is before
        assert before.nodes[0].active == 1
    pool.drain("p1")
    assert pool.state() is not before


def test_a_node_that_was_given_up_is_not_looked_at_again_for_its_cool_down() -> None:
    clock = FakeClock()
    pool = Pool(clock, CONFIG)
    for name in ("p1", "d1"):
        pool.add(node(name))
        pool.bring_up(node(name))
    pool.give_up("d1", "silent")
    clock.advance(100)
    assert pool.view("d1").state is State.DOWN
    assert pool._next_change > clock.now()
    pool.probed("d1", None, clock.now())
    assert pool.view("d1").state is State.PROBING, "it answers again"


def test_a_node_that_left_is_not_kept_by_the_legs_that_end_later() -> None:
    pool = Pool(FakeClock(), CONFIG)
    pool.add(node("p1"))
    slots = [pool.acquire("p1", LegLoad(queued=10)) for _ in range(2)]
    slots[0].computed(10)
    assert pool.load._worked
    pool.remove("p1")
    slots[1].computed(10)
    for slot in slots:
        slot.release()
    assert not pool.load._worked
    assert not any(pool.load._samples.values())


def test_a_leg_that_ends_after_its_node_left_brings_it_not_back() -> None:
    pool = Pool(FakeClock(), CONFIG)
    pool.add(node("d1"))
    slot, other = pool.acquire("d1"), pool.acquire("d1")
    pool.remove("d1")
    slot.release()
    assert pool.state().nodes == ()
    pool.add(node("d1"))
    other.release()
    assert [view.active for view in pool.state().nodes] == [0]


def test_a_node_that_leaves_while_it_starts_slowly_is_not_looked_for_later() -> None:
    clock = FakeClock()
    pool = Pool(clock, CONFIG)
    pool.add(node("d1"))
    pool.bring_up(node("d1"))
    assert pool.state().nodes[0].share < 1.0
    pool.remove("d1")
    clock.advance(30)
    assert pool.state().nodes == ()
