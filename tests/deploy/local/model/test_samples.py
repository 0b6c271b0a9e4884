"""The training samples: the tokens that the endpoints send, and the answers as targets."""

import random
from itertools import pairwise

import jinja2
import pytest

from deploy.local.model.quiz import END, Quiz, quiz, recite
from deploy.local.model.train import (
    CHAT_TEMPLATE,
    STAGES,
    UNLEARNED,
    Sample,
    build_tokenizer,
    chat,
    draw,
    encode,
    plain,
)

PAPERS = [quiz(1, 60), quiz(2, 100).at_turn(3), recite(3, 100, 6)]


def rendered(paper: Quiz) -> str:
    template = jinja2.Environment(autoescape=False).from_string(CHAT_TEMPLATE)
    return template.render(messages=paper.messages(), add_generation_prompt=True)


def target_text(sample: Sample) -> str:
    """The target tokens of a sample, as text."""
    return build_tokenizer().decode(
        [token for token in sample.targets if token != UNLEARNED], skip_special_tokens=False
    )


@pytest.mark.parametrize("paper", PAPERS)
def test_a_chat_sample_is_the_rendered_chat_and_its_answer(paper: Quiz) -> None:
    tokenizer = build_tokenizer()
    sample = encode(tokenizer, chat(paper))
    assert sample.tokens == tokenizer.encode(f"{rendered(paper)}{paper.answer}{END}").ids


@pytest.mark.parametrize("paper", PAPERS)
def test_a_plain_sample_begins_with_the_completion_prompt(paper: Quiz) -> None:
    tokenizer = build_tokenizer()
    prompt = tokenizer.encode(paper.prompt()).ids
    sample = encode(tokenizer, plain(paper))
    assert sample.tokens[: len(prompt)] == prompt
    assert sample.targets[len(prompt) - 1] == tokenizer.encode(paper.answer).ids[0]


@pytest.mark.parametrize("paper", PAPERS)
def test_the_answers_are_all_that_is_learned(paper: Quiz) -> None:
    answers = "".join(f"{paper.answer_to(question)}{END}" for question in paper.asked)
    assert target_text(encode(build_tokenizer(), chat(paper))) == answers
    assert target_text(encode(build_tokenizer(), plain(paper))) == answers


@pytest.mark.parametrize("seed", range(20))
def test_targets_name_the_next_token_except_where_an_answer_ends(seed: int) -> None:
    tokenizer = build_tokenizer()
    sample = draw(random.Random(seed), tokenizer, STAGES[1], lines=6)
    end = tokenizer.token_to_id(END)
    wrong = [
        target
        for (_, following), target in zip(pairwise(sample.tokens), sample.targets, strict=False)
        if target not in (UNLEARNED, following, end)
    ]
    assert len(sample.tokens) == len(sample.targets)
    assert wrong == []


def test_draws_are_seeded() -> None:
    tokenizer = build_tokenizer()
    first, second = (draw(random.Random(4), tokenizer, STAGES[2], lines=9) for _ in range(2))
    assert first == second
