"""How many agents live where: each once with its sub-agents, from its beginning until its next prompt is overdue."""

import itertools

import pytest

from pdproxy.planning.agents import MOST_MARKS
from pdproxy.planning.conversations import FIRST_PAUSE, PAUSES, SPARE, Conversation, Conversations
from pdproxy.planning.plan_types import LARGE, NextTurn
from pdproxy.planning.prefix import Place
from pdproxy.planning.shares import LimitsByKey
from pdproxy.settings.types import Keep
from tests.fakes.calls import calls

ONE, OTHER = Place("p0"), Place("p1")
CACHE = 480_000
TOKENS = round(LARGE * CACHE) + 1


def conversations() -> Conversations:
    numbers = itertools.count()
    return Conversations(Keep.AUTO, lambda: f"id-{next(numbers)}", LimitsByKey(), 3600.0)


def marks(texts: tuple[int, ...]) -> list[int]:
    """The marks of a prompt of these texts."""
    return [hash(texts[:end]) for end in range(1, len(texts) + 1)]


def begin(
    book: Conversations, *texts: int, at: float = 0.0, place: Place = ONE, tokens: int = TOKENS, tenant: str = "t"
) -> Conversation:
    """A prompt that a place computes at once."""
    found = book.turn(tenant, marks(texts), at, named=False, tokens=tokens)
    book.computes(found, place, tokens, CACHE)
    book.cached(found, 0.0, at)
    return found


def call(
    book: Conversations, *texts: int, at: float = 0.0, place: Place = ONE, tokens: int = TOKENS, tenant: str = "t"
) -> Conversation:
    """A prompt that is answered at once."""
    found = begin(book, *texts, at=at, place=place, tokens=tokens, tenant=tenant)
    book.answered(found)
    return found


def expected(book: Conversations, *texts: int, at: float, tokens: int = TOKENS, tenant: str = "t") -> NextTurn:
    """Before a plan of a prompt, which is then given up."""
    asking = book.turn(tenant, marks(texts), at, named=False, tokens=tokens)
    found = book.next_turn(asking, tokens, at)
    book.answered(asking)
    assert found is not None
    return found


def one_that_came_back() -> Conversations:
    """One agent lives at `ONE`, and its pauses are of four seconds."""
    book = conversations()
    call(book, 1)
    call(book, 1, 2, at=4)
    return book


def test_nothing_is_said_before_a_conversation_of_the_key_has_come_back() -> None:
    book = one_that_came_back()
    asking = book.turn("other", marks((9,)), 5.0, named=False, tokens=TOKENS)
    assert book.next_turn(asking, TOKENS, 5.0) is None
    assert expected(book, 9, at=5).others == {ONE: 1.0}


def test_one_that_has_not_come_back_counts_by_how_many_did() -> None:
    book = one_that_came_back()
    call(book, 8, at=5, place=OTHER)
    assert expected(book, 9, at=6).others == {ONE: 1.0, OTHER: 2 / 4}
    call(book, 8, 9, at=6, place=OTHER)
    assert expected(book, 7, at=7).others == {ONE: 1.0, OTHER: 1.0}


def test_a_later_prompt_is_told_its_home_alone() -> None:
    book = one_that_came_back()
    later = expected(book, 1, 2, 3, at=6)
    assert (later.home, later.others) == (ONE, {})
    assert expected(book, 9, at=6).home is None


@pytest.mark.parametrize(("tokens", "others", "home"), [(TOKENS - 1, {}, None), (TOKENS, {ONE: 1.0}, ONE)])
def test_small_prompts_are_told_nothing(tokens: int, others: dict[Place, float], home: Place | None) -> None:
    book = one_that_came_back()
    assert expected(book, 9, at=5, tokens=tokens).others == others
    assert expected(book, 1, 2, 3, at=6, tokens=tokens).home == home


def test_conversations_of_small_prompts_are_not_counted_until_one_is_large() -> None:
    book = one_that_came_back()
    call(book, 8, at=5, place=OTHER, tokens=TOKENS - 1)
    assert expected(book, 9, at=5).others == {ONE: 1.0}
    assert expected(book, 8, 9, at=6).home == OTHER, "it does not begin with its first large prompt"
    call(book, 8, 9, 10, at=6, place=OTHER)
    assert expected(book, 7, at=7).others == {ONE: 1.0, OTHER: 1.0}


