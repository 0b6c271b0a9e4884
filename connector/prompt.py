"""The digest of a prompt: what the KV of its first tokens depends on, whichever node computes it. Pure.

Token ids, the LoRA adapter's content (see `adapters`), cache salt, and each media item's content hash with its place.
What a node names or numbers by itself, such as adapters and their integer ids, stays out: two nodes disagree on it.

vLLM names a media item by the hash of its content, unless the client named it (`uuid`): then it is the client's word,
which says nothing of the bytes. A name that is not the form of a hash is taken for such a word (`names_media_itself`).
A client that gives a word in the form of a hash is not found out; vLLM's own caches believe it, too. The same holds of
a word beside `mm_processor_kwargs`, of which vLLM makes a hash.
"""

import hashlib
import json
import re
import sys
from array import array
from collections.abc import Sequence
from typing import Any, Protocol

_HASH = re.compile(r"[0-9a-f]{64}|[0-9a-f]{128}")
"""BLAKE3 and SHA-256, or SHA-512, as `--mm-hasher-algorithm` says."""


class HasPrompt(Protocol):
    """The part of vLLM's `Request` that shapes its KV."""

    @property
    def prompt_token_ids(self) -> Sequence[int] | None: ...
    @property
    def prompt_embeds(self) -> Any: ...
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


def prompt_digest(request: HasPrompt, num_tokens: int, adapter: str | None) -> str:
    """The digest of the first `num_tokens` tokens of a request's prompt, and of what else shapes them.

    `adapter`: the content of the request's LoRA adapter, None without one.
    """
    return digest((request.prompt_token_ids or ())[:num_tokens], [adapter, request.cache_salt, _media(request)])


def is_plain(request: HasPrompt) -> bool:
    """Whether the prompt is token ids and nothing else: embeddings have no digest."""
    return request.prompt_token_ids is not None and request.prompt_embeds is None


def names_media_itself(request: HasPrompt) -> bool:
    """Whether a media item goes by a client's word (or a number of this node's) and not by its content."""
    return any(_HASH.fullmatch(_media_hash(item)) is None for item in request.mm_features)


def _media(request: HasPrompt) -> list[Any]:
    return [
        [_media_hash(item), int(item.mm_position.offset), int(item.mm_position.length)] for item in request.mm_features
    ]


def _media_hash(item: Any) -> str:
    """Without the adapter's name, which vLLM puts before it where adapters change the vision tower."""
    return str(item.mm_hash or item.identifier)
