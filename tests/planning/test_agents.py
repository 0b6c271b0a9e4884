"""How many agents live where: each once with its sub-agents, until it has been silent for long."""

import itertools

import pytest

from pdproxy.nodes.node import Binding, Capacity, Node, Role
from pdproxy.planning.agents import LARGE, LIVES, MOST_AGENTS, Agent, Agents, large_tokens
from pdproxy.planning.conversations import MOST_MARKS, Conversation, Conversations
from pdproxy.planning.plan_types import NextTurn
from pdproxy.planning.prefix import Place
from pdproxy.planning.shares import LimitsByKey
from pdproxy.settings.types import Keep
from tests.fakes.calls import calls

ONE, OTHER = Place("p0"), Place("p1")
TOKENS = 10_001
LARGER_THAN = 10_000


def marks(texts: tuple[int, ...]) -> list[int]:
    """The marks of a prompt of these texts."""
    return [hash(texts[:end]) for end in range(1, len(texts) + 1)]


def begin(
    book: Conversations, *texts: int, at: float = 0.0, place: Place = ONE, tokens: int = TOKENS, tenant: str = "t"
) -> Conversation:
    """A prompt that a place computes at once."""
    found = book.turn(tenant, marks(texts), at, named=False, tokens=tokens)
    book.computes(found, place, tokens, LARGER_THAN, at)
    book.cached(found, 0.0, at)
    return found


def call(
    book: Conversations, *texts: int, at: float = 0.0, place: Place = ONE, tokens: int = TOKENS, tenant: str = "t"
) -> None:
    """A prompt that is answered at once."""
    book.turn_ended(begin(book, *texts, at=at, place=place, tokens=tokens, tenant=tenant))


def expected(book: Conversations, *texts: int, at: float, tokens: int = TOKENS, tenant: str = "t") -> NextTurn:
    """Before a plan of a prompt, which is then given up."""
    asking = book.turn(tenant, marks(texts), at, named=False, tokens=tokens)
    found = book.next_turn(asking, tokens, at)
    book.turn_ended(asking)
    assert found is not None
    return found


def one_that_came_back() -> Conversations:
    """One agent lives at `ONE`, and its pauses are of four seconds."""
    numbers = itertools.count()
    book = Conversations(Keep.AUTO, lambda: f"id-{next(numbers)}", LimitsByKey(), 3600.0)
    call(book, 1)
    call(book, 1, 2, at=4)
    return book


def agents(book: Conversations, at: float) -> dict[Place, float]:
    """Those that are counted, in multiples of the likelihood that a further one goes on."""
    found = expected(book, 900 + round(at), at=at).others
    whole = max(found.values(), default=1.0)
    return {place: count / whole for place, count in found.items()}


def test_a_prompt_is_large_by_its_part_of_a_places_cache() -> None:
    ranks = Node(
        "p0", "http://p0", (Role.PREFILL,), "m", capacity=Capacity(96_000, None, 2, Binding.ATTENTION), ranks=2
    )
    assert large_tokens(ranks) == 48_000 * LARGE == 1000.0
    assert large_tokens(Node("p0", "http://p0", (Role.PREFILL,), "m")) == float("inf")


def test_nothing_is_said_before_a_conversation_of_the_key_has_come_back() -> None:
    book = one_that_came_back()
    asking = book.turn("other", marks((9,)), 5.0, named=False, tokens=TOKENS)
    assert book.next_turn(asking, TOKENS, 5.0) is None
    assert list(expected(book, 9, at=5).others) == [ONE]


def test_agents_count_by_how_likely_it_is_that_two_of_them_go_on() -> None:
    book = Agents()
    first, second = Agent(), Agent()
    book.lives(first, ONE, 0.0, 1)
    assert book.at(0.0) == {ONE: 1 / 2 * 1 / 2}
    book.lives(first, ONE, 1.0, 2)
    assert book.at(1.0) == {ONE: 2 / 3}
    book.lives(second, OTHER, 1.0, 1)
    assert book.at(1.0) == {ONE: 2 / 3, OTHER: 2 / 3 * 2 / 3}
    book.lives(first, ONE, 2.0, 3)
    assert book.at(LIVES + 1.0) == {ONE: 2 / 4}, "one of two has not come back"
    assert book.at(LIVES + 2.0) == {}