def test_a_sub_agent_belongs_to_the_agent_from_which_it_branches_off() -> None:
    book = one_that_came_back()
    branch = begin(book, 1, 3, at=5)
    begin(book, 1, 4, at=5)
    assert expected(book, 9, at=5).others == {ONE: 1.0}
    assert expected(book, 1, 3, 5, at=6).home == ONE
    book.answered(branch)
    assert expected(book, 9, at=5000).others == {ONE: 1.0}, "while any branch is being answered"


def test_a_sub_agent_is_found_when_its_parent_has_gone_on_since() -> None:
    book = one_that_came_back()
    for last in range(3, 9):
        call(book, *range(1, last), at=last)
    assert expected(book, 1, 20, at=10).home == ONE
    call(book, 1, 30, at=10)
    assert expected(book, 9, at=10).others == {ONE: 1.0}


def test_sub_agents_of_another_key_do_not_meet() -> None:
    book = one_that_came_back()
    for last in range(3, 9):
        call(book, *range(1, last), at=last)
    call(book, 77, tenant="u", at=9)
    call(book, 77, 78, tenant="u", at=9)
    assert expected(book, 1, 20, at=10, tenant="u").home is None


def test_so_many_prompts_of_one_agent_are_remembered() -> None:
    book = one_that_came_back()
    for last in range(3, MOST_MARKS + 2):
        call(book, *range(1, last), at=last)
    assert expected(book, 1, 2, 777, at=70).home == ONE
    assert expected(book, 1, 999, at=70).home == ONE, "the oldest of them"
    call(book, *range(1, MOST_MARKS + 2), at=70)
    assert expected(book, 1, 888, at=71).home is None


def test_it_lives_until_its_next_prompt_is_overdue() -> None:
    book, usual = one_that_came_back(), PAUSES * 40.0 + SPARE
    call(book, 1, 2, 3, at=80)  # its pauses are of 40 seconds now
    call(book, 8, at=79 + usual, place=OTHER)
    assert expected(book, 9, at=79.9 + usual).others == {ONE: 1.0, OTHER: 0.5}
    assert expected(book, 7, at=80 + usual).others == {OTHER: 0.5}
    assert expected(book, 6, at=79 + usual + FIRST_PAUSE).others == {}
    call(book, 1, 2, 3, 4, at=900)
    assert expected(book, 5, at=901).others == {ONE: 1.0}, "it has come back all the same"


def test_what_is_answered_is_not_overdue() -> None:
    book = one_that_came_back()
    running = begin(book, 1, 2, 3, at=6)
    assert expected(book, 9, at=5000).others == {ONE: 1.0}
    book.answered(running)
    assert expected(book, 7, at=5000).others == {}, "its pause began when its prompt was computed"


def test_a_prompt_that_comes_in_time_puts_it_off() -> None:
    book = one_that_came_back()
    for turn in range(3, 20):
        call(book, *range(1, turn), at=4 * turn)
        assert expected(book, 900 + turn, at=4 * turn + 1).others == {ONE: 1.0}


def test_one_that_moves_is_counted_where_it_is() -> None:
    book = one_that_came_back()
    call(book, 1, 2, 3, at=6, place=OTHER)
    assert expected(book, 9, at=6).others == {OTHER: 1.0}


def test_nobody_lives_at_a_node_that_is_forgotten() -> None:
    book = one_that_came_back()
    call(book, 8, at=5, place=OTHER)
    call(book, 8, 9, at=5, place=OTHER)
    book.forget_node("p0", 5.0)
    assert expected(book, 7, at=5).others == {OTHER: 1.0}
    assert expected(book, 1, 2, 3, at=6).others == {OTHER: 1.0}, "it begins anew"
    call(book, 1, 2, 3, 4, at=6, place=OTHER)
    assert expected(book, 6, at=6).others == {OTHER: 2.0}
    book.forget_node("p1", 6.0)
    assert expected(book, 5, at=6).others == {}


def test_agents_are_counted_without_looking_at_each() -> None:
    def counting(agents: int) -> int:
        book = one_that_came_back()
        for each in range(100, 100 + agents):
            call(book, each, at=4)
        asking = book.turn("t", marks((9,)), 5.0, named=False, tokens=TOKENS)
        return calls(lambda: book.next_turn(asking, TOKENS, 5.0))

    assert counting(2) == counting(200)
