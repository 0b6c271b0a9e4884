"""The prefix index against a plain model of what places said, and what it does when events are not as they should be.

That it finds what vLLM finds is shown in `tests/vllm_compat/test_prefix_index.py`.
"""

import dataclasses
import os
import tracemalloc
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy.planning.block_hashes import HashAlgorithm, HashScheme
from pdproxy.planning.cache_events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent, GroupKind, group_kind
from pdproxy.planning.prefix import Hit, Place
from pdproxy.planning.prefix_index import PrefixIndex
from tests.planning.hits import by_place

ATTENTION, STATE = GroupKind.ATTENTION, GroupKind.STATE
UNIT, BLOCK = 2, 6
PROMPT = tuple(range(100, 112))
"""Twelve hashes: four blocks of three units of two tokens."""
TOKENS = len(PROMPT) * UNIT + 1


@dataclass
class PlainCache:
    """The events of a place, and how vLLM looks a prompt up in them."""

    kinds: dict[int, GroupKind] = field(default_factory=dict)
    copies: Counter[tuple[int, int]] = field(default_factory=Counter)

    def take(self, event: BlocksStored | BlocksRemoved) -> None:
        assert event.group is not None
        if isinstance(event, BlocksStored):
            self.kinds[event.group] = event.kind
            self.copies.update((event.group, each) for each in event.hashes)
            return
        for each in event.hashes:
            if self.copies[event.group, each]:
                self.copies[event.group, each] -= 1

    def has(self, kind: GroupKind, each: int) -> bool:
        groups = [group for group, known in self.kinds.items() if known is kind]
        return bool(groups) and all(self.copies[group, each] for group in groups)

    def hit(self, hashes: Sequence[int], tokens: int, *, hybrid: bool) -> Hit:
        units = [*range(UNIT, tokens, UNIT)]
        attention = 0
        while attention + BLOCK in units and self.has(ATTENTION, hashes[(attention + BLOCK) // UNIT - 1]):
            attention += BLOCK
        inside = [end for end in units if attention < end < attention + BLOCK]
        attention = max([end for end in inside if self.has(ATTENTION, hashes[end // UNIT - 1])], default=attention)
        if not hybrid:
            return Hit(attention, attention)
        states = [end for end in units if self.has(STATE, hashes[end // UNIT - 1])]
        resume = max([end for end in states if end <= attention], default=0)
        return Hit(resume if max(states, default=0) > attention else attention, resume)


P, Q, R = Place("p"), Place("q"), Place("q", 1)
EXAMPLES = int(os.environ.get("FUZZED", "60"))


def scheme(unit: int = UNIT, *, drops_unit: bool = False) -> HashScheme:
    return HashScheme(HashAlgorithm.SHA256, unit, BLOCK, bytes(32), drops_unit)


def stored(kind: GroupKind, hashes: Iterable[int], group: int | None = None) -> BlocksStored:
    """In the kind's group, 0 or 1, where none is named."""
    return BlocksStored(list(GroupKind).index(kind) if group is None else group, kind, tuple(hashes), BLOCK)


def blocks(count: int) -> tuple[int, ...]:
    """Hashes of the prompt's first blocks."""
    return PROMPT[BLOCK // UNIT - 1 : count * BLOCK // UNIT : BLOCK // UNIT]


def ends_at(tokens: int) -> int:
    return PROMPT[tokens // UNIT - 1]


def index_with(*events: CacheEvent, place: Place = P) -> PrefixIndex:
    index = PrefixIndex(scheme())
    for event in (CacheCleared(), *events):
        index.apply(place, event)
    return index


def found(index: PrefixIndex, hashes: Sequence[int], tokens: int, now: float) -> dict[Place, Hit]:
    return by_place(index.hits(hashes, tokens, now), index.numbers)


def hit(index: PrefixIndex, place: Place = P, tokens: int = TOKENS, now: float = 0.0) -> Hit:
    return found(index, PROMPT[: tokens // UNIT], tokens, now).get(place, Hit(0, 0))


# ---- what is there


def test_attention_is_as_long_as_its_blocks_reach_and_a_state_is_where_it_is() -> None:
    index = index_with(stored(ATTENTION, blocks(3)), stored(STATE, [ends_at(8)]))
    assert hit(index) == Hit(18, 8)
    index.apply(P, BlocksRemoved(0, blocks(1)))
    assert hit(index) == Hit(0, 0)


def test_the_last_token_is_always_computed() -> None:
    index = index_with(stored(ATTENTION, blocks(2)), stored(STATE, [ends_at(6), ends_at(12)]))
    assert hit(index, tokens=13) == Hit(12, 12)
    assert hit(index, tokens=12) == Hit(6, 6)


def test_the_farthest_part_of_a_block_counts() -> None:
    index = index_with(stored(ATTENTION, [*blocks(1), ends_at(8), ends_at(10)]), stored(STATE, [ends_at(8)]))
    assert hit(index) == Hit(10, 8)
    assert hit(index, tokens=10) == Hit(8, 8)


def test_a_place_without_state_groups_resumes_where_its_attention_ends() -> None:
    assert hit(index_with(stored(ATTENTION, blocks(2)))) == Hit(12, 12)


def test_an_event_without_a_hash_tells_of_a_state_group() -> None:
    assert hit(index_with(stored(ATTENTION, blocks(2)), stored(STATE, []))) == Hit(12, 0)


def test_a_place_that_shows_no_state_group_may_have_one_if_another_shows_one() -> None:
    index = index_with(stored(ATTENTION, blocks(2)))
    index.apply(Q, stored(STATE, []))
    assert hit(index) == Hit(12, 0)


@pytest.mark.parametrize(("states", "wanted"), [(True, Hit(12, 0)), (False, Hit(12, 12))])
def test_whether_there_are_states_is_told_or_learned(states: bool, wanted: Hit) -> None:
    index = PrefixIndex(dataclasses.replace(scheme(), states=states))
    index.expect(P, PROMPT, Hit(12, 0), until=1.0)
    assert hit(index) == wanted
    index.apply(P, stored(ATTENTION, blocks(2)))
    assert hit(index) == wanted
    index.apply(P, stored(STATE, []))
    assert hit(index) == Hit(12, 0)


def test_a_state_deeper_than_the_attention_leaves_a_ticket_what_all_groups_share() -> None:
    index = index_with(stored(ATTENTION, blocks(2)), stored(STATE, [ends_at(6), ends_at(20)]))
    assert hit(index) == Hit(6, 6)
    assert hit(index, tokens=20) == Hit(12, 6), "that state is none of this prompt's"


def test_every_group_counts_and_every_copy() -> None:
    index = index_with(stored(ATTENTION, blocks(2)), stored(STATE, [ends_at(6)], 1), stored(STATE, [], 2))
    assert hit(index) == Hit(12, 0)
    index.apply(P, stored(STATE, [ends_at(6)] * 2, 2))
    assert hit(index) == Hit(12, 6)
    index.apply(P, BlocksRemoved(2, (ends_at(6),)))
    assert hit(index) == Hit(12, 6)
    index.apply(P, BlocksRemoved(2, (ends_at(6),)))
    assert hit(index) == Hit(12, 0)


def test_a_removal_that_names_no_group_is_of_all() -> None:
    index = index_with(stored(ATTENTION, blocks(2)), stored(STATE, [ends_at(6)]), BlocksRemoved(None, (ends_at(6),)))
    assert hit(index) == Hit(0, 0)
    assert (index.blocks(P, ATTENTION), index.blocks(P, STATE)) == (1, 0)


@pytest.mark.parametrize(("kind", "wanted"), [("mamba", STATE), ("full_attention", ATTENTION), (None, ATTENTION)])
def test_the_kind_of_a_group(kind: str | None, wanted: GroupKind) -> None:
    assert group_kind(kind) is wanted


# ---- what is known


def test_a_place_is_known_from_its_start_until_it_is_forgotten() -> None:
    index = PrefixIndex(scheme())
    index.apply(P, stored(ATTENTION, blocks(1)))
    assert not index.knows_all_of(P)
    index.apply(P, CacheCleared())
    assert index.knows_all_of(P)
    assert hit(index) == Hit(0, 0)
    index.drop_place(P)
    assert not index.knows_all_of(P)


def test_a_place_s_bit_can_be_another_s() -> None:
    index = index_with(stored(ATTENTION, blocks(3)), stored(STATE, [ends_at(6)]))
    index.expect(P, PROMPT, Hit(18, 12), until=9.0)
    index.apply(Q, stored(ATTENTION, blocks(1)))
    index.drop_place(P)
    index.apply(R, stored(ATTENTION, blocks(2)))
    assert found(index, PROMPT, TOKENS, 0.0) == {Q: Hit(6, 0), R: Hit(12, 0)}
    assert found(index, PROMPT, TOKENS, 10.0) == {Q: Hit(6, 0), R: Hit(12, 0)}


def test_removals_of_blocks_that_were_never_there_change_nothing() -> None:
    index = index_with(BlocksRemoved(0, (1, 2)), stored(ATTENTION, blocks(1)), BlocksRemoved(0, (1,)))
    index.apply(Q, BlocksRemoved(7, (5,)))
    assert hit(index) == Hit(6, 6)
    assert len(index) == index.blocks(P, ATTENTION) == 1


def test_a_place_that_publishes_more_than_any_can_hold_is_forgotten() -> None:
    index = PrefixIndex(scheme(), most_blocks=1000)
    index.apply(P, stored(ATTENTION, range(900)))
    assert index.blocks(P, ATTENTION) == 900
    index.apply(P, stored(ATTENTION, range(900, 1800)))
    assert (len(index), index.knows_all_of(P), index.blocks(P, ATTENTION)) == (0, False, 0)


def test_nor_does_any_have_so_many_groups() -> None:
    index = index_with(*(stored(STATE, [1], group) for group in range(300)))
    assert index.stored(P) == 300 - 257, "it was forgotten with the 257th group"
    assert index.blocks(P, STATE) == 1


def test_a_group_that_changes_its_kind_is_another_engine_s() -> None:
    index = index_with(stored(ATTENTION, blocks(3)), stored(STATE, [], 0))
    assert not len(index)
    assert not index.knows_all_of(P)


def test_what_comes_and_goes_for_a_long_time_leaves_nothing() -> None:
    index, passing = PrefixIndex(scheme(), most_blocks=1200), range(1000, 1500)
    index.apply(P, stored(ATTENTION, PROMPT))
    tracemalloc.start()
    for _ in range(25):
        index.apply(P, stored(ATTENTION, passing))
        index.apply(P, stored(ATTENTION, passing))
        index.apply(P, BlocksRemoved(0, tuple(passing)))
        assert index.blocks(P, ATTENTION) == len(PROMPT) + len(passing)
        index.apply(P, BlocksRemoved(0, tuple(passing)))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 90_000, "fifty times as many hashes came and went"
    assert len(index) == index.blocks(P, ATTENTION) == len(PROMPT)
    index.drop_place(P)
    assert not len(index)


# ---- what is expected


def test_what_was_sent_counts_at_once_and_for_a_time() -> None:
    index = index_with(stored(ATTENTION, []), stored(STATE, []))
    index.expect(P, PROMPT, index.after_prefill(21), until=5.0)
    assert hit(index, now=4.9) == Hit(20, 20)
    assert hit(index, tokens=20, now=4.9) == Hit(18, 0)
    assert hit(index, now=5.0) == Hit(0, 0)


def test_it_adds_to_what_is_there_and_takes_nothing_of_it_along() -> None:
    index = index_with(stored(ATTENTION, blocks(2)), stored(STATE, [ends_at(6)]))
    index.expect(P, PROMPT, Hit(18, 0), until=5.0)
    index.expect(P, PROMPT, Hit(24, 12), until=7.0)
    assert hit(index, now=4.0) == Hit(24, 12)
    assert hit(index, now=6.0) == Hit(24, 12)
    assert hit(index, now=8.0) == Hit(12, 6)


def test_what_the_place_stored_as_expected_and_then_removed_is_gone() -> None:
    index = index_with(stored(ATTENTION, []), stored(STATE, []))
    index.expect(P, PROMPT, Hit(18, 12), until=30.0)
    index.apply(P, stored(ATTENTION, blocks(3)))
    index.apply(P, stored(STATE, [ends_at(12)]))
    assert hit(index, now=1.0) == Hit(18, 12)
    index.apply(P, BlocksRemoved(1, (ends_at(12),)))
    assert hit(index, now=1.0) == Hit(18, 0)
    index.apply(P, BlocksRemoved(0, blocks(3)[1:]))
    assert hit(index, now=1.0) == Hit(6, 0)


def test_what_the_place_had_is_gone_once_it_is_removed_though_a_prompt_with_it_was_sent() -> None:
    """A prompt that waits for its turn holds nothing: what is evicted before it is computed anew."""
    index = index_with(stored(ATTENTION, blocks(3)), stored(STATE, [ends_at(12)]))
    index.expect(P, PROMPT, Hit(24, 12), until=30.0)
    assert hit(index, now=1.0) == Hit(24, 12)
    index.apply(P, BlocksRemoved(1, (ends_at(12),)))
    index.apply(P, BlocksRemoved(0, blocks(3)[1:]))
    assert hit(index, now=1.0) == Hit(6, 0)


def test_what_is_expected_of_several_groups_counts_until_all_of_them_have_it() -> None:
    index = index_with(stored(ATTENTION, [], 0), stored(ATTENTION, [], 2), stored(STATE, []))
    index.expect(P, PROMPT, Hit(12, 0), until=30.0)
    index.apply(P, stored(ATTENTION, blocks(2), 0))
    assert hit(index, now=1.0) == Hit(12, 0)
    index.apply(P, stored(ATTENTION, blocks(2), 2))
    index.apply(P, BlocksRemoved(2, blocks(2)[1:]))
    assert hit(index, now=1.0) == Hit(6, 0)


def test_what_two_prompts_are_expected_to_bring_ends_with_one_event() -> None:
    index = index_with(stored(ATTENTION, []), stored(STATE, []))
    index.expect(P, PROMPT, Hit(12, 0), until=30.0)
    index.expect(P, PROMPT, Hit(18, 0), until=31.0)
    index.apply(P, stored(ATTENTION, blocks(2)))
    index.apply(P, BlocksRemoved(0, blocks(2)[1:]))
    assert hit(index, now=1.0) == Hit(6, 0)
    assert hit(index, now=40.0) == Hit(6, 0)


def test_of_a_place_never_heard_of_it_is_all_that_is_known() -> None:
    index = PrefixIndex(scheme())
    index.expect(P, PROMPT, Hit(18, 0), until=5.0)
    assert hit(index) == Hit(18, 0)
    assert not index.knows_all_of(P)


@pytest.mark.parametrize(
    ("tokens", "unit", "drops_unit", "kept"),
    [
        (24, BLOCK, False, Hit(24, 18)),
        (25, BLOCK, False, Hit(24, 24)),
        (24, UNIT, False, Hit(24, 22)),
        (22, UNIT, False, Hit(20, 20)),
        (22, UNIT, True, Hit(22, 20)),
        (2, UNIT, False, Hit(0, 0)),
        (2, UNIT, True, Hit(2, 0)),
    ],
)
def test_what_vllm_keeps_of_a_prompt(tokens: int, unit: int, drops_unit: bool, kept: Hit) -> None:
    assert PrefixIndex(scheme(unit, drops_unit=drops_unit)).after_prefill(tokens) == kept


def test_a_prompt_of_which_nothing_is_kept_is_not_expected() -> None:
    index = PrefixIndex(scheme())
    index.expect(P, PROMPT[:3], Hit(0, 0), until=5.0)
    assert hit(index) == Hit(0, 0)


def test_a_forgotten_place_s_expectations_are_not_another_s() -> None:
    index = index_with(stored(ATTENTION, blocks(2)))
    index.expect(P, PROMPT, Hit(18, 0), until=5.0)
    index.drop_place(P)
    index.expect(Q, PROMPT, Hit(18, 0), until=9.0)
    assert found(index, PROMPT, TOKENS, 6.0) == {Q: Hit(18, 0)}


# ---- against a plain model


EVENTS = st.one_of(
    st.builds(BlocksStored, st.sampled_from([0, 1]), st.just(ATTENTION), st.lists(st.sampled_from(PROMPT)), st.just(0)),
    st.builds(BlocksStored, st.sampled_from([2, 3]), st.just(STATE), st.lists(st.sampled_from(PROMPT)), st.just(0)),
    st.builds(BlocksRemoved, st.integers(0, 3), st.lists(st.sampled_from(PROMPT))),
    st.just(CacheCleared()),
)


@settings(max_examples=EXAMPLES)
@given(st.lists(st.tuples(st.sampled_from([P, Q, R]), EVENTS), max_size=40), st.integers(1, TOKENS))
def test_it_is_what_the_places_said(events: list[tuple[Place, CacheEvent]], tokens: int) -> None:
    index, plain = PrefixIndex(scheme()), {place: PlainCache() for place in (P, Q, R)}
    hybrid = False
    for place, event in events:
        index.apply(place, event)
        hybrid |= isinstance(event, BlocksStored) and event.kind is STATE
        if isinstance(event, CacheCleared):
            plain[place] = PlainCache()
        else:
            plain[place].take(event)
        wanted: Mapping[Place, Hit] = {place: said.hit(PROMPT, tokens, hybrid=hybrid) for place, said in plain.items()}
        wanted = {place: each for place, each in wanted.items() if each != Hit(0, 0)}
        assert found(index, PROMPT[: tokens // UNIT], tokens, 0.0) == wanted
