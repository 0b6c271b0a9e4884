"""What the bytes of a node's KV cache depend on: an ordered set of named parts with short values. Pure.

A prefill node puts its fingerprint into every ticket; a decode node takes a ticket only if the fingerprint in it is its
own, part for part. What two nodes may differ in (tensor-parallel size, memory, role, ports) is in no part. How a node
makes its own: `node_fingerprint`.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from connector.fields import Reason, Refused

MOST_PARTS = 64
LONGEST_VALUE = 128
MOST_NAMED = 4
"""Differences that a refusal spells out; of further ones it gives the number."""

NONE = "none"
"""The value of a part that does not apply to a model, such as the state's type of one without state groups."""

_NAME = re.compile(r"[a-z][a-z0-9_]{0,47}")
_VALUE = re.compile(rf"[A-Za-z0-9_.,:;+*/=()-]{{1,{LONGEST_VALUE}}}")

ADVICE: Mapping[str, str] = MappingProxyType(
    {
        "vllm": "run the same vLLM release on both",
        "architecture": "serve the same model on both, with the same --model-impl",
        "model_config": "serve the same model on both, with the same config.json and --hf-overrides",
        "rope": "serve both with the same rope settings in config.json and --hf-overrides",
        "context": "start both with the same --max-model-len: this model computes otherwise above a certain length",
        "media": "start both with the same --mm-processor-kwargs, --media-io-kwargs and video pruning",
        "checkpoint": "serve the same weights on both: the same --model, --revision and --load-format; restart a node "
        "whose files were replaced",
        "draft_checkpoint": "start both with the same --speculative-config, and the same weights of its draft model",
        "quantization": "start both with the same --quantization, of a checkpoint quantized in the same way",
        "dtype": "start both with the same --dtype",
        "kv_dtype": "start both with the same --kv-cache-dtype",
        "kv_shape": "serve the same model on both, with the same --kv-cache-dtype and --attention-backend",
        "kv_layout": "start both with the same VLLM_KV_CACHE_LAYOUT",
        "kernel_block_size": "start both with the same --attention-backend and --block-size",
        "attention_backend": "start both with the same --attention-backend",
        "cache_groups": "serve the same model on both, with the same --speculative-config and --disable-sliding-window",
        "block_sizes": "start both with the same --block-size (vLLM's default for a hybrid model depends on "
        "--tensor-parallel-size and --mamba-ssm-cache-dtype)",
        "cache_mode": "start both with the same --mamba-cache-mode, and both or none with --enable-prefix-caching",
        "state_dtypes": "start both with the same --mamba-ssm-cache-dtype and --mamba-cache-dtype",
        "state_shapes": "start both with the same number of speculative tokens in --speculative-config",
        "state_layout": "start both with the same VLLM_SSM_CONV_STATE_LAYOUT",
        "speculative": "start both with the same method and number of tokens in --speculative-config",
    }
)
"""Every part, the likeliest to differ by mistake of its model first, with what an operator does about a difference."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Parts and their values, in the order of the names. Two nodes with equal ones mean the same by the same bytes."""

    parts: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, parts: Mapping[str, str]) -> "Fingerprint":
        """Raises ValueError for a name or value that no other node would read."""
        for name, value in parts.items():
            if _NAME.fullmatch(name) is None or _VALUE.fullmatch(value) is None:
                raise ValueError(f"{name}={value!r} cannot stand in a fingerprint")
        return cls(tuple(sorted(parts.items())))

    def extended(self, more: Mapping[str, str]) -> "Fingerprint":
        """With `more` parts, or with other values of those that it has."""
        return Fingerprint.of({**dict(self.parts), **more})

    @property
    def digest(self) -> str:
        """The first 16 hex digits of the SHA-256 of the canonical JSON: an object with its names in order."""
        canonical = json.dumps(dict(self.parts), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def read_fingerprint(value: Any, mine: Fingerprint | None = None) -> Fingerprint:
    """The fingerprint that a ticket carries, whoever wrote it. Raises `Refused`.

    `mine`: this node's, to which nearly every ticket's is equal; then there is nothing left to check.
    """
    if mine is not None and value == dict(mine.parts):
        return mine
    if value is None:
        raise Refused(Reason.MISSING_FIELD, "fingerprint is missing")
    if not isinstance(value, dict) or not 0 < len(value) <= MOST_PARTS:
        raise Refused(Reason.BAD_FIELD, f"fingerprint is not an object with 1 to {MOST_PARTS} parts")
    for name, text in value.items():
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise Refused(Reason.BAD_FIELD, "a part of the fingerprint has no plain name")
        if not isinstance(text, str) or _VALUE.fullmatch(text) is None:
            raise Refused(Reason.BAD_FIELD, "a part of the fingerprint has no plain value")
    return Fingerprint(tuple(sorted(value.items())))


def differences(mine: Fingerprint, theirs: Fingerprint) -> tuple[str, ...]:
    """One sentence for each part in which the prefill node's fingerprint is not this node's; what to align is in it.

    It repeats names and values of `theirs`, which `read_fingerprint` has bounded to short plain ASCII.
    """
    ours, other = dict(mine.parts), dict(theirs.parts)
    return tuple(_sentence(name, ours.get(name), other.get(name)) for name in _differing(ours, other))


def summary(sentences: tuple[str, ...]) -> str:
    """As much of `differences` as a log line bears."""
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
