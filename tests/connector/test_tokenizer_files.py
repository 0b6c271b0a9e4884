"""Digests of tokenizer and chat template: what changes token ids changes them, and nothing else does."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from connector.fingerprint import NONE
from connector.tokenizer_files import ChatArguments, TokenizerSource, chat_template_part, tokenizer_part
from deploy.local.paths import MODEL

Change = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the tiny model's tokenizer."""
    made = tmp_path / "model"
    made.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MODEL / name, made)
    return made


def parts(folder: Path, **source: Any) -> tuple[str, str]:
    made = TokenizerSource(str(folder), **source)
    return tokenizer_part(made), chat_template_part(made)


def settings(**more: Any) -> Change:
    """Add these to `tokenizer_config.json`."""

    def change(folder: Path) -> None:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **more}))

    return change


def vocabulary(folder: Path) -> None:
    path = folder / "tokenizer.json"
    whole = json.loads(path.read_text())
    words = whole["model"]["vocab"]
    first, second = list(words)[300:302]
    words[first], words[second] = words[second], words[first]
    path.write_text(json.dumps(whole))


def written_otherwise(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = folder / name
        path.write_text(json.dumps(dict(reversed(json.loads(path.read_text()).items())), indent=4))


def template(folder: Path, name: str = "chat_template.jinja", text: str = "{{ messages }}") -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(text)


def moved_into_settings(folder: Path) -> None:
    text = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    settings(chat_template=text)(folder)


TOKENIZERS: dict[str, Change] = {
    "ids": vocabulary,
    "another class": settings(tokenizer_class="LlamaTokenizer"),
    "a token in front": settings(add_bos_token=True),
    "code": lambda folder: (folder / "tokenization_own.py").write_text("class Own: ..."),
}
TEMPLATES: dict[str, Change] = {
    "text": template,
    "another name": lambda folder: template(folder, "additional_chat_templates/tools.jinja"),
    "of a processor": lambda folder: template(folder, "chat_template.json", '{"chat_template": "x"}'),
    "gone": lambda folder: (folder / "chat_template.jinja").unlink(),
}
NOTHING: dict[str, Change] = {
    "written otherwise": written_otherwise,
    "in the settings": moved_into_settings,
    "settings that change no id": settings(model_max_length=7, name_or_path="elsewhere", padding_side="left"),
    "a vocabulary beside the fast tokenizer": lambda folder: (folder / "vocab.json").write_text("{}"),
    "weights": lambda folder: (folder / "model.safetensors").write_bytes(b"x"),
    "a template that a file goes before": settings(chat_template="not this one"),
}


@pytest.mark.parametrize("change", TOKENIZERS.values(), ids=TOKENIZERS)
def test_what_makes_other_ids_is_another_tokenizer(folder: Path, change: Change) -> None:
    before, own = parts(folder)
    change(folder)
    assert (parts(folder)[0] == before, parts(folder)[1]) == (False, own)


@pytest.mark.parametrize("change", TEMPLATES.values(), ids=TEMPLATES)
def test_what_renders_chats_otherwise_is_another_template(folder: Path, change: Change) -> None:
    tokenizer, before = parts(folder)
    change(folder)
    assert (parts(folder)[0], parts(folder)[1] == before) == (tokenizer, False)


@pytest.mark.parametrize("change", NOTHING.values(), ids=NOTHING)
def test_what_changes_no_prompt_changes_neither(folder: Path, change: Change) -> None:
    before = parts(folder)
    change(folder)
    assert parts(folder) == before


def test_the_mode_counts_and_the_path_does_not(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(folder, elsewhere)
    assert parts(folder) == parts(elsewhere) == parts(folder, mode="hf")
    assert parts(folder, mode="slow")[0] != parts(folder)[0]


@pytest.mark.parametrize("mode", ["auto", "mistral"])
def test_other_kinds_of_tokenizers_are_read_too(folder: Path, mode: str) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / ("tekken.json" if mode == "mistral" else "tokenizer.model")).write_bytes(b"one")
    before = parts(folder, mode=mode)[0]
    (folder / ("tekken.json" if mode == "mistral" else "tokenizer.model")).write_bytes(b"other")
    assert parts(folder, mode=mode)[0] != before


@pytest.mark.parametrize("broken", ["not json", "[]", "\xff"])
def test_what_cannot_be_read_counts_by_its_name_and_is_logged(
    folder: Path, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "tokenizer_config.json").write_text(broken, encoding="latin-1")
    with caplog.at_level(logging.WARNING):
        found = tokenizer_part(TokenizerSource(str(folder)))
    assert found == tokenizer_part(TokenizerSource(str(folder)))
    assert found != tokenizer_part(TokenizerSource(str(folder), revision="another"))
    assert found.startswith("hf:source:")
    assert "cannot be compared" in caplog.text


def test_without_any_template_there_is_none(tmp_path: Path) -> None:
    assert parts(tmp_path)[1] == NONE
    assert chat_template_part(TokenizerSource("/nowhere/at/all")) == NONE


# What an API server is told


def given(**arguments: Any) -> ChatArguments:
    return ChatArguments.of(SimpleNamespace(**arguments))


def test_a_template_that_is_given_counts_by_its_text(folder: Path, tmp_path: Path) -> None:
    source = TokenizerSource(str(folder))
    own = chat_template_part(source)
    (tmp_path / "same.jinja").write_text((folder / "chat_template.jinja").read_text())
    (tmp_path / "other.jinja").write_text("{{ messages }}")
    assert chat_template_part(source, given(chat_template=str(tmp_path / "same.jinja"))) == own
    other = chat_template_part(source, given(chat_template=str(tmp_path / "other.jinja")))
    assert other == chat_template_part(source, given(chat_template="{{ messages }}")) != own


@pytest.mark.parametrize(
    "arguments",
    [
        {"default_chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_content_format": "string"},
        {"cohere_format": "cmd3"},
        {"exclude_tools_when_tool_choice_none": True},
    ],
    ids=str,
)
def test_what_is_set_beside_a_template_counts(folder: Path, arguments: dict[str, Any]) -> None:
    source = TokenizerSource(str(folder))
    plain = [chat_template_part(source, given()), chat_template_part(source, given(default_chat_template_kwargs={}))]
    assert plain == [chat_template_part(source)] * 2
    assert chat_template_part(source, given(**arguments)) not in (plain[0], NONE)
    assert chat_template_part(source, given(**arguments)) == chat_template_part(source, given(**arguments))


def test_vllms_own_defaults_count_as_nothing(folder: Path) -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    source = TokenizerSource(str(folder))
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    assert chat_template_part(source, ChatArguments.of(parsed)) == chat_template_part(source)
