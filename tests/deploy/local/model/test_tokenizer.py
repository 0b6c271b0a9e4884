"""The tokenizer and the chat template."""

import jinja2
import pytest

from deploy.local.model.quiz import NAMES, SPECIAL, VOCABULARY
from deploy.local.model.train import CHAT_TEMPLATE, build_tokenizer


@pytest.mark.parametrize(
    "text",
    [
        "marlo 482\nsalna 007\n? marlo",
        "Hello, Wörld!  12 a? b\t\r\n  日本 🙂",
        "<|user|>marlo 482\n> marlo 482\n<|end|>",
        "",
    ],
)
def test_any_text_comes_back(text: str) -> None:
    tokenizer = build_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_a_line_is_five_tokens() -> None:
    assert build_tokenizer().encode("marlo 482\n").tokens == ["marlo", "Ġ4", "8", "2", "Ċ"]


def test_every_name_is_one_token_in_a_list_and_in_a_question() -> None:
    tokenizer = build_tokenizer()
    for name in NAMES:
        assert tokenizer.encode(f"{name} 1").tokens == [name, "Ġ1"]
        assert tokenizer.encode(f"? {name} =").tokens == ["? ", name, "Ġ="]


def test_the_vocabulary_fits_the_model() -> None:
    assert build_tokenizer().get_vocab_size() <= VOCABULARY


def test_special_tokens_are_left_out_of_an_answer() -> None:
    tokenizer = build_tokenizer()
    assert tokenizer.decode(tokenizer.encode(" 482<|end|>").ids) == " 482"
    assert [tokenizer.token_to_id(token) for token in SPECIAL] == list(range(len(SPECIAL)))


def render(*messages: tuple[str, str], prompting: bool) -> str:
    template = jinja2.Environment(autoescape=False).from_string(CHAT_TEMPLATE)
    turns = [{"role": role, "content": content} for role, content in messages]
    return template.render(messages=turns, add_generation_prompt=prompting)


def test_the_template_marks_every_role() -> None:
    turns = (("system", " Be brief.\n"), ("user", "? marlo\n"), ("assistant", " 482"), ("user", "? salna"))
    text = "<|system|>Be brief.<|user|>? marlo 482<|end|><|user|>? salna"
    assert render(*turns, prompting=False) == text
    assert render(*turns, prompting=True) == text


def test_a_half_said_answer_can_be_gone_on_with() -> None:
    whole = render(("user", "> marlo"), ("assistant", " 482\nsal"), prompting=False)
    assert whole == "<|user|>> marlo 482\nsal<|end|>"
