"""Digests of what makes token ids of a request: the tokenizer, and the chat template.

Two nodes that differ in one of them make different prompts of one request. Nothing is answered wrong, for a ticket is
for one prompt's ids, but every prompt is computed twice. So both are parts of the fingerprint, by content: paths are
each node's own.

The engine's process reads the files that vLLM's tokenizer is loaded from. Which template an API server really uses,
only that server knows (`--chat-template` and the settings beside it are no part of the engine's configuration):
`chat_template_part` with its arguments, which `endpoints` publishes.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .fingerprint import NONE, short
from .weights import WeightsSource, model_folder

log = logging.getLogger("vllm.pdproxy.weights")

FAST = "tokenizer.json"
"""All of a fast tokenizer but for a few settings; beside it other files of the vocabulary count for nothing."""
CONFIG = "tokenizer_config.json"
CODE = "tokenization_*.py"
VOCABULARIES = (
    "*.model",
    "tokenizer.model.*",
    "tekken.json",
    "*.tiktoken",
    "vocab.*",
    "merges.txt",
    "added_tokens.json",
)
IRRELEVANT = frozenset(
    {
        "chat_template",
        "name_or_path",
        "model_max_length",
        "processor_class",
        "tokenizer_file",
        "special_tokens_map_file",
        "padding_side",
        "truncation_side",
        "clean_up_tokenization_spaces",
        "transformers_version",
    }
)
"""Settings in `tokenizer_config.json` that change no token id."""

TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates/*.jinja"
PROCESSOR_TEMPLATE = "chat_template.json"
DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """Where vLLM loads a tokenizer from: `--tokenizer` (else the model), its revision and mode, `--download-dir`."""

    name: str
    revision: str | None = None
    mode: str = "auto"
    download_dir: str | None = None

    def folder(self) -> Path:
        """Raises OSError or ValueError where there is none."""
        return model_folder(WeightsSource(self.name, self.revision, download_dir=self.download_dir))


CHAT_SETTINGS: Mapping[str, object] = {
    "chat_template_content_format": "auto",
    "default_chat_template_kwargs": None,
    "exclude_tools_when_tool_choice_none": False,
    "cohere_format": "cmd4",
    "anthropic_disabled_thinking_effort": "auto",
}
"""An API server's arguments beside `--chat-template` that change a chat's prompt, with vLLM's defaults."""


@dataclass(frozen=True, slots=True)
class ChatArguments:
    """An API server's arguments that change what becomes of a chat. `settings`: names and the JSON of their values, of
    those that are not vLLM's defaults."""

    template: str | None = None
    settings: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, arguments: Any) -> "ChatArguments":
        """Out of vLLM's parsed command line."""
        template = getattr(arguments, "chat_template", None)
        given = {name: getattr(arguments, name, usual) for name, usual in CHAT_SETTINGS.items()}
        changed = {name: value for name, value in given.items() if value and value != CHAT_SETTINGS[name]}
        settings = tuple((name, json.dumps(value, sort_keys=True)) for name, value in changed.items())
        return cls(None if template is None else str(template), settings)


def tokenizer_part(source: TokenizerSource) -> str:
    """The mode, and a digest of the tokenizer's files. Where they cannot be read it is made from the source, so that
    only nodes with equal sources agree, and a warning is logged. Never raises for what is on a disk."""
    mode = "hf" if source.mode == "auto" else source.mode
    try:
        found = list(_tokenizer(source.folder(), mode))
        if any(name != CONFIG for name, _ in found):
            return short(f"{mode}:{_digest(found)}")
        reason = "no tokenizer files were found"
    except (OSError, ValueError) as error:
        reason = str(error)
    log.warning(
        "The tokenizer of %s cannot be compared with another node's (%s): nodes count as equal where --tokenizer and "
        "--tokenizer-revision are. Make sure that they name the same content everywhere.",
        source.name,
        reason,
    )
    return short(f"{mode}:source:{_digest([source.name, source.revision])}")


def chat_template_part(source: TokenizerSource, arguments: ChatArguments | None = None) -> str:
    """A digest of the chat template, and of the API server's arguments beside it where any is given. `NONE` without a
    template. Never raises for what is on a disk."""
    given = arguments or ChatArguments()
    templates = {DEFAULT: _given(given.template)} if given.template is not None else _own_templates(source)
    if given.settings:
        return _digest([templates, given.settings])
    return _digest(templates) if templates else NONE


def _tokenizer(folder: Path, mode: str) -> Iterable[Any]:
    fast = (folder / FAST).is_file() and mode != "mistral"
    if fast:
        yield [FAST, json.loads((folder / FAST).read_bytes())]
    if mode != "mistral":
        yield [CONFIG, {name: value for name, value in _settings(folder).items() if name not in IRRELEVANT}]
    patterns = (CODE,) if fast else (CODE, *VOCABULARIES)
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}):
        yield [path.name, hashlib.sha256(path.read_bytes()).hexdigest()]


def _settings(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG).is_file():
        return {}
    settings = json.loads((folder / CONFIG).read_bytes())
    if not isinstance(settings, dict):
        raise ValueError(f"{CONFIG} is no object")  # noqa: TRY004 - as what is no JSON at all
    return settings


def _own_templates(source: TokenizerSource) -> dict[str, str]:
    """Chat templates by name, as transformers reads them: their own files before those in the tokenizer's settings."""
    try:
        return dict(_found_templates(source.folder()))
    except (OSError, ValueError):
        return {}  # `tokenizer_part` has told that nothing can be read there


def _found_templates(folder: Path) -> Iterable[tuple[str, str]]:
    own = _settings(folder).get("chat_template")
    listed = own if isinstance(own, list) else [{"name": DEFAULT, "template": own}] if own else []
    yield from ((str(each.get("name")), str(each.get("template"))) for each in listed if isinstance(each, dict))
    for path in sorted(folder.glob(MORE_TEMPLATES)):
        yield path.stem, path.read_text(encoding="utf-8")
    if (folder / TEMPLATE).is_file():
        yield DEFAULT, (folder / TEMPLATE).read_text(encoding="utf-8")
    if (folder / PROCESSOR_TEMPLATE).is_file():
        processors = json.loads((folder / PROCESSOR_TEMPLATE).read_bytes())
        yield "processor", str(processors.get("chat_template") if isinstance(processors, dict) else processors)


def _given(template: str) -> str:
    """The text of `--chat-template`, which names a file or is the template itself."""
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return template


def _digest(value: Any) -> str:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
