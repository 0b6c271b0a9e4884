"""A connector's answers to vLLM's scheduler where an honest answer would hold other requests up."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("vllm")

from connector.admission import AdmissionControl, NoAdmissionControl
from connector.counters import ReadOutcome
from connector.kv_groups import BoundedGroup, GrowingGroup, SequenceBlocks
from tests.connector.harness import (
    BLOCK,
    DENSE,
    HYBRID,
    PACES,
    Node,
    at_pace,
    lost,
    make_node,
    nonce_of,
    prompt,
    received,
    take_ticket,
)

ASIDE = (None, False)
COMPUTE = (0, False)
LOAD = (64, True)
SIZES = SequenceBlocks((GrowingGroup(16),), ((GrowingGroup(16), BoundedGroup(1, 2)),))


@dataclass
class Request:
    request_id: str
    num_tokens: int
    num_preemptions: int = 0


@dataclass
class Pool:
    """A pool of 20 usable blocks."""

    free: int = 20
    num_gpu_blocks: int = 21

    def get_num_free_blocks(self) -> int:
        return self.free


@dataclass
class Cache:
    """`partial_hits`: ids of requests whose local hit ends inside a block."""

    pool: Pool
    held: int = 0
    partial_hits: set[str] = field(default_factory=set)

    def quarantine(self, blocks: int) -> None:
        """Transfers hang over so many blocks; nothing else is in use."""
        self.held, self.pool.free = blocks, 20 - blocks

    def forget_partial_hits(self, request: Any) -> bool:
        had_one = request.request_id in self.partial_hits
        self.partial_hits.discard(request.request_id)
        return had_one


@pytest.fixture
def cache() -> Cache:
    return Cache(Pool())


@pytest.fixture
def admission(cache: Cache) -> AdmissionControl:
    made = AdmissionControl(SIZES, lambda: cache.held, cache)
    made.bind(cache.pool)
    return made


def asked(admission: AdmissionControl, request: Request, answer: tuple[int | None, bool]) -> tuple[int | None, bool]:
    stands_in: Any = request
    return admission.answer(stands_in, answer)


A, B = Request("a", 160), Request("b", 64)


@pytest.mark.parametrize("answer", [ASIDE, COMPUTE, LOAD])
def test_an_answer_stays_as_it_is_while_nothing_is_wrong(
    admission: AdmissionControl, answer: tuple[int | None, bool]
) -> None:
    assert [asked(admission, A, answer) for _ in range(3)] == [answer] * 3


def test_a_request_that_cannot_fit_beside_a_quarantine_is_skipped_until_it_can(
    admission: AdmissionControl, cache: Cache
) -> None:
    cache.quarantine(10)
    assert asked(admission, A, COMPUTE) == ASIDE
    assert asked(admission, B, COMPUTE) == COMPUTE
    cache.quarantine(9)
    assert asked(admission, A, COMPUTE) == COMPUTE
    for name in ("a", "b"):
        admission.on_admitted(name, 0)
        admission.forget(name)
    assert len(admission) == 0


def test_a_request_that_fits_once_others_have_ended_keeps_its_turn(admission: AdmissionControl, cache: Cache) -> None:
    cache.held, cache.pool.free = 5, 2
    assert [asked(admission, A, COMPUTE) for _ in range(3)] == [COMPUTE] * 3


def test_vllms_own_refusal_counts_where_nothing_can_make_more_room(admission: AdmissionControl, cache: Cache) -> None:
    """11 blocks are the least that 160 tokens take; a local hit may cost one more."""
    cache.quarantine(9)
    assert [asked(admission, A, COMPUTE) for _ in range(3)] == [COMPUTE, ASIDE, ASIDE]
    admission.on_admitted("b", 0)
    assert asked(admission, A, COMPUTE) == COMPUTE
    cache.quarantine(8)
    assert asked(admission, A, COMPUTE) == COMPUTE
    cache.quarantine(0)
    for name in ("a", "b"):
        admission.forget(name)
    assert len(admission) == 0


def test_a_preempted_request_needs_its_next_block(admission: AdmissionControl, cache: Cache) -> None:
    """The request would be preempted again before its next token, and again."""
    cache.quarantine(9)
    assert asked(admission, Request("a", 160, num_preemptions=1), COMPUTE) == ASIDE
    cache.quarantine(8)
    assert asked(admission, Request("a", 160, num_preemptions=1), COMPUTE) == COMPUTE


LARGE = Request("large", 288)
"""18 blocks of attention and 2 of state fill the cache; with copies it would be 22."""


def test_hits_inside_blocks_are_forgotten_where_copies_may_not_fit(admission: AdmissionControl, cache: Cache) -> None:
    cache.partial_hits = {"large", "a"}
    assert [asked(admission, LARGE, COMPUTE) for _ in range(3)] == [ASIDE, COMPUTE, COMPUTE]
    assert asked(admission, A, COMPUTE) == COMPUTE
    assert cache.partial_hits == {"a"}


def test_hits_inside_blocks_are_looked_for_again_once_vllm_has_refused_the_request(
    admission: AdmissionControl, cache: Cache
) -> None:
    assert asked(admission, LARGE, COMPUTE) == COMPUTE
    cache.partial_hits = {"large"}
    assert [asked(admission, LARGE, COMPUTE) for _ in range(2)] == [ASIDE, COMPUTE]


@pytest.mark.parametrize("change", ["a request holds blocks", "one was admitted"])
def test_hits_inside_blocks_are_not_looked_for_in_each_step(
    admission: AdmissionControl, cache: Cache, change: str
) -> None:
    assert asked(admission, LARGE, COMPUTE) == COMPUTE
    cache.partial_hits = {"large"}
    for _ in range(3):
        admission.on_admitted("b", 0)
        cache.pool.free = 11 if change == "a request holds blocks" else 20
        assert asked(admission, LARGE, COMPUTE) == COMPUTE
    assert cache.partial_hits == {"large"}


def test_hits_inside_blocks_are_forgotten_before_a_request_steps_aside(
    admission: AdmissionControl, cache: Cache
) -> None:
    cache.partial_hits = {"a"}
    cache.quarantine(9)
    assert [asked(admission, A, COMPUTE) for _ in range(3)] == [ASIDE, COMPUTE, ASIDE]
    assert not cache.partial_hits


def fail_to_load(admission: AdmissionControl, request: Request) -> None:
    """Up to the moment in which vLLM asks about it again."""
    assert asked(admission, request, LOAD) == LOAD
    admission.on_admitted(request.request_id, 64)


def test_a_failed_load_that_does_not_fit_steps_back_once(admission: AdmissionControl, cache: Cache) -> None:
    """Behind requests that were read well, and hold their blocks: they would wait for it, and it for them."""
    fail_to_load(admission, A)
    cache.pool.free = 11
    assert [asked(admission, A, COMPUTE) for _ in range(2)] == [ASIDE, COMPUTE]


def test_a_failed_load_that_fits_is_computed_at_once(admission: AdmissionControl, cache: Cache) -> None:
    fail_to_load(admission, A)
    cache.pool.free = 12
    assert asked(admission, A, COMPUTE) == COMPUTE


def test_a_second_load_is_offered_once(admission: AdmissionControl) -> None:
    """vLLM still reserves the blocks of the first one: where both do not fit, nobody behind would be asked."""
    fail_to_load(admission, A)
    assert [asked(admission, A, LOAD) for _ in range(3)] == [LOAD, COMPUTE, COMPUTE]


def test_other_loads_are_computed_where_a_failed_one_s_reservation_leaves_no_room(admission: AdmissionControl) -> None:
    fail_to_load(admission, A)
    assert asked(admission, A, COMPUTE) == COMPUTE
    assert [asked(admission, B, LOAD) for _ in range(2)] == [LOAD, COMPUTE]
    admission.on_admitted("a", 0)
    assert asked(admission, B, LOAD) == LOAD


def test_a_load_that_may_fill_the_cache_waits_while_nothing_computes(admission: AdmissionControl, cache: Cache) -> None:
    """160 tokens take 11 blocks, and a twelfth for the state to go on with."""
    assert asked(admission, B, LOAD) == LOAD
    admission.on_admitted("b", 64)
    cache.pool.free = 11
    assert asked(admission, A, LOAD) == ASIDE
    admission.on_admitted("c", 0)
    assert asked(admission, A, LOAD) == LOAD
    admission.forget("c")
    assert asked(admission, A, LOAD) == ASIDE
    cache.pool.free = 12
    assert asked(admission, A, LOAD) == LOAD


def test_a_preempted_request_does_not_compute(admission: AdmissionControl, cache: Cache) -> None:
    admission.on_admitted("c", 0)
    cache.pool.free = 11
    assert asked(admission, Request("c", 160, num_preemptions=1), LOAD) == ASIDE


def test_a_load_that_fills_the_unused_cache_is_computed(admission: AdmissionControl) -> None:
    assert asked(admission, Request("large", 304), LOAD) == COMPUTE


def test_a_load_that_ended_well_is_forgotten(admission: AdmissionControl) -> None:
    fail_to_load(admission, A)
    admission.on_admitted("a", 0)
    assert asked(admission, A, LOAD) == LOAD
    admission.forget("a")
    assert len(admission) == 0


def test_a_request_that_has_ended_is_forgotten(admission: AdmissionControl) -> None:
    fail_to_load(admission, A)
    admission.forget("a")
    assert len(admission) == 0
    assert [asked(admission, B, LOAD) for _ in range(2)] == [LOAD, LOAD]


def test_one_of_several_connectors_leaves_it_to_the_one_that_chooses(cache: Cache) -> None:
    child = NoAdmissionControl(SIZES, lambda: cache.held, cache)
    child.bind(cache.pool)
    cache.quarantine(19)
    assert asked(child, A, LOAD) == LOAD


@pytest.mark.parametrize("groups", [HYBRID, DENSE, (*HYBRID, *HYBRID[1:])], ids=["hybrid", "dense", "two states"])
def test_the_least_and_the_most_stand_around_what_vllm_asks_for(groups: Any) -> None:
    node = make_node("kv_consumer", groups)
    manager = node.scheduler.kv_cache_manager
    for tokens in range(1, 6 * BLOCK):
        asks = manager.coordinator.get_num_blocks_to_allocate(
            request_id="none",
            num_tokens=tokens,
            new_computed_blocks=tuple(() for _ in groups),
            num_encoder_tokens=0,
            total_computed_tokens=0,
            num_local_computed_tokens=0,
            num_tokens_main_model=tokens,
            apply_admission_cap=True,
            prefill_end=tokens,
        )
        sizes = node.side.admission._sizes
        assert sizes.least(tokens) <= asks <= sizes.most(tokens)


# ---- on vLLM's scheduler, with a cache of 21 usable blocks and a prompt of 12


@pytest.fixture
def prefill() -> Node:
    return make_node("kv_producer", engine_id="engine-p")


@pytest.fixture
def small() -> Node:
    return make_node("kv_consumer", engine_id="engine-d", num_blocks=22)


LONG, SHORT = prompt(170), prompt(40, seed=1)


def test_a_read_that_dies_holds_nobody_up(prefill: Node, small: Node) -> None:
    small.add("long", LONG, take_ticket(prefill, LONG))
    small.step()
    small.add("short", SHORT)
    small.step(lost(small, ReadOutcome.TRANSFER_FAILED, "long"))
    said = Counter(output.request_id for _ in range(20) for output in small.step())
    assert said == {"long": 4, "short": 4}


def test_a_request_passes_one_whose_blocks_are_in_quarantine(prefill: Node, small: Node) -> None:
    free = small.free_blocks
    small.add("long", LONG, take_ticket(prefill, LONG))
    small.step()
    nonce = nonce_of(small, "long")
    small.step(lost(small, ReadOutcome.NO_PROGRESS, "long", stalled=[nonce]))
    small.add("short", SHORT)
    assert len(small.run_out("short")) == 4
    other = prompt(50, seed=2)
    elsewhere = make_node("kv_producer", engine_id="engine-q")
    small.add("ticket", other, take_ticket(elsewhere, other))
    assert len(small.run_out("ticket")) == 4  # computed: what the long one reserved leaves no room for a read
    assert small.counts("unused_tickets") == {"": 1}
    assert "long" in small.scheduler.requests
    report: Any = lost(small, ReadOutcome.NO_PROGRESS)
    report.kv_connector_worker_meta.drained = {nonce: 1}
    small.step(report)
    assert len(small.run_out("long")) == 4
    assert small.free_blocks == free


@pytest.mark.parametrize("tokens", [256, 261, 264, 272])
def test_a_prompt_as_large_as_the_cache_is_not_held_up_by_its_own_hit(tokens: int) -> None:
    """17 blocks of attention and 2 states fill the cache; stock vLLM waits for ever for the copies of the blocks inside
    which the hit ends, and everybody behind waits, too."""
    node = make_node("kv_consumer", num_blocks=20, unit=4)
    large = prompt(tokens)
    node.add("first", large, max_tokens=1)
    node.run_out("first")
    node.add("again", large, max_tokens=1)
    node.add("behind", SHORT)
    said = Counter(output.request_id for _ in range(20) for output in node.step())
    assert said == {"again": 1, "behind": 4}
    assert node.free_blocks == 19


@pytest.mark.parametrize("unit", [None, 4])
@pytest.mark.parametrize("pace", sorted(PACES))
def test_loads_that_fill_the_cache_do_not_wait_for_each_other(unit: int | None, pace: str) -> None:
    """Each of the two takes 11 of 22 blocks, and goes on with a twelfth."""
    prefill = make_node("kv_producer", engine_id="engine-p", unit=unit)
    with at_pace(PACES[pace]):
        node = make_node("kv_consumer", engine_id="engine-d", num_blocks=23, unit=unit)
    prompts = {"one": prompt(150, seed=1), "two": prompt(150, seed=2)}
    for name, tokens in prompts.items():
        node.add(name, tokens, take_ticket(prefill, tokens, f"p-{name}"))
    said: Counter[str] = Counter()
    for _ in range(40):
        reading = [name for name in prompts if node.metas and name in node.metas[-1].reads]
        said.update(output.request_id for output in node.step(received(node, *reading)))
    assert said == {"one": 4, "two": 4}
