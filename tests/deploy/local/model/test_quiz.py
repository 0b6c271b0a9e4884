"""The exams: seeded, right, and of the size asked for."""

import pytest

from deploy.local.model.quiz import ASK, CUE, NAMES, RECITE, Question, Quiz, quiz, recite
from deploy.local.model.train import build_tokenizer


def number_of(name: str, listing: str) -> str:
    """Read the number off the list as a person would."""
    (line,) = [line for line in listing.splitlines() if line.startswith(f"{name} ")]
    return line.removeprefix(name)


def test_a_seed_makes_the_same_exam_again() -> None:
    assert quiz(5, 300) == quiz(5, 300)
    assert quiz(5, 300) != quiz(6, 300)


def test_names_are_distinct() -> None:
    assert len(set(NAMES)) == len(NAMES) == 700


@pytest.mark.parametrize("seed", range(5))
def test_the_answer_stands_in_the_list(seed: int) -> None:
    paper = quiz(seed, 400)
    listing, _, name = paper.prompt().partition(ASK)
    assert paper.answer == number_of(name.removesuffix(CUE), listing)


@pytest.mark.parametrize("tokens", [20, 200, 800, 2000])
def test_a_prompt_has_about_the_tokens_asked_for(tokens: int) -> None:
    count = len(build_tokenizer().encode(quiz(1, tokens).prompt()).ids)
    assert tokens - 5 < count <= tokens


def test_other_questions_share_the_list_and_ask_for_other_names() -> None:
    first = quiz(2, 200)
    papers = [first.ask(k) for k in range(len(first.lines))]
    assert papers[0] == first
    assert {paper.listing for paper in papers} == {first.listing}
    assert len({paper.prompt() for paper in papers}) == len(first.lines)
    assert all(paper.answer == number_of(paper.asked[0].name, paper.listing) for paper in papers)


def test_a_chat_asks_what_the_completion_asks() -> None:
    paper = quiz(3, 200)
    assert paper.messages() == [{"role": "user", "content": paper.prompt()}]
    assert paper.conversation(1) == paper.messages()


def test_a_later_turn_has_the_earlier_ones_in_its_context() -> None:
    paper = quiz(3, 200)
    first, answer, second = paper.conversation(2)
    assert first == paper.messages()[0]
    assert answer == {"role": "assistant", "content": paper.answer}
    assert second == {"role": "user", "content": f"{ASK}{paper.order[1]}{CUE}"}
    assert paper.at_turn(2).answer == paper.ask(1).answer
    assert paper.at_turn(2).prompt() == f"{paper.prompt()}{paper.answer}\n{ASK}{paper.order[1]}{CUE}"


def test_a_recitation_goes_on_to_the_end_of_the_list() -> None:
    paper = recite(4, 400, lines=10)
    prompt, _, name = paper.prompt().partition(RECITE)
    assert prompt.endswith(f"{name.removesuffix(CUE)}{paper.answer}")
    assert paper.answer.count("\n") == 10
    assert len(build_tokenizer().encode(paper.answer).ids) == 5 * 10 - 1


@pytest.mark.parametrize("tokens", [0, 12, 3000])
def test_a_size_that_the_model_does_not_know_is_refused(tokens: int) -> None:
    with pytest.raises(ValueError, match="lines"):
        quiz(0, tokens)


@pytest.mark.parametrize("lines", [0, 1000])
def test_a_recitation_longer_than_the_list_is_refused(lines: int) -> None:
    with pytest.raises(ValueError, match="cannot recite"):
        recite(0, 200, lines)


def test_a_name_outside_the_list_has_no_answer() -> None:
    paper = Quiz((("marlo", "123"),), (Question(ASK, "salna"),), ("marlo",))
    with pytest.raises(ValueError, match="salna"):
        _ = paper.answer
