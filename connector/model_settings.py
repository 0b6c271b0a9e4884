"""What a model's configuration says of its computation, as values of a fingerprint. Pure.

It takes the configuration as the engine holds it, which is `config.json` with `--hf-overrides` applied.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from connector.fingerprint import LONGEST_VALUE, NONE

IGNORED = frozenset(
    {
        # Where it came from, and which release wrote it.
        "_name_or_path",
        "name_or_path",
        "_commit_hash",
        "transformers_version",
        "auto_map",
        # Parts of their own.
        "architectures",
        "dtype",
        "torch_dtype",
        # What other callers than an engine ask for.
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "use_cache",
        "initializer_range",
        # vLLM's model classes write these into the configuration while they load: where scheduler and worker share a
        # process it shows there, elsewhere not. Each follows from other parts.
        "max_model_len",
        "attn_temperature_tuning",
        "_attn_implementation",
        "_attn_implementation_internal",
        "draft_vocab_size",
        "target_layer_count",
        "total_num_heads",
        "total_num_kv_heads",
    }
)

LONGER_THAN = 32768
"""Tokens of `max_model_len` above which vLLM's Llama 4 scales its queries (`llama4.py`, `attn_temperature_tuning`)."""

_ROPE = re.compile(r"rope(_.*)?|rotary_.*|partial_rotary_factor|(original_)?max_position_embeddings")
_UNUSUAL = re.compile(r"[^A-Za-z0-9_.,:;+*/=()-]")


def model_digest(config: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """16 hex digits over all of a configuration that can shape a computation, and over `settings`. Rope and the
    quantization have parts of their own."""
    own_part = dict.fromkeys(("quantization_config", "compression_config"))
    return _digest([_plain({**config, **own_part}, skip_rope=True), _plain(settings)])


def rope_text(config: Mapping[str, Any]) -> str:
    """Rope and context settings of the whole configuration as `place=value`, in the order of the places."""
    found = {f"{name}={_text(value)}" for name, value in _rope_settings(_plain(config))}
    return short(",".join(sorted(found))) if found else NONE


def context_text(config: Mapping[str, Any], max_model_len: int) -> str:
    """What of `--max-model-len` a model computes by: mostly nothing, so that two nodes may differ in it.

    vLLM takes the long factors of `longrope` once `max_model_len` exceeds the length before scaling
    (`phi3_long_rope_scaled_rope.py`), and scales Llama 4's queries above `LONGER_THAN` tokens.
    """
    settings = {name.rpartition(".")[2]: value for name, value in _rope_settings(_plain(config))}
    if settings.get("rope_type", settings.get("type")) == "longrope":
        original = settings.get("original_max_position_embeddings", settings.get("max_position_embeddings", 0))
        return "long" if max_model_len > original else "short"
    if str(config.get("model_type", "")).startswith("llama4"):
        return "long" if max_model_len > LONGER_THAN else "short"
    return NONE


def quantization_text(method: str | None, asked: Any, found: Any) -> str:
    """The method's name, with a digest of what the command line (`asked`) and the checkpoint (`found`) say of it."""
    told = _plain({"asked": asked or None, "found": found or None})
    if not told:
        return NONE if method is None else short(method)
    return short(f"{method}:{_digest(told)}")


def settings_text(settings: Mapping[str, Any]) -> str:
    """A digest of settings that are not left at nothing; `NONE` when all are."""
    given = {name: value for name, value in settings.items() if value}
    return _digest(_plain(given)) if given else NONE


def short(text: str) -> str:
    """`text` with what cannot stand in a fingerprint replaced; its digest in the place of what is too long."""
    plain = _UNUSUAL.sub("_", text)
    if plain == text and 0 < len(text) <= LONGEST_VALUE:
        return text
    return f"{plain[: LONGEST_VALUE - 17]}:{_digest(text)}"


def _rope_settings(value: Any, path: str = "", inside: bool = False) -> Iterator[tuple[str, Any]]:
    """Every setting of rope by its place, which `rope_parameters` and its like add nothing to."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    for name, inner in value.items():
        rope = inside or _ROPE.fullmatch(str(name)) is not None
        if isinstance(inner, dict):
            yield from _rope_settings(inner, path if rope and not inside else f"{path}{name}.", rope)
        elif rope:
            yield f"{path}{name}", inner
        elif isinstance(inner, list) and any(isinstance(each, dict) for each in inner):
            yield from _rope_settings(inner, f"{path}{name}.")


def _plain(value: Any, *, skip_rope: bool = False) -> Any:
    """JSON values alone. What is null says nothing; 10000 and 10000.0 are one number."""
    if isinstance(value, Enum):
        value = value.value
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        kept = ((str(name), inner) for name, inner in value.items() if inner is not None and name not in IGNORED)
        return {
            name: _plain(inner, skip_rope=skip_rope)
            for name, inner in kept
            if not (skip_rope and _ROPE.fullmatch(name))
        }
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=str) if isinstance(value, set | frozenset) else value
        return [_plain(inner, skip_rope=skip_rope) for inner in items]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return type(value).__qualname__ if " at 0x" in repr(value) else repr(value)


def _text(value: Any) -> str:
    return str(value) if not isinstance(value, list) else _digest(value)


def _digest(value: Any) -> str:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