def test_a_later_prompt_is_told_its_home_alone() -> None:
    book = one_that_came_back()
    later = expected(book, 1, 2, 3, at=6)
    assert (later.home, later.others) == (ONE, {})
    assert expected(book, 9, at=6).home is None


@pytest.mark.parametrize(("tokens", "told"), [(LARGER_THAN, False), (TOKENS, True)])
def test_a_small_first_prompt_is_told_nothing(tokens: int, told: bool) -> None:
    assert bool(expected(one_that_came_back(), 9, at=5, tokens=tokens).others) is told


def test_a_conversation_is_an_agents_from_its_first_large_prompt_on_and_does_not_begin_with_it() -> None:
    book = one_that_came_back()
    call(book, 8, at=5, place=OTHER, tokens=LARGER_THAN)
    assert agents(book, 5) == {ONE: 1.0}
    growing = expected(book, 8, 9, at=6)
    assert (growing.home, growing.others) == (None, {})
    call(book, 8, 9, 10, at=6, place=OTHER)
    assert agents(book, 7) == {ONE: 1.0, OTHER: 1.0}
    assert expected(book, 8, 9, 10, 11, at=8).home == OTHER


def test_a_sub_agent_belongs_to_the_agent_from_which_it_branches_off() -> None:
    book = one_that_came_back()
    call(book, 7, at=4, place=OTHER)
    call(book, 7, 8, at=4, place=OTHER)
    begin(book, 1, 3, at=5)
    begin(book, 1, 4, at=5)
    assert agents(book, 5) == {ONE: 1.0, OTHER: 1.0}
    assert expected(book, 1, 3, 5, at=6).home == ONE


def test_a_sub_agent_is_found_when_its_parent_has_gone_on_since() -> None:
    book = one_that_came_back()
    for last in range(3, MOST_MARKS + 1):
        call(book, *range(1, last + 1), at=last)
    assert expected(book, 1, 20, at=10).home == ONE, "where the first of the remembered prompts ended"
    call(book, *range(1, MOST_MARKS + 2), at=10)
    call(book, *range(1, MOST_MARKS + 3), at=10)
    assert expected(book, 1, 30, at=10).home is None


def test_sub_agents_of_another_key_do_not_meet() -> None:
    book = one_that_came_back()
    call(book, 77, tenant="u", at=9)
    call(book, 77, 78, tenant="u", at=9)
    assert expected(book, 1, 2, 20, at=10, tenant="u").home is None


def test_each_prompt_of_an_agent_puts_off_that_it_is_not_counted_any_more() -> None:
    book = one_that_came_back()
    call(book, 1, 2, 3, at=200)
    assert agents(book, 199 + LIVES) == {ONE: 1.0}
    assert agents(book, 200 + LIVES) == {}
    assert expected(book, 1, 2, 3, 4, at=201 + LIVES).home == ONE, "it is known all the same"
    call(book, 1, 2, 3, 4, 5, at=900)
    assert agents(book, 901) == {ONE: 1.0}


def test_one_that_moves_is_counted_where_it_is() -> None:
    book = one_that_came_back()
    call(book, 1, 2, 3, at=6, place=OTHER)
    assert agents(book, 6) == {OTHER: 1.0}


def test_only_so_many_are_counted() -> None:
    book = Agents()
    for _ in range(MOST_AGENTS):
        book.lives(Agent(), ONE, 0.0, 2)
    book.lives(Agent(), OTHER, 1.0, 2)
    counted = book.at(1.0)
    assert counted[ONE] == pytest.approx(counted[OTHER] * (MOST_AGENTS - 1))


def test_agents_are_counted_without_looking_at_each() -> None:
    def counting(agents: int) -> int:
        book = one_that_came_back()
        for each in range(100, 100 + agents):
            call(book, each, at=4)
        asking = book.turn("t", marks((9,)), 5.0, named=False, tokens=TOKENS)
        return calls(lambda: book.next_turn(asking, TOKENS, 5.0))

    assert counting(2) == counting(200)
