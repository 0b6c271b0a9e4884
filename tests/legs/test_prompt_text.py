"""The text of prompts, in parts that later prompts begin with."""

import pytest

from pdproxy.legs.prompt_text import MOST_BYTES, prompt_ids, prompt_parts, prompt_salt
from pdproxy.request import Endpoint

USER = {"role": "user", "content": "hello"}


def chat(*messages: object, **more: object) -> dict[str, object]:
    return {"model": "m", "messages": list(messages), **more}


def test_each_message_is_a_part_and_a_longer_conversation_begins_with_the_shorter() -> None:
    first = prompt_parts(chat(USER))
    longer = prompt_parts(chat(USER, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "ü\ud800"}))
    assert len(longer) == 3
    assert longer[: len(first)] == first
    assert len({*longer}) == 3


def test_the_role_and_everything_else_of_a_message_counts() -> None:
    kinds = [
        USER,
        {"role": "system", "content": "hello"},
        {**USER, "name": "eve"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "g"}}]},
        {
            "role": "user",
            "content": [{"type": "text", "text": "hello"}, {"type": "image_url", "image_url": {"url": "a"}}],
        },
        {
            "role": "user",
            "content": [{"type": "text", "text": "hello"}, {"type": "image_url", "image_url": {"url": "b"}}],
        },
    ]
    assert len({prompt_parts(chat(kind))[0] for kind in kinds}) == len(kinds)


def test_tools_and_instructions_come_first() -> None:
    plain, with_tools = prompt_parts(chat(USER)), prompt_parts(chat(USER, tools=[{"type": "function"}]))
    assert with_tools[-1:] == plain
    assert len(with_tools) == 2
    assert len(prompt_parts({"instructions": "be kind", "input": [USER]})) == 2
    assert len(prompt_parts({"system": [{"type": "text", "text": "x" * 9000}], "messages": [USER]})[0]) > 9000


def test_of_what_is_no_text_only_the_ends_count() -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:" + "x" * 100_000}}]}
    assert len(prompt_parts(chat(image))[0]) < 500
    long = {"role": "user", "content": [{"type": "text", "text": "x" * 100_000}]}
    assert len(prompt_parts(chat(long))[0]) > 100_000


@pytest.mark.parametrize("prompt", ["one text", "x" * 2 * MOST_BYTES])
def test_a_completion_is_one_part_of_bounded_length(prompt: str) -> None:
    assert prompt_parts({"prompt": prompt}) == [prompt.encode()[:MOST_BYTES]]


def test_many_messages_are_cut_too() -> None:
    parts = prompt_parts(chat(*({"role": "user", "content": "x" * 1000} for _ in range(1000))))
    assert sum(map(len, parts)) == MOST_BYTES


def test_ids_are_taken_as_they_are() -> None:
    assert prompt_ids({"prompt": [3, 4]}) == [3, 4]
    assert prompt_ids({"prompt": "3 4"}) == prompt_ids({"prompt": []}) == prompt_ids(chat(USER)) == ()


def test_no_prompt_has_no_parts() -> None:
    empty: list[dict[str, object]] = [{}, {"prompt": None}, {"messages": []}, {"messages": None}, {"input": ""}]
    assert [prompt_parts(body) for body in empty] == [[]] * 5


def test_what_changes_the_rendering_or_the_cache_is_salt() -> None:
    bodies = [chat(), chat(cache_salt="a"), chat(cache_salt="b"), chat(chat_template_kwargs={"enable_thinking": False})]
    salts = {prompt_salt(Endpoint.CHAT, "m", body) for body in bodies}
    salts |= {prompt_salt(Endpoint.MESSAGES, "m", chat()), prompt_salt(Endpoint.CHAT, "lora", chat())}
    assert len(salts) == 6
    assert prompt_salt(Endpoint.CHAT, "m", chat(temperature=1)) in salts


def test_depth_is_no_danger() -> None:
    deep: object = "x"
    for _ in range(100_000):
        deep = [deep]
    assert prompt_parts(chat({"role": "user", "content": None, "more": deep}))
