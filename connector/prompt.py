"""The digest of a prompt: what the KV of its first tokens depends on, whichever node computes it. Pure.

Token ids, LoRA name, cache salt, and each media item's content hash with its place. What a node numbers by itself,
such as vLLM's integer LoRA ids, stays out: two nodes disagree on it.
"""

import hashlib
import json
import sys
from array import array
from collections.abc import Sequence
from typing import Any, Protocol


class HasPrompt(Protocol):
    """The part of vLLM's `Request` that shapes its KV."""

    @property
    def prompt_token_ids(self) -> Sequence[int] | None: ...
    @property
    def prompt_embeds(self) -> Any: ...
    @property
    def lora_request(self) -> Any: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def mm_features(self) -> Sequence[Any]: ...


def digest(token_ids: Sequence[int], shaping: Sequence[Any] = ()) -> str:
    """SHA-256, in hex, of the token ids and of `shaping`, which must be plain JSON values."""
    ids = array("q", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    head = json.dumps([len(ids), list(shaping)], separators=(",", ":"), ensure_ascii=True).encode()
    return hashlib.sha256(head + b"\n" + ids.tobytes()).hexdigest()


def prompt_digest(request: HasPrompt, num_tokens: int) -> str:
    """The digest of the first `num_tokens` tokens of a request's prompt, and of what else shapes them."""
    return digest((request.prompt_token_ids or ())[:num_tokens], _shaping(request))


def is_plain(request: HasPrompt) -> bool:
    """Whether the prompt is token ids and nothing else: embeddings have no digest."""
    return request.prompt_token_ids is not None and request.prompt_embeds is None


def _shaping(request: HasPrompt) -> list[Any]:
    lora = None if request.lora_request is None else str(request.lora_request.lora_name)
    media = [
        [str(item.identifier), int(item.mm_position.offset), int(item.mm_position.length)]
        for item in request.mm_features
    ]
    return [lora, request.cache_salt, media]
