"""A node's fingerprint: named parts on which the bytes of its KV cache depend, and how two nodes' are compared. Pure.

A prefill node puts its fingerprint into every ticket. A decode node accepts a ticket only if the fingerprint in it
equals its own, part for part; a refusal names the parts that differ and what to align (`ADVICE`). What two nodes may
differ in (memory, role, ports) is in no part. The tensor-parallel size shows in those parts alone where vLLM's reader
would compute the wrong place of a peer's bytes from its own sizes (`node_fingerprint`).

`node_fingerprint` collects a node's parts. Here are also the values of those parts that come from the model's
configuration, as the engine holds it: `config.json` with `--hf-overrides` applied.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

from .ticket_fields import RefusalReason, RefusedError

MOST_PARTS = 64
LONGEST_VALUE = 128
MOST_NAMED = 4
"""Differences that a refusal describes; of further ones it gives the number."""

NONE = "none"
"""The value of a part that does not apply to a model, such as the state's type of one without state groups."""

_PART_NAME = re.compile(r"[a-z][a-z0-9_]{0,47}")
_PART_VALUE = re.compile(rf"[A-Za-z0-9_.,:;+*/=()-]{{1,{LONGEST_VALUE}}}")

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

ADVICE: Mapping[str, str] = MappingProxyType(
    {
        "vllm": "run the same vLLM release on both",
        "architecture": "serve the same model on both, with the same --model-impl",
        "model_config": "serve the same model on both, with the same config.json and --hf-overrides",
        "rope": "serve both with the same rope settings in config.json and --hf-overrides",
        "context": "start both with the same --max-model-len: this model computes otherwise above a certain length",
        "tokenizer": "start both with the same --tokenizer, --tokenizer-revision and --tokenizer-mode, and equal files",
        "chat_template": "serve both with the same chat template: the same file in the folder of --tokenizer",
        "media": "start both with the same --mm-processor-kwargs, --media-io-kwargs and video pruning",
        "checkpoint": "serve the same weights on both: the same --model, --revision and --load-format; restart a node "
        "whose files were replaced",
        "weights_label": "serve the same weights on both, with the same pdproxy_weights_label in --kv-transfer-config",
        "draft_checkpoint": "start both with the same --speculative-config, and the same weights of its draft model",
        "quantization": "start both with the same --quantization, of a checkpoint quantized in the same way",
        "dtype": "start both with the same --dtype",
        "kv_dtype": "start both with the same --kv-cache-dtype",
        "kv_shape": "serve the same model on both, with the same --kv-cache-dtype and --attention-backend",
        "kv_heads": "start both with the same --tensor-parallel-size: NIXL cannot divide this model's pages by heads",
        "kv_layout": "start both with the same VLLM_KV_CACHE_LAYOUT",
        "kv_block_bytes": "start both with the same --tensor-parallel-size, or with VLLM_KV_CACHE_LAYOUT=LBHNC: blocks "
        "of this layout cannot be divided by heads",
        "context_parallel": "start both without --cp-kv-cache-interleave-size, or both with the same and the same "
        "--decode-context-parallel-size",
        "kernel_block_size": "start both with the same --attention-backend and --block-size",
        "attention_backend": "start both with the same --attention-backend",
        "cache_groups": "serve the same model on both, with the same --speculative-config and --disable-sliding-window",
        "block_sizes": "start both with the same --block-size (vLLM's default for a hybrid model depends on "
        "--tensor-parallel-size and --mamba-ssm-cache-dtype)",
        "cache_mode": "start both with the same --mamba-cache-mode, and both or none with --enable-prefix-caching",
        "state_dtypes": "start both with the same --mamba-ssm-cache-dtype and --mamba-cache-dtype",
        "state_groups": "start both with the same --tensor-parallel-size: vLLM repeats the groups of a Mamba-2 model "
        "for ranks that have none of their own, and NIXL reads them as if they were divided (vllm#55208)",
        "state_shapes": "start both with the same number of speculative tokens in --speculative-config (the second "
        "number), and the same --tensor-parallel-size where the first one differs",
        "state_layout": "start both with the same VLLM_SSM_CONV_STATE_LAYOUT",
        "prefix_match_unit": "start both with the same --prefix-match-unit",
        "speculative": "start both with the same method and number of tokens in --speculative-config",
    }
)
"""Every part with what an operator does about a difference; parts that say what model it is come first."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Parts and their values, ordered by name. Nodes with equal fingerprints can read each other's cache bytes."""

    parts: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, parts: Mapping[str, str]) -> "Fingerprint":
        """Raises ValueError for a name or value that `read_fingerprint` would refuse."""
        for name, value in parts.items():
            if _PART_NAME.fullmatch(name) is None or _PART_VALUE.fullmatch(value) is None:
                raise ValueError(f"{name}={value!r} cannot stand in a fingerprint")
        return cls(tuple(sorted(parts.items())))

    def extended(self, more: Mapping[str, str]) -> "Fingerprint":
        """With `more` parts added or replaced."""
        return Fingerprint.of({**dict(self.parts), **more})

    @property
    def digest(self) -> str:
        """The first 16 hex digits of the SHA-256 of the canonical JSON: an object with its names in order."""
        canonical = json.dumps(dict(self.parts), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def read_fingerprint(value: Any, mine: Fingerprint | None = None) -> Fingerprint:
    """The fingerprint in a ticket, which a hostile sender may have written. Raises RefusedError.

    `mine`: this node's. Nearly every ticket's is equal to it, and then needs no further check.
    """
    if mine is not None and value == dict(mine.parts):
        return mine
    if value is None:
        raise RefusedError(RefusalReason.MISSING_FIELD, "fingerprint is missing")
    if not isinstance(value, dict) or not 0 < len(value) <= MOST_PARTS:
        raise RefusedError(RefusalReason.BAD_FIELD, f"fingerprint is not an object with 1 to {MOST_PARTS} parts")
    for name, text in value.items():
        if not isinstance(name, str) or _PART_NAME.fullmatch(name) is None:
            raise RefusedError(RefusalReason.BAD_FIELD, "a part of the fingerprint has no plain name")
        if not isinstance(text, str) or _PART_VALUE.fullmatch(text) is None:
            raise RefusedError(RefusalReason.BAD_FIELD, "a part of the fingerprint has no plain value")
    return Fingerprint(tuple(sorted(value.items())))


def differences(mine: Fingerprint, theirs: Fingerprint) -> tuple[str, ...]:
    """One sentence for each part in which the prefill node's fingerprint differs, with what to align.

    It repeats names and values of `theirs`, which `read_fingerprint` has bounded to short plain ASCII.
    """
    ours, other = dict(mine.parts), dict(theirs.parts)
    return tuple(_sentence(name, ours.get(name), other.get(name)) for name in _differing(ours, other))


def summary(sentences: tuple[str, ...]) -> str:
    """The first of `differences`, short enough for a log line."""
    more = len(sentences) - MOST_NAMED
    return "; ".join(sentences[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")


def _differing(ours: Mapping[str, str], other: Mapping[str, str]) -> Iterator[str]:
    yield from (name for name in ADVICE if ours.get(name) != other.get(name))
    yield from sorted(
        name for name in ours.keys() | other.keys() if name not in ADVICE and ours.get(name) != other.get(name)
    )


def _sentence(name: str, here: str | None, there: str | None) -> str:
    advice = ADVICE.get(name, "run the same release of this connector on both")
    if here is None or there is None:
        where = "here" if there is None else "on the prefill node"
        return f"{name} is known {where} only: run the same release of this connector on both"
    return f"{name} is {here} here, {there} on the prefill node: {advice}"


def model_digest(config: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """16 hex digits over everything in a configuration that can change what is computed, and over `settings`.

    Rope and quantization have parts of their own.
    """
    own_part = dict.fromkeys(("quantization_config", "compression_config"))
    return _digest([_normalized({**config, **own_part}, skip_rope=True), _normalized(settings)])


def rope_text(config: Mapping[str, Any]) -> str:
    """Rope and context settings of the whole configuration as `path=value`, ordered by path."""
    found = {f"{name}={_setting_text(value)}" for name, value in _rope_settings(_normalized(config))}
    return short(",".join(sorted(found))) if found else NONE


def context_text(config: Mapping[str, Any], max_model_len: int) -> str:
    """How `--max-model-len` changes what a model computes: mostly not at all, so that two nodes may differ in it.

    vLLM takes the long factors of `longrope` once `max_model_len` exceeds the length before scaling
    (`phi3_long_rope_scaled_rope.py`), and scales Llama 4's queries above `LONGER_THAN` tokens.
    """
    settings = {name.rpartition(".")[2]: value for name, value in _rope_settings(_normalized(config))}
    if settings.get("rope_type", settings.get("type")) == "longrope":
        original = settings.get("original_max_position_embeddings", settings.get("max_position_embeddings", 0))
        return "long" if max_model_len > original else "short"
    if str(config.get("model_type", "")).startswith("llama4"):
        return "long" if max_model_len > LONGER_THAN else "short"
    return NONE


def quantization_text(method: str | None, asked: Any, found: Any) -> str:
    """The method's name, with a digest of its settings on the command line (`asked`) and in the checkpoint
    (`found`)."""
    settings = _normalized({"asked": asked or None, "found": found or None})
    if not settings:
        return NONE if method is None else short(method)
    return short(f"{method}:{_digest(settings)}")


def settings_text(settings: Mapping[str, Any]) -> str:
    """A digest of the settings that are set to something; `NONE` when none is."""
    given = {name: value for name, value in settings.items() if value}
    return _digest(_normalized(given)) if given else NONE


def backends_text(names: Iterable[str], ranks: int, interleave: int, block_size: int) -> str:
    """All attention backends of a rank, in the order of the alphabet. With decode context parallelism that does not
    deal out whole blocks: `@` and over how many ranks, how many tokens at a time (`read_backends`)."""
    text = "+".join(sorted(set(names)))
    return text if ranks == 1 or interleave == block_size else f"{text}@{ranks}x{interleave}"


def read_backends(text: str) -> tuple[str, str]:
    """The backends in such a text, and how context parallelism deals out tokens, `NONE` where in whole blocks."""
    names, _, dealt = text.partition("@")
    return names, dealt or NONE


def short(text: str) -> str:
    """`text` as a valid value: other characters are replaced, and what is too long is cut; a digest then makes it
    unique."""
    plain = _UNUSUAL.sub("_", text)
    if plain == text and 0 < len(text) <= LONGEST_VALUE:
        return text
    return f"{plain[: LONGEST_VALUE - 17]}:{_digest(text)}"


def _rope_settings(value: Any, path: str = "", inside: bool = False) -> Iterator[tuple[str, Any]]:
    """Every rope setting by its path, in which `rope_parameters` and the like are left out."""
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


def _normalized(value: Any, *, skip_rope: bool = False) -> Any:
    """The same as plain JSON values, without nulls and `IGNORED` keys; 10000 and 10000.0 are one number."""
    if isinstance(value, Enum):
        value = value.value
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        kept = ((str(name), inner) for name, inner in value.items() if inner is not None and name not in IGNORED)
        return {
            name: _normalized(inner, skip_rope=skip_rope)
            for name, inner in kept
            if not (skip_rope and _ROPE.fullmatch(name))
        }
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=str) if isinstance(value, set | frozenset) else value
        return [_normalized(inner, skip_rope=skip_rope) for inner in items]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return type(value).__qualname__ if " at 0x" in repr(value) else repr(value)


def _setting_text(value: Any) -> str:
    return str(value) if not isinstance(value, list) else _digest(value)


def _digest(value: Any) -> str:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
