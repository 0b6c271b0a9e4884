"""Prompts that were sent to places, as the planner's approximation of what is cached."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.planning.prefix import Hit, Place
from pdproxy.planning.text_chain import CHUNK, Chain, chain_of_completion, chain_of_ids, chain_of_text
from pdproxy.planning.text_index import MOST_TAILS, KeptStates, TextIndex
from tests.planning.hits import by_place

P0, P1, D0 = Place("p0"), Place("p1"), Place("d0")
SYSTEM = b"be kind. " * 200
"""1,800 bytes: 450 tokens where nothing is known."""


def found(index: TextIndex, chain: Chain, now: float) -> dict[Place, Hit]:
    return by_place(index.hits(chain, now), index.numbers)


def chat(*messages: bytes, model: str = "m", salt: str = "") -> Chain:
    return chain_of_text(model, salt, [SYSTEM, *messages])


FIRST, SECOND = b"first question " * 20, b"second question " * 20
ANSWER = b"an answer " * 20
TURN_1, TURN_2 = chat(FIRST), chat(FIRST, ANSWER, SECOND)


def test_nothing_is_known_of_what_was_never_sent() -> None:
    assert found(TextIndex(), TURN_1, 0) == {}
    assert TextIndex().tokens(TURN_1) == (len(SYSTEM) + len(FIRST)) / 4


def test_the_next_turn_can_resume_where_the_last_prompt_ended() -> None:
    index = TextIndex()
    index.sent(TURN_1, {P0: KeptStates.ALL}, 0)
    assert found(index, TURN_2, 1) == {P0: Hit(525, 525)}


@pytest.mark.parametrize("length", [CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 5 * CHUNK + 70])
def test_a_completion_goes_on_where_the_last_prompt_ended(length: int) -> None:
    """Over several turns, of which some end in the same piece."""
    index, text = TextIndex(), bytes(number % 251 for number in range(8 * CHUNK))
    for end in range(length, length + 1000, 100):
        chain = index.refined(chain_of_completion("m", "", text[:end]))
        resumed = found(index, chain, 0).get(P0, Hit(0, 0))
        assert resumed.resume == (0 if end == length else -(-(end - 100) // 4)), end
        assert resumed.attention >= resumed.resume
        index.sent(chain, {P0: KeptStates.END}, 0)


@pytest.mark.parametrize("begun", [1, 3])
def test_a_prompt_goes_on_where_an_earlier_one_ended_though_others_went_on_from_there_before(begun: int) -> None:
    """An agent's next call, when the sub-agents that begin with the same text have come before it."""
    index, first = TextIndex(), chain_of_completion("m", "", b"a" * (CHUNK + 50))
    index.sent(first, {P0: KeptStates.ALL}, 0)
    text = b"a" * (CHUNK + 50) + b"b" * (3 * CHUNK)
    for number in range(begun):
        chain = index.refined(chain_of_completion("m", "", text + b"sub-agent %d" % number))
        assert first.hashes[-1] in chain.hashes, number
        index.sent(chain, {P1: KeptStates.ALL}, 0)
    following = index.refined(chain_of_completion("m", "", text))
    assert first.hashes[-1] in following.hashes
    assert list(following.ends) == sorted(set(following.ends))
    assert found(index, following, 0)[P0] == Hit(-(-(CHUNK + 50) // 4), -(-(CHUNK + 50) // 4))


def test_ids_go_on_where_the_last_prompt_ended() -> None:
    index, ids = TextIndex(), list(range(1000))
    index.sent(chain_of_ids("m", "", ids[:700]), {P0: KeptStates.END}, 0)
    assert found(index, index.refined(chain_of_ids("m", "", ids)), 0) == {P0: Hit(700, 700)}


def test_another_text_of_the_same_length_is_not_gone_on_from() -> None:
    index = TextIndex()
    index.sent(chain_of_completion("m", "", b"a" * CHUNK + b"b" * 50), {P0: KeptStates.END}, 0)
    chain = chain_of_completion("m", "", b"a" * CHUNK + b"c" * 100)
    assert index.refined(chain).hashes == chain.hashes
    assert found(index, index.refined(chain), 0) == {P0: Hit(CHUNK // 4, 0)}


def test_of_many_ends_after_one_mark_the_last_are_remembered() -> None:
    index, begin = TextIndex(), b"a" * CHUNK
    for length in range(1, 400):
        index.sent(chain_of_completion("m", "", begin + b"b" * length), {P0: KeptStates.END}, 0)
    longer = index.refined(chain_of_completion("m", "", begin + b"b" * 450))
    assert tuple(longer.ends) == (CHUNK, *(CHUNK + length for length in range(400 - MOST_TAILS, 400)), CHUNK + 450)


def test_a_longer_message_does_not_go_on_where_a_shorter_one_ended() -> None:
    """For the template ended that one."""
    index = TextIndex()
    index.sent(chat(b"a" * CHUNK + b"b"), {P0: KeptStates.END}, 0)
    assert found(index, index.refined(chat(b"a" * CHUNK + b"bc")), 0)[P0].resume == 0


def test_a_shared_prefix_has_a_state_from_its_second_meeting_on() -> None:
    index, resumed = TextIndex(), list[int]()
    for number in range(3):
        prompt = chat(b"question %d" % number)
        resumed.append(found(index, prompt, 0).get(P0, Hit(0, 0)).resume)
        index.sent(prompt, {P0: KeptStates.ALL}, 0)
    assert resumed == [0, 0, 450]
    assert found(index, chat(b"another"), 0)[P0] == Hit(450, 450)


def test_each_place_meets_a_prefix_for_itself() -> None:
    index = TextIndex()
    for number, place in enumerate((P0, P0, P1)):
        index.sent(chat(b"question %d" % number), {place: KeptStates.ALL}, 0)
    another = found(index, chat(b"another"), 0)
    assert (another[P0].resume, another[P1].resume, another[P1].attention) == (450, 0, 450)


def test_a_prompt_of_exactly_the_prefix_gives_the_next_one_its_state() -> None:
    index = TextIndex()
    index.sent(chat(), {P0: KeptStates.ALL}, 0)
    assert found(index, chat(b"question"), 0)[P0] == Hit(450, 450)


@pytest.mark.parametrize(("keeps", "resume"), [(KeptStates.NONE, 0), (KeptStates.END, 525)])
def test_a_decode_node_keeps_a_state_only_where_it_can_resume(keeps: KeptStates, resume: int) -> None:
    index = TextIndex()
    index.sent(TURN_1, {D0: keeps}, 0)
    assert found(index, TURN_2, 0) == {D0: Hit(525, resume)}


def test_salts_models_and_ids_do_not_meet() -> None:
    index = TextIndex()
    index.sent(TURN_1, {P0: KeptStates.ALL}, 0)
    for other in (
        chat(FIRST, salt="tenant"),
        chat(FIRST, model="lora", salt="lora"),
        chain_of_ids("m", "", range(600)),
    ):
        assert found(index, other, 0) == {}


def test_a_prompt_of_ids_is_counted_exactly() -> None:
    index, ids = TextIndex(), list(range(1000))
    index.sent(chain_of_ids("m", "", ids[:700]), {P0: KeptStates.ALL}, 0)
    longer = chain_of_ids("m", "", ids)
    assert index.tokens(longer) == 1000
    assert found(index, longer, 0)[P0].attention == 640
    index.counted(longer, 5)
    assert index.tokens(longer) == 1000


def test_what_answers_count_is_learned() -> None:
    index = TextIndex()
    index.sent(TURN_1, {P0: KeptStates.ALL}, 0)
    index.counted(TURN_1, 1050)
    assert found(index, TURN_2, 0)[P0] == Hit(1050, 1050)
    assert index.tokens(TURN_2) == pytest.approx(1050 + (len(ANSWER) + len(SECOND)) / 2, rel=0.02)
    assert index.tokens(chat(model="other", salt="o")) == 450


def test_a_place_that_had_less_is_believed() -> None:
    index = TextIndex()
    for number in range(2):
        index.sent(chat(b"question %d" % number), {P0: KeptStates.ALL}, 0)
    third = chat(b"question 3")
    index.sent(third, {P0: KeptStates.ALL}, 0)
    index.cached_less(third, P0)
    assert found(index, chat(b"another"), 0)[P0] == Hit(450, 0)
    assert found(index, chat(b"question 3", b"more"), 0)[P0].resume > 450, "it has computed this one now"


def test_a_place_that_had_more_is_believed() -> None:
    index = TextIndex()
    index.sent(TURN_1, {P0: KeptStates.ALL}, 0)
    index.cached_more(TURN_1, P0, 460, 0)
    assert found(index, chat(b"another"), 0)[P0] == Hit(450, 450)


def test_what_is_old_is_taken_to_be_evicted() -> None:
    index = TextIndex(life=60)
    index.sent(TURN_1, {P0: KeptStates.ALL}, 0)
    assert found(index, TURN_2, 60)
    assert found(index, TURN_2, 61) == {}


def test_a_state_that_is_used_lives_on() -> None:
    index = TextIndex(life=60)
    for minute in range(5):
        index.sent(chat(b"question %d" % minute), {P0: KeptStates.ALL}, 50 * minute)
    assert found(index, chat(b"another"), 230)[P0] == Hit(450, 450)


def test_a_state_that_is_no_longer_used_is_taken_to_be_evicted() -> None:
    index = TextIndex(life=60)
    for number in range(2):
        index.sent(chat(b"question %d" % number), {P0: KeptStates.ALL}, 0)
    index.sent(chat(b"question 1", b"more"), {P0: KeptStates.ALL}, 50)
    assert found(index, chat(b"another"), 61)[P0] == Hit(450, 0)


def test_of_an_old_conversation_the_end_is_forgotten_first() -> None:
    index, old = TextIndex(most_marks=50), chain_of_text("m", "", [b"%d" % number for number in range(40)])
    index.sent(old, {P0: KeptStates.ALL}, 0)
    index.sent(chain_of_text("m", "", [b"other %d" % number for number in range(30)]), {P0: KeptStates.ALL}, 1)
    assert found(index, old, 1)[P0].attention == index.tokens(old, 20)


def test_memory_is_bounded_and_the_latest_is_kept() -> None:
    index = TextIndex(most_marks=50)
    for number in range(100):
        index.sent(chat(b"question %d" % number * 100), {P0: KeptStates.ALL}, number)
        assert len(index) <= 50
    assert found(index, chat(b"question 99" * 100), 100)[P0].attention > 450
    assert found(index, chat(b"question 3" * 100), 100)[P0] == Hit(450, 450)


def test_marks_are_few_and_a_long_prompt_is_looked_up_quickly() -> None:
    parts = [b"%d " % number * 1000 for number in range(100)]
    index, chain = TextIndex(), chain_of_text("m", "", parts)
    assert len(chain.hashes) <= sum(map(len, parts)) / CHUNK + len(parts)
    for number in range(20):
        index.sent(chain, {Place(f"p{number}"): KeptStates.ALL}, 0)
    began = time.process_time()
    found(index, chain_of_text("m", "", parts), 0)
    kilobytes = sum(map(len, parts)) / 1024
    assert (time.process_time() - began) / kilobytes < 50e-6, "seconds for each KB: a tenth of that was measured"


def test_a_new_place_has_nothing_of_the_one_whose_number_it_gets() -> None:
    """Pods get new names: numbers are given again, or masks would grow for ever."""
    index = TextIndex(life=60)
    for number in range(100):
        place, now = Place(f"pod-{number}"), 100.0 * number
        index.sent(TURN_2, {place: KeptStates.ALL}, now)
        assert found(index, TURN_2, now) == {place: Hit(index.tokens(TURN_2), index.tokens(TURN_2))}
    assert index.numbers.all == 1


def test_a_new_place_meets_a_prefix_where_the_one_before_it_had_met_more() -> None:
    index = TextIndex(life=60)
    index.sent(TURN_2, {P0: KeptStates.ALL}, 0)
    index.sent(chat(b"question"), {P1: KeptStates.ALL}, 100)
    assert index.numbers.get(P1) == 1, "the number that P0 had"
    index.sent(TURN_2, {P1: KeptStates.ALL}, 101)
    assert found(index, chat(b"another"), 102) == {P1: Hit(450, 450)}


Sent = tuple[int, Place, KeptStates, float]


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from([P0, P1, D0]), st.sampled_from(KeptStates), st.floats(0, 30)),
        max_size=12,
    )
)
def test_the_hits_of_a_place_do_not_depend_on_the_others(steps: list[Sent]) -> None:
    """An index of all places and one of each tell the same, through lives that end."""
    prompts = [chat(*messages) for messages in ((), (b"a",), (b"a", b"b"), (b"a", b"b", b"c"), (b"a", b"d"), (b"e",))]
    together, alone, now = TextIndex(life=60), {place: TextIndex(life=60) for place in (P0, P1, D0)}, 0.0
    for number, place, keeps, later in steps:
        now += later
        together.sent(prompts[number], {place: keeps}, now)
        alone[place].sent(prompts[number], {place: keeps}, now)
        for prompt in prompts:
            each = {name: hit for index in alone.values() for name, hit in found(index, prompt, now).items()}
            assert found(together, prompt, now) == each
