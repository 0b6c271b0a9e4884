"""Which prompt is whose turn, how long conversations are kept, and who is told to forget them."""

import itertools
import math

import pytest

from pdproxy.planning.conversations import (
    FEW,
    FIRST_PAUSE,
    MOST_FORGOTTEN,
    MOST_USUAL,
    PAUSES,
    SPARE,
    Conversation,
    Conversations,
)
from pdproxy.planning.plan_types import NextTurn
from pdproxy.planning.prefix import Place
from pdproxy.planning.shares import KeyLimits, LimitsByKey
from pdproxy.reasons import KeepReason
from pdproxy.request import KeepAsk
from pdproxy.settings.types import Keep

ONE, OTHER = Place("p0"), Place("p1")
DAY = KeepAsk(86400.0, KeepReason.PROMPT_CACHE_RETENTION)


def conversations(
    keep: Keep = Keep.AUTO, longest: float = 3600.0, most: int = 100, **limits: KeyLimits
) -> Conversations:
    numbers = itertools.count()
    return Conversations(keep, lambda: f"id-{next(numbers)}", LimitsByKey(limits), longest, most)


def turn(book: Conversations, *marks: int, at: float = 0.0, tenant: str = "t", named: bool = False) -> Conversation:
    """A turn that is answered at once."""
    found = book.turn(tenant, marks, at, named=named)
    end(book, found, at)
    return found


def end(book: Conversations, conversation: Conversation, at: float, seconds: float = 0.0) -> None:
    """Its prompt is computed, and answered."""
    book.cached(conversation, seconds, at)
    book.turn_ended(conversation)


def test_a_prompt_that_begins_with_another_one_is_the_next_turn() -> None:
    book = conversations()
    first = turn(book, 1, 2)
    assert turn(book, 1, 2, 3, 4, at=5) is first
    assert turn(book, 1, 2, 3, 4, 5, at=6) is first
    assert turn(book, 9) is not first
    assert (first.turns, len(book)) == (3, 2)


def test_keys_do_not_meet() -> None:
    book = conversations()
    assert turn(book, 1, tenant="a") is not turn(book, 1, 2, tenant="b")


def test_the_second_that_goes_on_from_a_prompt_is_a_branch_with_an_id_of_its_own() -> None:
    book = conversations()
    first = turn(book, 1)
    assert turn(book, 1, 2, at=4) is first
    branch = turn(book, 1, 3, at=5)
    assert branch.id != first.id
    assert branch.pause == first.pause == 4.0, "its pauses are likely to be as long"
    assert turn(book, 1, 3, 4, at=7) is branch
    assert turn(book, 1, 2, 5, at=9) is first


def test_while_a_turn_is_answered_what_goes_on_from_it_is_a_branch() -> None:
    book = conversations()
    first = book.turn("t", [1], 0.0, named=False)
    assert book.turn("t", [1], 0.0, named=False) is not first, "the same prompt once more"
    end(book, first, 1.0)


def test_pauses_are_counted_from_the_end_of_an_answer() -> None:
    book = conversations()
    first = book.turn("t", [1], 0.0, named=False)
    end(book, first, 10.0)
    assert [first.pause] == [None]
    book.turn("t", [1, 2], 14.0, named=False)
    assert first.pause == 4.0
    end(book, first, 20.0)
    book.turn("t", [1, 2, 3], 28.0, named=False)
    assert first.pause == 6.0


def test_a_conversation_that_has_come_back_is_kept_for_some_of_its_pauses() -> None:
    book = conversations()
    first = turn(book, 1)
    assert book.seconds_to_keep(first, None) == (0.0, None)
    turn(book, 1, 2, at=4)
    assert book.seconds_to_keep(first, None) == (PAUSES * 4 + SPARE, KeepReason.USUAL_PAUSE)
    turn(book, 1, 2, 3, at=4000)
    assert book.seconds_to_keep(first, None) == (MOST_USUAL, KeepReason.USUAL_PAUSE)


def test_a_clients_word_counts_as_far_as_the_operator_lets_it() -> None:
    book = conversations(Keep.ASKED, longest=600.0)
    first = turn(book, 1)
    turn(book, 1, 2, at=4)
    assert book.seconds_to_keep(first, None) == (0.0, None)
    assert book.seconds_to_keep(first, DAY) == (600.0, KeepReason.PROMPT_CACHE_RETENTION)
    assert book.seconds_to_keep(first, KeepAsk(300.0, KeepReason.CACHE_CONTROL)) == (300.0, KeepReason.CACHE_CONTROL)
    assert book.seconds_to_keep(first, KeepAsk(0.0, KeepReason.PROMPT_CACHE_OPTIONS)) == (0.0, None)


def test_a_named_session_is_kept_from_its_first_turn_while_such_come_back() -> None:
    book = conversations()
    first = turn(book, 1, named=True)
    assert book.seconds_to_keep(first, None) == (FIRST_PAUSE, KeepReason.SESSION)
    for number in range(2, FEW + 1):
        last = turn(book, number, named=True)
    assert book.seconds_to_keep(last, None) == (0.0, None), "of so many not one came back"
    assert book.seconds_to_keep(turn(book, 99, tenant="other", named=True), None)[1] is KeepReason.SESSION
    for number in range(1, FEW // 2):
        turn(book, number, number + 100, at=1.0, named=True)
    assert book.seconds_to_keep(last, None) == (FIRST_PAUSE, KeepReason.SESSION)


def test_the_place_that_kept_it_is_told_once_when_it_moves() -> None:
    book = conversations()
    first = turn(book, 1)
    book.keep(first, ONE, 100, 0.0)
    end(book, first, 1.0, 60.0)
    assert first.kept_until() == 61.0
    book.keep(first, OTHER, 100, 5.0)
    assert (list(book.to_forget(ONE)), list(book.to_forget(ONE)), list(book.to_forget(OTHER))) == ([first.id], [], [])
    assert first.kept == {OTHER: math.inf}
    book.let_go(first, 6.0)
    assert list(book.to_forget(OTHER)) == [first.id]


def test_what_has_ended_by_itself_need_not_be_forgotten() -> None:
    book = conversations()
    first = turn(book, 1)
    book.keep(first, ONE, 100, 0.0)
    end(book, first, 0.0, 60.0)
    book.let_go(first, 60.0)
    assert (list(book.to_forget(ONE)), first.kept) == ([], {})


def test_a_place_that_is_asked_nothing_has_no_endless_list() -> None:
    book = conversations(most=2 * MOST_FORGOTTEN)
    for number in range(MOST_FORGOTTEN + 5):
        each = turn(book, number)
        book.keep(each, ONE, 1, 0.0)
        book.let_go(each, 0.0)
    first, rest = book.to_forget(ONE), book.to_forget(ONE)
    assert len(first) == MOST_FORGOTTEN
    assert not set(first) & set(rest)
    assert book.to_forget(ONE) == ()


def test_a_key_has_so_many_tokens_kept_and_no_more() -> None:
    book = conversations(small=KeyLimits(kept_tokens=100))
    first, second = turn(book, 1, tenant="small"), turn(book, 2, tenant="small")
    assert book.fits(first, 100, 0.0)
    assert not book.fits(first, 101, 0.0)
    book.keep(first, ONE, 60, 0.0)
    end(book, first, 0.0, 10.0)
    assert book.fits(first, 100, 5.0), "in the place of what it has kept"
    assert (book.fits(second, 40, 5.0), book.fits(second, 41, 5.0)) == (True, False)
    assert book.fits(second, 100, 10.0), "the other one's time is up"
    assert book.fits(turn(book, 3), 10**9, 0.0)


def test_the_oldest_conversations_are_forgotten() -> None:
    book = conversations(most=2)
    first, second = turn(book, 1), turn(book, 2)
    assert turn(book, 1, 11, at=1.0) is first
    turn(book, 3)
    assert len(book) == 2
    assert turn(book, 1, 11, 12, at=2.0) is first
    assert turn(book, 2, 22, at=2.0) is not second


@pytest.mark.parametrize("keep", [Keep.AUTO, Keep.ASKED])
def test_the_same_prompt_again_is_the_same_conversation(keep: Keep) -> None:
    book = conversations(keep)
    assert turn(book, 1, 2) is turn(book, 1, 2, at=3.0)


def test_the_next_turn_is_expected_within_the_usual_pauses_with_the_usual_length() -> None:
    book = conversations()
    first = book.turn("t", [1], 0.0, named=False, tokens=100)
    assert book.next_turn(first, 100, 0.0) is None, "nothing has come back yet"
    end(book, first, 0.0)
    assert book.turn("t", [1, 2], 10.0, named=False, tokens=500) is first
    expected = book.next_turn(first, 500, 10.0)
    assert expected == NextTurn(PAUSES * 10.0, 500.0)
    other = book.turn("t", [9], 10.0, named=False, tokens=200)
    of_other = book.next_turn(other, 200, 10.0)
    assert of_other is not None
    assert of_other.seconds == PAUSES * 10.0
    assert of_other.tokens == pytest.approx(500.0 * 2 / 4), "one of two has come back, and such are as long"
    assert book.next_turn(book.turn("u", [9], 10.0, named=False), 200, 10.0) is None, "of another key"


def test_the_next_turn_finds_all_at_the_place_that_keeps_it() -> None:
    book = conversations()
    first = turn(book, 1)
    turn(book, 1, 2, at=4.0)
    book.keep(first, ONE, 100, 4.0)
    end(book, first, 4.0, 21.0)
    for at, kept in ((20.0, (ONE,)), (25.0, ())):
        expected = book.next_turn(first, 100, at)
        assert expected is not None
        assert expected.kept_at == kept


def test_what_could_not_be_told_is_told_later_unless_it_is_kept_there_again() -> None:
    book = conversations()
    first, second = turn(book, 1), turn(book, 2)
    for each in (first, second):
        book.keep(each, ONE, 1, 0.0)
        book.let_go(each, 0.0)
    ids = book.to_forget(ONE)
    assert ids == [first.id, second.id]
    book.forget_later(ONE, ids)
    book.keep(second, ONE, 1, 0.0)
    assert book.to_forget(ONE) == [first.id]
